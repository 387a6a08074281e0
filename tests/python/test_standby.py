"""Standbys of `rekindle run` that are Python programs: a process waits where it reaches the agent."""
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import types

import pytest
from conftest import BINARY, PATIENCE_S, eventually, run_python
from safetensors.numpy import save_file

import rekindle.errors
from rekindle import session, standby
from rekindle.vllm import waiting
from rekindle.vllm.waiting import wait_in_standby

np = pytest.importorskip("numpy")
WORKER = pathlib.Path(__file__).with_name("standby_worker.py")


@pytest.fixture(scope="module")
def model(memory_directory, fleet):
    checkpoint = memory_directory / "model"
    checkpoint.mkdir()
    save_file({"w": np.arange(4096, dtype=np.float32)}, checkpoint / "model.safetensors")
    fleet.publish("m@1", checkpoint)
    return "m@1"


class Run:
    """A `rekindle run --standby` of standby_worker.py."""

    def __init__(self, fleet, directory, model, instance, *words):
        self.out, self.err = directory / f"{instance}.out", directory / f"{instance}.err"
        with open(self.out, "ab") as out, open(self.err, "ab") as err:
            self.process = subprocess.Popen(
                [BINARY, "run", "--model", model, "--instance", instance, "--standby", "1",
                 "--store", fleet.store("a"), "--", sys.executable, WORKER, *words],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env={**fleet.environment, "PYTHONPATH": os.environ["PYTHONPATH"],
                     "REKINDLE_LIBRARY": os.environ["REKINDLE_LIBRARY"]})

    def said(self, word):
        lines = [line.split() for line in self.out.read_text().splitlines()]
        return [line[1:] for line in lines if line[0] == word]

    def standbys_ready(self):
        return self.err.read_text().count(" is ready after ")

    def close(self):
        self.process.terminate()
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def start(fleet, memory_directory, model):
    running = []

    def one(instance, *words):
        running.append(Run(fleet, memory_directory, model, instance, *words))
        return running[-1]
    yield one
    for run in running:
        run.process.kill()
        run.process.wait()


def ranks_of(fleet, instance):
    (found,) = [one for one in fleet.run("status", "--store", fleet.store("a"))["instances"]
                if one["instance"] == instance]
    return found


def test_a_program_that_knows_nothing_of_standbys_takes_over(fleet, start):
    run = start("plain")
    eventually(lambda: run.said("ready") and run.standbys_ready() == 1)
    (first, failures, _), = run.said("ready")
    assert failures == "0" and len(run.said("started")) == 2
    # The standby is no rank, and has not taken the one of the worker that serves.
    found = ranks_of(fleet, "plain")
    assert found["state"] == "COMMITTED" and [one["pid"] for one in found["sessions"]] == [int(first)]
    (second,) = [pid for (pid,) in run.said("started") if pid != first]
    os.kill(int(first), signal.SIGKILL)
    eventually(lambda: len(run.said("ready")) == 2)
    assert run.said("ready")[1] == [second, "1", "None"]
    eventually(lambda: run.standbys_ready() == 2)
    # Handlers of signals run while a process waits.
    assert run.close() == 143
    assert "did not stop" not in run.err.read_text()


def test_a_program_may_wait_where_it_likes(start):
    run = start("explicit", "explicit")
    eventually(lambda: run.said("ready") and run.standbys_ready() == 1)
    (first, *waited), = run.said("waited")
    assert waited == ["False", "False"]
    os.kill(int(first), signal.SIGKILL)
    eventually(lambda: len(run.said("ready")) == 2)
    assert run.said("waited")[1][1:] == ["True", "False"]


def test_a_process_that_is_no_standby_does_not_wait():
    assert standby.wait() is False


@pytest.fixture
def door(monkeypatch):
    name = f"rekindle-standby-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        listener.settimeout(PATIENCE_S)
        monkeypatch.setenv("REKINDLE_STANDBY", name)
        yield listener


def test_a_deadline_ends_the_wait(door):
    with pytest.raises(rekindle.errors.TimeoutError):
        standby.wait(0.01)
    assert os.environ["REKINDLE_STANDBY"]


def test_the_answer_may_come_in_pieces(door, monkeypatch):
    monkeypatch.setenv("REKINDLE_FAILURES", "0")

    def answer():
        connection, _ = door.accept()
        with connection:
            for part in (b"REKINDLE_FAIL", b"URES=3\nREKINDLE_NEW=", b"a=b\ng", b"o\n"):
                connection.sendall(part)
    thread = threading.Thread(target=answer)
    thread.start()
    monkeypatch.setenv("REKINDLE_NEW", "")
    assert standby.wait(PATIENCE_S) is True
    thread.join()
    assert os.environ["REKINDLE_FAILURES"] == "3" and os.environ["REKINDLE_NEW"] == "a=b"
    assert "REKINDLE_STANDBY" not in os.environ


@pytest.mark.parametrize("said", [b"", b"REKINDLE_FAILURES=1\n", b"x" * (1 << 17)])
def test_an_end_without_go_means_that_run_has_ended(door, said):
    def answer():
        connection, _ = door.accept()
        with connection:
            connection.sendall(said)
    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(rekindle.errors.UnavailableError, match="has ended"):
        standby.wait(PATIENCE_S)
    thread.join()


def test_the_wait_takes_nothing_of_the_timeout_of_an_attach(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(session, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(standby, "wait", lambda: now.__setitem__(0, 1000.0))
    monkeypatch.setattr(session, "Native", lambda store, timeout: standby.wait())
    given = []
    monkeypatch.setattr(session._attaching, "attach_native",
                        lambda native, request, timeout: given.append(timeout))
    session.Session._open(types.SimpleNamespace(_store=None), None, 10.0)
    assert given == [10.0]


def test_c_waits_in_rk_connect_too():
    # What the package does is left out, so that only librekindle can notice.
    done = run_python(
        "from rekindle import _native, standby\n"
        "standby.wait = lambda: None\n"
        "_native.Native('/nowhere', 1.0)", check=False, REKINDLE_STANDBY="rekindle-standby-nobody")
    assert "the `rekindle run` that started it has ended" in done.stderr


def parallel(**more):
    return types.SimpleNamespace(**{
        "distributed_executor_backend": "mp", "data_parallel_backend": "mp", "nnodes_within_dp": 1,
        "data_parallel_rank_local": None, "data_parallel_index": 0, "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1, **more})


@pytest.mark.parametrize("more, gpu", [
    ({}, 1), ({"data_parallel_rank_local": 2}, 5), ({"data_parallel_index": 1}, 3),
    ({"data_parallel_rank_local": 2, "pipeline_parallel_size": 2}, 9),
    ({"data_parallel_rank_local": 2, "distributed_executor_backend": "ray"}, 1),
    ({"data_parallel_rank_local": 2, "data_parallel_backend": "ray"}, 1),
    ({"data_parallel_rank_local": 2, "nnodes_within_dp": 2}, 1)])
def test_a_standby_of_vllm_starts_the_gpu_that_its_worker_will_have(monkeypatch, more, gpu):
    torch = pytest.importorskip("torch")
    for name, members in {
            "vllm.v1.worker": {"gpu_model_runner": None},
            "vllm.model_executor.model_loader.utils": {"get_model_architecture": lambda _: None}}.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))
    begun = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 16)
    monkeypatch.setattr(torch, "zeros", lambda size, device: begun.append(device))
    monkeypatch.setattr(waiting.gc, "freeze", lambda: None)
    waiting._start_up(types.SimpleNamespace(
        worker=types.SimpleNamespace(local_rank=1),
        vllm_config=types.SimpleNamespace(model_config="llama", parallel_config=parallel(**more))))
    assert begun == [f"cuda:{gpu}"]


def test_a_worker_of_vllm_waits_before_it_measures_memory(door, monkeypatch):
    """Once, with the model imported and the environment of its turn."""
    pytest.importorskip("torch")
    done = []

    class WorkerWrapperBase:
        vllm_config = types.SimpleNamespace(model_config="llama", parallel_config=parallel())
        worker = types.SimpleNamespace(local_rank=0)

        def init_device(self):
            done.append(("measured", os.environ["REKINDLE_FAILURES"]))

    for name, members in {
            "vllm.v1.worker": {"gpu_model_runner": None},
            "vllm.v1.worker.worker_base": {"WorkerWrapperBase": WorkerWrapperBase},
            "vllm.model_executor.model_loader.utils":
                {"get_model_architecture": lambda config: done.append(("imported", config))}}.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))
    monkeypatch.setenv("REKINDLE_FAILURES", "0")
    monkeypatch.setattr(waiting.gc, "freeze", lambda: done.append(("frozen", None)))

    def answer():
        connection, _ = door.accept()
        with connection:
            assert done == [("imported", "llama"), ("frozen", None)]
            connection.sendall(b"REKINDLE_FAILURES=1\ngo\n")
    thread = threading.Thread(target=answer)
    thread.start()
    # vLLM registers plugins several times in a process.
    wait_in_standby()
    wait_in_standby()
    WorkerWrapperBase().init_device()
    thread.join()
    assert done == [("imported", "llama"), ("frozen", None), ("measured", "1")]


def test_a_worker_of_vllm_that_is_no_standby_stays_as_it_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", None)
    wait_in_standby()

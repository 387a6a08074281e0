"""Tests of a model with several workers, for doubles of devices (test_models.py) and for GPUs
(gpu/test_models_gpu.py), and the processes that they start.
"""
import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import pytest
from conftest import Rekindle, eventually

import rekindle as rk

PATIENCE_S = 180  # imports, a CUDA context and gigabytes of random weights
SCRIPT = pathlib.Path(__file__).resolve().with_name("model_process.py")


class Devices(NamedTuple):
    kind: str  # "double" or "cuda"
    count: int
    size: str  # of the model: of model_process.SIZES

    def name(self, rank):
        return f"{self.kind}:{rank}"

    @property
    def of_agent(self):
        return "auto" if self.kind == "cuda" else f"double:{self.count}"

class Process:
    """model_process.py in a process of its own. It has imported torch when it is told its role."""

    def __init__(self, log):
        self.log = log
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
        os.set_blocking(self.process.stdout.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.process.stdout, selectors.EVENT_READ)
        self._rest = b""

    def says(self):
        """The next line."""
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            assert left > 0, f"it says nothing: {self.end_of_log()}"
            if not self._selector.select(left):
                continue
            more = self.process.stdout.read()
            assert more, f"it has ended: {self.end_of_log()}"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def tell(self, do, **arguments):
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, do, **arguments):
        self.tell(do, **arguments)
        return self.says()

    def end_of_log(self):
        return self.log.read_text(errors="replace")[-3000:]

    def kill(self):
        """kill -9, and gone."""
        self.process.send_signal(signal.SIGKILL)
        self._gone()

    def end(self):
        """As a worker ends that has closed its session; its exit code."""
        self.process.stdin.close()
        self._gone()
        return self.process.returncode

    def _gone(self):
        self.process.wait(PATIENCE_S)
        self._selector.close()
        self.process.stdin.close()
        self.process.stdout.close()

    def close(self):
        if self.process.poll() is None:
            self.kill()


def ask_all(workers, do):
    """All at once."""
    for worker in workers:
        worker.tell(do)
    return [worker.says() for worker in workers]


def all_serve(workers, digest, at_least=3):
    """Until each has answered so often with it, since the last change."""
    def so_far():
        served = [said["served"] for said in ask_all(workers, "history")]
        return all(one and one[-1][0] == digest and one[-1][1] >= at_least for one in served)
    eventually(so_far, PATIENCE_S)


class Starter:
    """Starts processes. The next one imports what it needs while those that run are looked at."""

    def __init__(self, directory):
        self._directory, self._started = directory, []
        self._spare = self._new()

    def _new(self):
        self._started.append(Process(self._directory / f"model-{len(self._started)}.log"))
        return self._started[-1]

    def start(self, role, **options):
        taken, self._spare = self._spare, self._new()
        taken.tell(role, **options)
        return taken

    def close(self):
        for process in self._started:
            process.close()


@pytest.fixture(scope="module")
def model_fleet(memory_directory, devices):
    running = Rekindle(memory_directory, gpu=devices.of_agent)
    yield running
    running.close()


@pytest.fixture(scope="module")
def starter(model_fleet):
    starting = Starter(model_fleet.directory)
    yield starting
    starting.close()


@pytest.fixture(scope="module")
def versions(model_fleet, starter, devices):
    """By number, what the trainer has published, from its device: `m@1`, and `m@2` that is a step
    of the optimizer later."""
    agent = str(model_fleet.store("a"))
    trainer = starter.start("trainer", size=devices.size, device=devices.name(0))
    assert trainer.says() == {"ready": True}
    known = {1: trainer.ask("publish", version="m@1", agent=agent)}
    trainer.ask("step")
    known[2] = trainer.ask("publish", version="m@2", agent=agent)
    assert trainer.end() == 0, trainer.end_of_log()
    assert len({one[key] for one in known.values() for key in ("logits", "weights")}) == 4
    return known


@pytest.fixture
def start(model_fleet, starter, devices):
    """Starts worker RANK of a group; all are gone at the end."""
    workers = []

    def worker(group, rank, *, version=1, generation=0, node="a", stop=False):
        workers.append(starter.start(
            "worker", model="m", version=version, group=group, instance=f"{group}-w{rank}",
            generation=generation, device=devices.name(rank), stop=stop,
            agent=str(model_fleet.store(node))))
        return workers[-1]
    yield worker
    for one in workers:
        one.close()


@pytest.fixture
def ranks(count, devices):
    """Of `count` workers, each with a device of its own."""
    if count > devices.count:
        pytest.skip(f"needs {count} GPUs, there are {devices.count}")
    return range(count)


def ready(worker):
    assert worker.says() == {"ready": True, "path": "ipc"}


def check(said, version):
    assert said == {key: version[key] for key in ("logits", "weights")}


class ModelTests:
    """For a class that says how many workers there are to be, in a module with the fixture
    `devices`, of the module's scope."""

    counts: tuple[int, ...]

    def pytest_generate_tests(self, metafunc):
        if "count" in metafunc.fixturenames:
            metafunc.parametrize("count", self.counts)

    def test_the_trainer_publishes_from_its_device(self, versions, devices):
        for version in versions.values():
            assert version["devices"] == ["cuda" if devices.kind == "cuda" else "cpu"]
            assert version["bytes"] > (4 << 30 if devices.size == "large" else 1 << 18)

    def test_killed_workers_come_back_with_the_same_logits(self, ranks, start, versions):
        group, last = f"killed-{len(ranks)}", ranks[-1]
        workers = [start(group, rank) for rank in ranks]
        for worker in workers:
            ready(worker)
        for said in ask_all(workers, "answers"):
            check(said, versions[1])
        ask_all(workers, "serve")
        all_serve(workers, versions[1]["logits"])
        workers.pop().kill()

        loading = start(group, last, generation=1, stop=True)
        said = loading.says()
        assert said["path"] == "ipc" and 0 < said["loading"] < said["of"]
        loading.kill()

        workers.append(start(group, last, generation=2))
        ready(workers[-1])
        workers[-1].ask("serve")
        all_serve(workers, versions[1]["logits"])
        for said in ask_all(workers, "answers"):
            check(said, versions[1])
        for said in ask_all(workers, "history"):  # of the others, also while one was away
            assert [digest for digest, _ in said["served"]] == [versions[1]["logits"]]
        assert [worker.end() for worker in workers] == [0] * len(workers)

    def test_an_update_while_serving_comes_to_all_at_once(self, ranks, start, versions,
                                                          model_fleet):
        group = f"updated-{len(ranks)}"
        workers = [start(group, rank) for rank in ranks]
        for worker in workers:
            ready(worker)
        ask_all(workers, "serve")
        all_serve(workers, versions[1]["logits"])

        result = rk.update("m@2", group=group, gather=PATIENCE_S, timeout=PATIENCE_S,
                           agent=model_fleet.store("a"))
        for said in ask_all(workers, "answers"):
            check(said, versions[2])
        assert (result.members, result.ready) == (len(ranks), len(ranks))
        if len(ranks) > 1:
            assert result.by_broadcast == len(ranks)

        all_serve(workers, versions[2]["logits"])
        for said in ask_all(workers, "history"):  # no answer was of both, none went back
            assert [digest for digest, _ in said["served"]] == [
                versions[1]["logits"], versions[2]["logits"]]
        assert [worker.end() for worker in workers] == [0] * len(workers)

    def test_what_a_trainer_published_from_its_device_loads_elsewhere(self, start, versions,
                                                                      devices, model_fleet):
        """On another host, which has to fetch it, and another device where there is one."""
        def held_there():
            holdings = rk.status(agent=model_fleet.store("b"))["holdings"]
            return [(one["model"], one["version"], one["complete"]) for one in holdings
                    if one["whole"]]  # and not only its files

        assert held_there() == []
        worker = start("elsewhere", devices.count - 1, version=2, node="b")
        ready(worker)
        check(worker.ask("answers"), versions[2])
        assert held_there() == [("m", 2, True)]
        assert worker.end() == 0

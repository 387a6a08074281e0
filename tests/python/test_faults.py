"""What is lost: agents, parents, workers."""
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import PATIENCE_S, eventually

import rekindle


@pytest.fixture
def published(fleet, store):
    known = {"w": torch.arange(50_000, dtype=torch.float32), "b": torch.ones(3)}
    rekindle.publish(known, "m@1", agent=store)
    return known


def wait_for_loss(session):
    """However long the agent's next life takes to come, the session is of the old one."""
    with pytest.raises(rekindle.PeerLostError):
        session.wait_for_update(timeout=PATIENCE_S)


@pytest.mark.parametrize("device", [None, "double:0"])
def test_an_agent_that_is_killed_is_lost_and_the_next_one_has_everything(fleet, store, published,
                                                                         device):
    session = rekindle.attach("m", device=device, agent=store)
    kept = {name: tensor.clone() if device else tensor for name, tensor in session}
    session.commit(timeout=PATIENCE_S)
    fleet.kill_agent("a")
    wait_for_loss(session)
    with pytest.raises(rekindle.PeerLostError):
        session.loaded()
    assert torch.equal(kept["w"], published["w"])  # stays mapped
    fleet.start_agent("a")
    with rekindle.attach("m", device=device, agent=store, timeout=PATIENCE_S) as again:
        into = {name: torch.zeros_like(tensor) for name, tensor in published.items()}
        again.load_into(into)
        again.commit(timeout=PATIENCE_S)
        assert torch.equal(into["w"], published["w"])
    session.close()
    assert torch.equal(kept["w"], published["w"])


def test_an_attach_waits_for_an_agent_that_is_away(fleet, store, published):
    fleet.kill_agent("a")
    with pytest.raises(rekindle.UnavailableError):
        rekindle.attach("m", agent=store, timeout=0.2)
    code = """
import rekindle, sys
print(rekindle.attach("m", agent=sys.argv[1], timeout=None).version)
"""
    waiting = subprocess.Popen([sys.executable, "-c", code, str(store)], stdout=subprocess.PIPE)
    fleet.start_agent("a")
    said, _ = waiting.communicate(timeout=PATIENCE_S)
    assert said.split() == [b"1"]


def test_a_child_may_not_use_its_parents_session(fleet, store, published):
    session = rekindle.attach("m", instance="parent", agent=store)
    tensors = dict(session)
    read, write = os.pipe()
    child = os.fork()  # which has none of torch's threads: only small tensors are compared there
    if child == 0:
        answers = []
        try:
            for use in (session.loaded, lambda: list(session), session.tensors,
                        lambda: session.version and session.bytes_done,
                        lambda: session.load_into(tensors), lambda: session.wait_for_update(0)):
                try:
                    use()
                    answers.append("used")
                except rekindle.StaleError as why:
                    answers.append("fork" if "fork" in str(why) else str(why))
            answers.append("same" if torch.equal(tensors["b"], published["b"]) else "other")
            session.close()
            del tensors, session
            with rekindle.attach("m", agent=store) as own:
                answers.append("same" if torch.equal(dict(own)["b"], published["b"]) else "other")
        except BaseException as why:
            answers.append(repr(why))
        os.write(write, ",".join(answers).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode().split(",")
    assert os.waitpid(child, 0)[1] == 0
    assert said == ["fork"] * 6 + ["same"] * 2
    session.commit(timeout=PATIENCE_S)  # the parent's goes on
    session.close()


WORKER = """
import sys, time, rekindle
session = rekindle.attach("m", device="double:0", instance="killed", agent=sys.argv[1])
iterator = iter(session)
next(iterator)
print("half", flush=True)
time.sleep(600)
"""


def test_a_worker_killed_amid_its_load_leaves_its_place_to_the_next(fleet, store, published):
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(store)], stdout=subprocess.PIPE)
    assert worker.stdout.readline().split() == [b"half"]
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    with rekindle.attach("m", device="double:0", instance="killed", generation=1,
                         agent=store) as session:
        into = {name: torch.zeros_like(tensor) for name, tensor in published.items()}
        session.load_into(into)
        session.commit(timeout=PATIENCE_S)
    assert torch.equal(into["w"], published["w"])


def test_an_interrupt_ends_a_wait_without_end(fleet, store, published):
    code = """
import signal, sys, rekindle
signal.signal(signal.SIGINT, signal.default_int_handler)
session = rekindle.attach("m", instance="patient", agent=sys.argv[1])
list(session); session.commit()
try:
    print("waits", flush=True)
    session.wait_for_update()
except KeyboardInterrupt:
    print("interrupted", session.version)
"""
    worker = subprocess.Popen([sys.executable, "-c", code, str(store)], stdout=subprocess.PIPE)
    assert worker.stdout.readline().split() == [b"waits"]
    worker.send_signal(signal.SIGINT)
    said, _ = worker.communicate(timeout=PATIENCE_S)
    assert said.split() == [b"interrupted", b"1"] and worker.returncode == 0


def test_a_version_that_is_retired_ends_its_sessions(fleet, store):
    rekindle.publish({"w": torch.ones(5)}, "old@1", agent=store)
    session = rekindle.attach("old", agent=store)
    kept = dict(session)
    fleet.run("retire", "old@1", "--store", store)

    def is_over():
        try:
            session.bytes_done
            session.wait_for_update(timeout=0)
            return False
        except rekindle.StaleError:
            return True

    eventually(is_over)
    assert torch.equal(kept["w"], torch.ones(5))


def test_a_grandchild_does_not_close_what_its_parent_has_opened_since(fleet, store, published):
    """The child's copy of the session's socket is closed once: its descriptor is somebody else's
    afterwards."""
    with rekindle.attach("m", agent=store):
        child = os.fork()
        if child == 0:
            opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]
            grandchild = os.fork()
            if grandchild == 0:
                try:
                    for descriptor in opened:
                        os.fstat(descriptor)
                except OSError:
                    os._exit(1)
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

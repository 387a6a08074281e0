"""Deaths in the middle of a joint publication, with real processes."""
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading

import numpy
import pytest
from conftest import PATIENCE_S, eventually
from test_joint import (SHARDS, add_box, nothing_is_left, publish_all, publish_rank, state_of,
                        whole_tensors)

import rekindle


class Writing:
    """Four ranks that have declared and write. Rank 3 waits for release() in the middle."""

    def __init__(self, fleet, version, tensors, timeouts=(60, 60, 60)):
        self.fleet, self.version, self.tensors = fleet, version, tensors
        self.timeouts = timeouts
        self.started, self.go = threading.Event(), threading.Event()
        self.pool = concurrent.futures.ThreadPoolExecutor(4)
        self.ranks = [self.pool.submit(self.publish, rank) for rank in range(4)]
        assert self.started.wait(60)

    def publish(self, rank):
        try:
            if rank != 3:
                return publish_rank(self.fleet, self.version, rank, self.tensors,
                                    timeout=self.timeouts[rank])
            with rekindle.publisher(self.version, rank=3, world=4,
                                    agent=self.fleet.store("b")) as publication:
                for name, box in SHARDS[3].boxes:
                    add_box(publication, name, self.tensors[name], box)
                first = publication._parts[0]
                publication._parts[0] = first._replace(read=lambda: self.halt(first))
                return publication.commit(60)
        except rekindle.Error as error:
            return error

    def halt(self, part):
        self.started.set()
        assert self.go.wait(60)
        return part.read()

    def release(self):
        self.go.set()

    def outcomes(self):
        return [rank.result() for rank in self.ranks]


@contextlib.contextmanager
def writing(fleet, version, tensors, **options):
    running = Writing(fleet, version, tensors, **options)
    try:
        yield running
    finally:
        running.release()
        running.pool.shutdown()


def expect_published(outcomes):
    assert all(isinstance(one, rekindle.Published) for one in outcomes), outcomes


@pytest.mark.parametrize("name, others", [("a", (2,)), ("b", (0, 1))])
def test_an_agent_that_dies_ends_the_publication_and_the_next_one_works(fleet, name, others):
    """Agent a leads."""
    version = f"agent-{name}@1"
    tensors = whole_tensors(10)
    with writing(fleet, version, tensors) as running:
        fleet.kill_agent(name)
        if name == "a":
            running.release()
        for rank in others:
            error = running.ranks[rank].result()
            assert isinstance(error, rekindle.PeerLostError), error
            assert f" {name} " in f" {error} ".replace(":", " "), error
        running.release()
        assert not any(isinstance(one, rekindle.Published) for one in running.outcomes())
    fleet.start_agent(name)
    found = state_of(fleet, version)
    assert found is None or found["state"] != "ready", found
    assert nothing_is_left(fleet)
    expect_published(publish_all(fleet, version, tensors))
    assert state_of(fleet, version)["state"] == "ready"


def test_the_bytes_of_a_rank_that_waits_no_longer_are_published(fleet):
    tensors = whole_tensors(13)
    with writing(fleet, "impatient@1", tensors, timeouts=(5, 60, 60)) as running:
        error = running.ranks[0].result()
        assert isinstance(error, rekindle.TimeoutError), error
        # Its memory would be reused for this.
        rekindle.publish(whole_tensors(14), "other@1", agent=fleet.store("a"))
        running.release()
        expect_published(running.outcomes()[1:])
    with rekindle.attach("impatient", agent=fleet.store("b")) as session:
        found = {key: value.numpy(force=True).copy() for key, value in session}
    for key, tensor in tensors.items():
        assert numpy.array_equal(found[key], tensor), key
    assert nothing_is_left(fleet)


def test_an_agent_that_freezes_ends_the_publication(fleet):
    with writing(fleet, "frozen@1", whole_tensors(11)) as running:
        fleet.agents["b"].send_signal(signal.SIGSTOP)
        try:
            for rank in (0, 1):
                error = running.ranks[rank].result()
                assert isinstance(error, rekindle.PeerLostError), error
                assert "from b (ranks 2 and 3)" in str(error), error
        finally:
            fleet.agents["b"].send_signal(signal.SIGCONT)
        running.release()
        assert not any(isinstance(one, rekindle.Published) for one in running.outcomes())
    assert nothing_is_left(fleet)
    expect_published(publish_all(fleet, "frozen@1", whole_tensors(11)))


def test_the_coordinator_may_die_while_the_ranks_write(fleet):
    coordinator = fleet.processes[0]
    tensors = whole_tensors(12)
    with writing(fleet, "headless@1", tensors) as running:
        coordinator.kill()
        coordinator.wait()
        running.release()
        fleet._daemon("coordinator", "--listen", fleet.coordinator, "--state",
                      fleet.directory / "state")
        expect_published(running.outcomes())
    eventually(lambda: (state_of(fleet, "headless@1") or {}).get("state") == "ready")


VICTIM = """
import sys, time, rekindle
from test_joint import SHARDS, whole_tensors, add_box
store, version, rank = sys.argv[1:]
tensors = whole_tensors(5)
with rekindle.publisher(version, rank=int(rank), world=4, agent=store) as publication:
    for name, box in SHARDS[int(rank)].boxes:
        add_box(publication, name, tensors[name], box)
    def halt():
        print("writing", flush=True)
        time.sleep(600)
    publication._parts[0] = publication._parts[0]._replace(read=halt)
    publication.commit(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_died_comes_back_and_the_others_finish(fleet, how):
    version = f"revived@{int(how)}"
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        others = [pool.submit(publish_rank, fleet, version, rank, whole_tensors(5))
                  for rank in (0, 2, 3)]
        victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(fleet.store("a")), version, "1"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=os.path.dirname(__file__))
        try:
            assert victim.stdout.readline() == b"writing\n"
        finally:
            victim.send_signal(how)
            victim.wait(PATIENCE_S)
            victim.stdout.close()
        assert not any(other.done() for other in others)
        assert isinstance(eventually(lambda: revived(fleet, version)), rekindle.Published)
        expect_published([other.result() for other in others])
    assert state_of(fleet, version)["state"] == "ready"
    assert nothing_is_left(fleet)


def revived(fleet, version):
    try:
        return publish_rank(fleet, version, 1, whole_tensors(5))
    except rekindle.DeniedError:  # its agent has yet to notice the death
        return None

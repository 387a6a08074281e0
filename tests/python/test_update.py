"""`rekindle.update`: two workers on doubles of a GPU move to a new version together."""
import json
import json
import os
import subprocess
import sys
import threading
import urllib.request

import pytest
import torch
from conftest import BINARY, PATIENCE_S, Rekindle, eventually

import rekindle


def weights(version):
    generator = torch.Generator().manual_seed(version)
    return {f"w{i}": torch.randn(300, 700, generator=generator) for i in range(6)}


class Worker(threading.Thread):
    """Serves version 1, then the one that an update brings."""

    def __init__(self, rank, store):
        super().__init__(daemon=True)
        self.rank, self.store = rank, store
        self.serves = threading.Event()
        self.held = {name: torch.zeros_like(t) for name, t in weights(1).items()}
        self.failed = self.updated = None

    def load(self, version, generation):
        session = rekindle.attach("m", version, device=f"double:{self.rank}", group="actors",
                                  instance=f"llm-{self.rank}", generation=generation,
                                  agent=self.store, timeout=PATIENCE_S)
        session.load_into(self.held)
        session.commit(timeout=PATIENCE_S)
        return session

    def run(self):
        try:
            first = self.load(1, 0)
            self.serves.set()
            version = first.wait_for_update(timeout=PATIENCE_S)
            first.close()
            self.updated = self.load(version, 1)  # a member of the update until that is over
        except BaseException as why:
            self.failed = why


@pytest.fixture(scope="module")
def published(fleet, store):
    for version in (1, 2):
        rekindle.publish(weights(version), f"m@{version}", agent=store)


def test_all_workers_of_a_group_get_the_new_version(fleet, store, published):
    workers = [Worker(rank, store) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        assert worker.serves.wait(PATIENCE_S) and worker.failed is None
        assert torch.equal(worker.held["w3"], weights(1)["w3"])
    result = rekindle.update("m@2", group="actors", gather=PATIENCE_S, timeout=PATIENCE_S,
                             agent=store)
    for worker in workers:
        worker.join(PATIENCE_S)
        assert not worker.is_alive() and worker.failed is None, worker.failed
        for name, tensor in weights(2).items():
            assert torch.equal(worker.held[name], tensor), name
        worker.updated.close()
    assert (result.members, result.ready, result.by_broadcast) == (2, 2, 2)
    assert result.elapsed >= 0


def test_the_update_and_its_workers_left_spans(fleet, store, published):
    """Of the update above."""
    def explained(*what):
        done = subprocess.run([BINARY, "explain", *map(str, what), "--json"], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=PATIENCE_S, env=fleet.environment)
        return json.loads(done.stdout)["findings"] if done.returncode == 0 else None

    # The spans of an update come when its ranks have told their phases.
    findings = eventually(lambda: explained("update", "m@2", "--coordinator", fleet.coordinator))
    assert findings[0]["text"].startswith("The update to m@2 took ")
    assert findings[0]["text"].endswith(" for 2 ranks; 0 of them did not get it.")
    trace = fleet.run("trace", "m@2", "--coordinator", fleet.coordinator)["traceEvents"]
    ranks = [event for event in trace if event["name"] == "rank"]
    assert {event["args"]["rekindle.rank"] for event in ranks} == {f"rank 0 of llm-{i} on a" for i in range(2)}
    assert all(event["args"]["rekindle.bytes"] == 6 * 300 * 700 * 4 for event in ranks)
    assert {"gathering", "meeting", "spreading", "loading"} <= {event["name"] for event in trace}
    recovery = explained("recovery", "llm-0", "--store", store)
    assert recovery[0]["text"].startswith("Rank 0 of llm-0 was served m@2 again in ")
    assert "install" in recovery[1]["text"]


def test_the_status_page_has_the_update(fleet, store, published):
    """After the test above."""
    def read(path):
        with urllib.request.urlopen(f"http://{fleet.ready[0]['http']}/api/v1/{path}", timeout=PATIENCE_S) as answer:
            return json.load(answer)
    round = eventually(lambda: next((r for r in read("fleet")["rounds"] if r["phase"] == "over"), None))
    assert (round["version"], round["group"], round["members_total"]) == ("m@2", "actors", 2)
    payload = sum(tensor.nbytes for tensor in weights(2).values())
    for member in round["members"]:
        assert (member["node"], member["state"]) == ("a", "ready") and member["spread"] >= payload
    events = {event["kind"]: event for event in read("events?after=0")["events"]}
    assert events["round_begun"]["round"] == events["round_over"]["round"] == round["round"]
    assert dict(events["round_over"]["phases"]).keys() <= round["phases"].keys()


def test_an_update_without_version_or_workers_says_so(fleet, store, published):
    def knows():
        """A coordinator that has just started does not, and says so."""
        try:
            rekindle.update("m@77", agent=store)
        except rekindle.UnavailableError as why:
            assert "just started" in str(why)
        except rekindle.NotFoundError as why:
            return str(why)

    assert "m@77" in eventually(knows)
    with pytest.raises(rekindle.NotFoundError, match="nobody-here"):
        rekindle.update("m@2", group="nobody-here", agent=store)
    with pytest.raises(rekindle.InvalidError, match="-1 members"):
        rekindle.update("m@2", members=-1, agent=store)
    with pytest.raises(rekindle.InvalidError, match="which version"):
        rekindle.update("m", agent=store)


def test_who_is_late_is_left_out_and_counted(fleet, store, published):
    """A member that is there, and does not come."""
    session = rekindle.attach("m", 1, device="double:0", group="sleepers", agent=store)
    session.load_into({name: torch.zeros_like(t) for name, t in weights(1).items()})
    session.commit(timeout=PATIENCE_S)
    seen = threading.Thread(target=lambda: session.wait_for_update(timeout=PATIENCE_S))
    seen.start()
    with pytest.raises(rekindle.UnavailableError) as caught:
        rekindle.update("m@2", group="sleepers", gather=0.2, timeout=PATIENCE_S, agent=store)
    assert caught.value.result.members == 1 and caught.value.result.ready == 0
    seen.join(PATIENCE_S)
    assert not seen.is_alive()
    session.close()


WITHOUT_A_NAME = """
import sys
import rekindle
agent, patience = sys.argv[1], float(sys.argv[2])
def load(version):
    session = rekindle.attach("m", version, device="double:0", group="actors", agent=agent, timeout=patience)
    for _ in session:
        pass
    session.commit(timeout=patience)
    return session
first = load(1)
print("serves", flush=True)
version = first.wait_for_update(timeout=patience)
first.close()
with load(version) as session:
    print("updated", version, flush=True)
    sys.stdin.read()
"""


def test_workers_whose_processes_the_agent_cannot_name_are_two(memory_directory):
    """The agent has a PID namespace of its own. The kernel tells it the same number for every worker."""
    class Apart(Rekindle):
        def _daemon(self, role, *arguments):
            if role == "agent":
                self.command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child",
                                *type(self).command]
            try:
                return super()._daemon(role, *arguments)
            finally:
                self.command = type(self).command

    directory = memory_directory / "apart"
    directory.mkdir()
    fleet = Apart(directory)
    workers = []
    try:
        agent = str(fleet.store("a"))
        for version in (1, 2):
            rekindle.publish(weights(version), f"m@{version}", agent=agent)
        for _ in range(2):
            workers.append(subprocess.Popen(
                [sys.executable, "-c", WITHOUT_A_NAME, agent, str(PATIENCE_S)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True, env=os.environ))
        for worker in workers:
            assert worker.stdout.readline() == "serves\n"
        result = rekindle.update("m@2", group="actors", gather=PATIENCE_S, timeout=PATIENCE_S, agent=agent)
        assert (result.members, result.ready) == (2, 2)
        for worker in workers:
            assert worker.stdout.readline() == "updated 2\n"
    finally:
        for worker in workers:
            worker.stdin.close()
            worker.wait(PATIENCE_S)
        # unshare passes no other signal on.
        for process in fleet.processes:
            process.kill()
        fleet.close()

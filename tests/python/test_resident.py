"""Parameters that outlive their worker, on doubles of a GPU: real agents, keepers and workers."""
import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

import rekindle
from conftest import BINARY, PATIENCE_S, Rekindle, eventually

WORKER = pathlib.Path(__file__).with_name("resident_process.py")
DEVICE = "double:0"


def weights(version):
    generator = torch.Generator().manual_seed(version)
    made = {"first.weight": (700, 300), "first.bias": (700,), "second.weight": (300, 700),
            "norm.weight": (300,), "norm.bias": (300,), "scale": (5,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in made.items()}


def total(version):
    known = weights(version)
    # `tied` is `norm` by another name.
    known.update({f"tied.{key}": known[f"norm.{key}"] for key in ("weight", "bias")})
    return sum(float(value.double().sum()) for value in known.values())


@pytest.fixture
def fleet(memory_directory, request):
    directory = memory_directory / f"{abs(hash(request.node.name)):x}"
    directory.mkdir()
    running = Rekindle(directory)
    for version in (1, 2):
        rekindle.publish(weights(version), f"m@{version}", agent=running.store("a"))
    yield running
    running.close()
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(keeper_of(running), signal.SIGKILL)


class Worker:
    def __init__(self, fleet, node="a", device=DEVICE, **options):
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), str(fleet.store(node)), "m", device, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.ready = self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self):
        self.process.kill()
        self.process.communicate()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def residents(fleet, node="a"):
    return fleet.run("status", "--store", fleet.store(node))["residents"]


def agent_log(fleet):
    return max(fleet.directory.glob("agent-*.log"), key=os.path.getmtime).read_text()


def events(fleet, kind):
    printed = subprocess.run([BINARY, "events", "--store", fleet.store("a"), "--json"], check=True,
                             capture_output=True, text=True, timeout=PATIENCE_S).stdout
    return [event for event in map(json.loads, printed.splitlines()) if event["event"] == kind]


def keeper_of(fleet):
    """The pid of agent a's keeper."""
    wanted = f"keeper --directory {fleet.store('a')}/agent".split()
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode().rstrip("\0").split("\0")
            if words[1:4] == wanted:
                return int(path.parent.name)
    return None


def check(answer, version=1, rung=None):
    assert answer["sum"] == total(version)
    assert answer["first"] == weights(version)["first.weight"][3, :4].tolist()
    assert answer["scale"] == weights(version)["scale"].tolist()
    assert answer["version"] == version and answer["tied"] and not answer["warned"]
    if rung:
        assert answer["rung"] == rung


@pytest.mark.parametrize("meta", [False, True])
def test_a_successor_gets_the_tensors_of_a_worker_that_was_killed(fleet, meta):
    with Worker(fleet, instance="i", meta=meta) as first:
        check(first.ready, rung="local")
        (copy,) = residents(fleet)
        assert (copy["id"], copy["device"], copy["users"]) == ("m@1", DEVICE, 1)
    with Worker(fleet, instance="i", meta=meta) as second:
        check(second.ready, rung="resident")
        assert first.ready["kept"] and second.ready["kept"]
        second.kill()
        # It has died too soon to trust what it got.
        assert eventually(lambda: not residents(fleet))
    with Worker(fleet, instance="i", meta=meta) as third:
        check(third.ready, rung="local")


def test_the_instance_is_ready_again_and_its_recovery_names_the_rung(fleet):
    with Worker(fleet, instance="i"):
        pass
    with Worker(fleet, instance="i") as second:
        check(second.ready, rung="resident")
        committed = events(fleet, "committed")[-1]
        assert committed["rung"] == "resident" and committed["instance"] == "i"
        assert committed["phases_us"]["detect"] > 0
        fleet.run("wait-ready", "i", "--store", fleet.store("a"))
        # It reads the list of the tensors after its commit, and writes nothing.
        assert [copy["users"] for copy in residents(fleet)] == [1]
        assert not events(fleet, "resident_dropped")


def test_another_worker_does_not_get_the_copy_of_one_that_lives(fleet):
    with Worker(fleet) as first, Worker(fleet) as second:
        check(second.ready, rung="local")
        check(first.tell("update 1"))


@pytest.mark.parametrize("other", [{"resident": "another engine"}, {"convert": True}])
def test_another_key_loads_and_gives_the_memory_back(fleet, other):
    with Worker(fleet):
        pass
    with Worker(fleet, **other) as second:
        check(second.ready, rung="local")
        assert [copy["users"] for copy in residents(fleet)] == [1]
    assert "has another key" in events(fleet, "no_resident")[-1]["why"]


def test_a_byte_that_changed_after_the_seal_is_found(fleet):
    with Worker(fleet) as first:
        first.tell("scribble")
    with Worker(fleet) as second:
        check(second.ready, rung="local")
    assert "was changed after its seal" in events(fleet, "no_resident")[-1]["why"]


def test_an_update_writes_in_place_and_is_kept_again(fleet):
    with Worker(fleet) as first:
        updated = first.tell("update 2")
        check(updated, version=2)
        assert updated["at"] == first.ready["at"]
        assert [copy["id"] for copy in residents(fleet)] == ["m@2"]
    # The version that a worker asks for is not the one that is here.
    with Worker(fleet) as second:
        check(second.ready, rung="local")
    assert "is of another version" in events(fleet, "no_resident")[-1]["why"]


def test_a_parameter_that_got_other_memory_ends_it(fleet):
    with Worker(fleet) as first:
        first.tell("rebind")
        updated = first.tell("update 2")
        assert any("second.weight has other memory" in line for line in updated["warned"])
        assert updated["sum"] == total(2)
        assert not residents(fleet)


def test_a_worker_that_detaches_leaves_nothing(fleet):
    with Worker(fleet) as first:
        first.tell("detach")
        assert eventually(lambda: not residents(fleet))
        # A new agent asks the keeper.
        fleet.kill_agent("a")
        fleet.start_agent("a")
        assert eventually(lambda: "resident.keeper" not in agent_log(fleet))
        assert "resident.found" not in agent_log(fleet)


def test_a_rank_that_finds_its_copy_waits_for_one_that_does_not(fleet):
    ranks = [{"instance": "i", "rank": rank, "world": 2, "device": f"double:{rank}"} for rank in (0, 1)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for worker in pool.map(lambda rank: Worker(fleet, **rank), ranks):
            worker.kill()
        # The second rank's environment has changed meanwhile.
        ranks[1]["resident"] = "another engine"
        workers = list(pool.map(lambda rank: Worker(fleet, **rank), ranks))
    check(workers[0].ready, rung="resident")
    check(workers[1].ready, rung="local")
    fleet.run("wait-ready", "i", "--store", fleet.store("a"))
    for worker in workers:
        worker.kill()


def test_a_keeper_that_is_killed_costs_a_load_and_nothing_else(fleet):
    with Worker(fleet) as first:
        os.kill(keeper_of(fleet), signal.SIGKILL)
        assert eventually(lambda: not residents(fleet))
        check(first.tell("update 2"), version=2)
        assert [copy["id"] for copy in residents(fleet)] == ["m@2"]


def test_an_agent_that_is_killed_finds_the_copies_again(fleet):
    with Worker(fleet) as first:
        fleet.kill_agent("a")
        fleet.start_agent("a")
        assert eventually(lambda: [copy["users"] for copy in residents(fleet)] == [1])
    assert eventually(lambda: [copy["users"] for copy in residents(fleet)] == [0])
    with Worker(fleet) as second:
        check(second.ready, rung="resident")


def test_a_device_process_that_is_killed_comes_back_and_checks(fleet):
    with Worker(fleet):
        pass
    pid = fleet.run("status", "--store", fleet.store("a"))["devices"]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: fleet.run("status", "--store", fleet.store("a"))["devices"]["state"] == "serving"
                      and fleet.run("status", "--store", fleet.store("a"))["devices"]["pid"] != pid)
    with Worker(fleet) as second:
        check(second.ready, rung="resident")


def test_a_retired_version_gives_its_memory_back(fleet):
    with Worker(fleet):
        pass
    fleet.run("retire", "m@1", "--store", fleet.store("a"))
    assert eventually(lambda: not residents(fleet))


def test_release_gives_the_memory_back(fleet):
    with Worker(fleet):
        pass
    assert fleet.run("release", "m", "--store", fleet.store("a"))["released"] == 1
    assert not residents(fleet)


@contextlib.contextmanager
def fleet_that_keeps(directory, time_to_live):
    """A fleet whose agents have this --resident-ttl, with m@1."""
    class Other(Rekindle):
        def _daemon(self, role, *arguments):
            more = ("--resident-ttl", time_to_live) if role == "agent" else ()
            return super()._daemon(role, *arguments, *more)

    directory.mkdir()
    running = Other(directory)
    try:
        rekindle.publish(weights(1), "m@1", agent=running.store("a"))
        yield running
    finally:
        running.close()


def test_copies_of_workers_that_do_not_come_back_expire(memory_directory):
    with fleet_that_keeps(memory_directory / "expire", "1ms") as running:
        with Worker(running) as first:
            assert residents(running)
            check(first.ready)
        assert eventually(lambda: not residents(running))


def test_an_agent_that_keeps_none_says_so(memory_directory):
    with fleet_that_keeps(memory_directory / "none", "0s") as running, Worker(running) as first:
        assert any("--resident-ttl 0" in line for line in first.ready["warned"])
        assert not first.ready["kept"]
        assert first.ready["sum"] == total(1)

"""Parameters that outlive their worker, on doubles of a GPU: real agents, keepers and workers."""
import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

import rekindle
import rekindle.torch
from conftest import BINARY, PATIENCE_S, Rekindle, eventually
from rekindle.torch import resident as residents_of_modules

WORKER = pathlib.Path(__file__).with_name("resident_process.py")
DEVICE = "double:0"
SHARED = {"shared": True}


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
        rekindle.publish(weights(version), f"m@{version}", agent=running.store("a"),
                         files={"config.json": b"{}"})
    yield running
    running.close()
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(keeper_of(running), signal.SIGKILL)


class Worker:
    def __init__(self, fleet, node="a", device=DEVICE, user=None, **options):
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), str(fleet.store(node)), "m", device, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, user=user)
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
        # It has read the list and the files of its version since.
        (copy,) = residents(fleet)
        assert (copy["users"], events(fleet, "resident_dropped")) == (1, [])
        second.kill()
        # It has died too soon to trust what it got.
        assert eventually(lambda: not residents(fleet))
    with Worker(fleet, instance="i", meta=meta) as third:
        check(third.ready, rung="local")


def key_of(model):
    return residents_of_modules.key_of(model, "", {"device": DEVICE})


def pair():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def test_the_key_tells_ties_apart():
    tied, same = pair(), pair()
    tied[1].weight = tied[0].weight
    same[1].weight = same[0].weight
    assert key_of(tied) == key_of(same) != key_of(pair())


def test_the_key_tells_apart_whether_a_buffer_is_saved():
    made = []
    for persistent in (True, True, False):
        made.append(pair())
        made[-1].register_buffer("scale", torch.ones(3), persistent=persistent)
    saved, same, unsaved = map(key_of, made)
    assert saved == same != unsaved


def test_the_key_of_a_transformers_model_has_its_settings(monkeypatch):
    transformers = pytest.importorskip("transformers")
    import transformers_models as known

    def build(**changes):
        config = known.config("llama")
        for name, value in changes.items():
            setattr(config, name, value)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)

    key = key_of(build())
    assert key == key_of(build()) == key_of(build(_name_or_path="elsewhere"))
    assert key != key_of(build(rms_norm_eps=0.25))
    # Also inside a module of another kind.
    assert key_of(torch.nn.Sequential(build())) != key_of(torch.nn.Sequential(build(rms_norm_eps=0.25)))
    monkeypatch.setitem(vars(sys.modules["transformers"]), "__version__", "0")
    assert key != key_of(build())


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


def test_a_child_of_a_dead_worker_that_has_its_memory_open_costs_a_load(fleet):
    with Worker(fleet) as first:
        child = first.tell("fork")["child"]
    try:
        with Worker(fleet) as second:
            check(second.ready, rung="local")
            assert f"process {child}, which the dead worker" in events(fleet, "no_resident")[-1]["why"]
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_has_ended_does_not_matter(fleet):
    with Worker(fleet) as first:
        os.kill(first.tell("fork")["child"], signal.SIGKILL)
    with Worker(fleet) as second:
        check(second.ready, rung="resident")


def test_a_child_of_a_dead_reader_does_not_matter(fleet):
    with Worker(fleet, **SHARED) as first, Worker(fleet, **SHARED) as second:
        child = second.tell("fork")["child"]
        second.kill()
        try:
            with Worker(fleet, **SHARED) as third:
                check(third.ready, rung="resident")
        finally:
            os.kill(child, signal.SIGKILL)
        check(first.tell("show"))


def test_a_byte_that_changed_after_the_seal_is_mended(fleet):
    with Worker(fleet) as first:
        first.tell("scribble")
    with Worker(fleet) as second:
        check(second.ready, rung="resident")
    assert "second.weight" in events(fleet, "resident_mended")[-1]["why"]


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


def kill_keeper(fleet):
    """Returns when a new keeper has what the agent has kept of the old one's copies."""
    kept_again = agent_log(fleet).count("resident.kept_again")
    held = len(residents(fleet))
    os.kill(keeper_of(fleet), signal.SIGKILL)
    assert eventually(lambda: agent_log(fleet).count("resident.kept_again") == kept_again + held)


def test_a_new_keeper_gets_the_copies_of_workers_that_live(fleet):
    with Worker(fleet) as first:
        kill_keeper(fleet)
        assert [copy["users"] for copy in residents(fleet)] == [1]
        check(first.ready)
    with Worker(fleet) as second:
        check(second.ready, rung="resident")
        # It got the copy of the second keeper, and the third one gets it of the agent.
        kill_keeper(fleet)
        check(second.tell("update 2"), version=2)
        assert [copy["id"] for copy in residents(fleet)] == ["m@2"]


@pytest.mark.parametrize("shared", [False, True])
def test_a_worker_that_dies_right_after_the_keeper_still_leaves_its_copy(fleet, shared):
    with Worker(fleet, shared=shared):
        os.kill(keeper_of(fleet), signal.SIGKILL)
    with Worker(fleet, shared=shared) as second:
        check(second.ready, rung="resident")


def test_the_copy_of_a_dead_worker_ends_with_its_keeper(fleet):
    with Worker(fleet):
        pass
    assert eventually(lambda: [copy["users"] for copy in residents(fleet)] == [0])
    os.kill(keeper_of(fleet), signal.SIGKILL)
    assert eventually(lambda: not residents(fleet))
    assert "the keeper that had it is gone" in events(fleet, "resident_dropped")[-1]["why"]
    with Worker(fleet) as second:
        check(second.ready, rung="local")


def test_a_keeper_that_hangs_keeps_what_it_has(fleet):
    with Worker(fleet):
        keeper = keeper_of(fleet)
        os.kill(keeper, signal.SIGSTOP)
        # Another device's copy, which the keeper does not take in time.
        with Worker(fleet, device="double:1") as other:
            assert other.ready["warned"]
        os.kill(keeper, signal.SIGCONT)
        assert eventually(lambda: DEVICE in [copy["device"] for copy in residents(fleet)])
    with Worker(fleet) as second:
        check(second.ready, rung="resident")


def test_without_agent_and_keeper_a_successor_loads(fleet):
    with Worker(fleet):
        fleet.kill_agent("a")
        os.kill(keeper_of(fleet), signal.SIGKILL)
    fleet.start_agent("a")
    with Worker(fleet) as second:
        check(second.ready, rung="local")


def test_an_agent_that_comes_back_gives_a_new_keeper_what_the_old_one_had(fleet):
    with Worker(fleet) as first, Worker(fleet, device="double:1"):
        fleet.kill_agent("a")
        fleet.start_agent("a")
        assert eventually(lambda: [copy["users"] for copy in residents(fleet)] == [1, 1])
        kill_keeper(fleet)
        # The agent knows whose process this is.
        check(first.tell("update 2"), version=2)
        assert sorted(copy["id"] for copy in residents(fleet)) == ["m@1", "m@2"]


# --- copies that several workers read

def test_only_resident_parameters_are_shared():
    with pytest.raises(rekindle.InvalidError, match="shared=True without resident=True"):
        rekindle.torch.load(torch.nn.Linear(1, 1), "m", shared=True)


def test_workers_share_a_copy_while_all_of_them_live(fleet):
    with Worker(fleet, **SHARED) as first, Worker(fleet, **SHARED) as second, \
            Worker(fleet, **SHARED) as third:
        check(first.ready, rung="local")
        check(second.ready, rung="resident")
        check(third.ready, rung="resident")
        assert [copy["users"] for copy in residents(fleet)] == [3]
        assert len(events(fleet, "resident")) == 1


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_shared_copy_lives_until_its_last_worker_has_died(fleet, order):
    workers = [Worker(fleet, **SHARED) for _ in range(3)]
    for left, index in zip((2, 1), order):
        workers[index].kill()
        assert eventually(lambda: [copy["users"] for copy in residents(fleet)] == [left])
    with Worker(fleet, **SHARED) as successor:
        check(successor.ready, rung="resident")
    assert eventually(lambda: [copy["users"] for copy in residents(fleet)] == [1])
    last = workers[order[2]]
    last.kill()
    # The worker that has made the copy did not die of what it got.
    sealed_it = order[2] == 0
    assert eventually(lambda: [copy["users"] for copy in residents(fleet)] == ([0] if sealed_it else []))
    with Worker(fleet, **SHARED) as successor:
        check(successor.ready, rung="resident" if sealed_it else "local")


def test_a_worker_of_a_shared_copy_updates_other_memory_and_others_take_that(fleet):
    with Worker(fleet, **SHARED) as first, Worker(fleet, **SHARED) as second, \
            Worker(fleet, **SHARED) as third:
        check(second.tell("update 2"), version=2, rung="local")
        assert {copy["id"]: copy["users"] for copy in residents(fleet)} == {"m@1": 2, "m@2": 1}
        check(first.tell("show"))
        check(third.tell("update 2"), version=2, rung="resident")
        check(first.tell("update 2"), version=2, rung="resident")
        # Nobody serves version 1 any more.
        assert {copy["id"]: copy["users"] for copy in residents(fleet)} == {"m@2": 3}
        check(first.tell("update 1"), rung="local")
        check(second.tell("show"), version=2)


@pytest.mark.parametrize("how", ["stage 2", "stage 2 host"])
def test_a_worker_of_a_shared_copy_that_stages_leaves_the_others_theirs(fleet, how):
    with Worker(fleet, **SHARED) as first, Worker(fleet, **SHARED) as second:
        check(first.tell(how), version=2)
        check(second.tell("show"))
        # From host memory, it gets memory that is not kept.
        kept = {"m@1": 1, "m@2": 1} if how == "stage 2" else {"m@1": 1}
        assert {copy["id"]: copy["users"] for copy in residents(fleet)} == kept


@pytest.mark.parametrize("writer", [0, 1])
def test_a_worker_that_writes_to_a_shared_copy_ends_and_the_copy_stays(fleet, writer):
    workers = [Worker(fleet, **SHARED), Worker(fleet, **SHARED)]
    workers[writer].process.stdin.write("scribble\n")
    workers[writer].process.stdin.flush()
    assert workers[writer].process.wait(PATIENCE_S) == -signal.SIGSEGV
    check(workers[1 - writer].tell("show"))
    with Worker(fleet, **SHARED) as third:
        check(third.ready, rung="resident")
    for worker in workers:
        worker.kill()


def test_a_worker_that_shares_and_one_that_does_not_never_have_the_same_copy(fleet):
    with Worker(fleet, **SHARED) as first:
        with Worker(fleet) as second:
            check(second.ready, rung="local")
            assert "is for workers that share it" in events(fleet, "no_resident")[-1]["why"]
            check(second.tell("update 2"), version=2)
        check(first.tell("show"))


def test_a_worker_of_a_shared_copy_that_detaches_leaves_it_to_the_others(fleet):
    with Worker(fleet, **SHARED) as first, Worker(fleet, **SHARED) as second:
        first.tell("detach")
        assert eventually(lambda: [copy["users"] for copy in residents(fleet)] == [1])
        check(second.tell("show"))
        second.tell("detach")
        assert eventually(lambda: not residents(fleet))


def test_workers_share_a_copy_beyond_agent_and_keeper(fleet):
    with Worker(fleet, **SHARED) as first, Worker(fleet, **SHARED) as second:
        fleet.kill_agent("a")
        fleet.start_agent("a")
        assert eventually(lambda: [copy["users"] for copy in residents(fleet)] == [2])
        kill_keeper(fleet)
        with Worker(fleet, **SHARED) as third:
            check(third.ready, rung="resident")
            assert [copy["users"] for copy in residents(fleet)] == [3]
        check(second.tell("update 2"), version=2)
        check(first.tell("show"))


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


def test_a_drained_host_gives_the_memory_back_and_keeps_none(fleet):
    def drain(*more):
        fleet.run("drain", "a", "--coordinator", fleet.coordinator, *more)

    with Worker(fleet) as first, Worker(fleet, device="double:1"):
        drain()
        assert eventually(lambda: not residents(fleet))
        assert "the host is drained" in events(fleet, "resident_dropped")[-1]["why"]
        # The worker serves on.
        updated = first.tell("update 2")
        assert updated["sum"] == total(2)
        assert any("this host is drained" in line for line in updated["warned"])
        assert not residents(fleet)
        drain("--undo")
        assert eventually(lambda: "agent.undrained" in agent_log(fleet))
    with Worker(fleet) as second:
        check(second.ready, rung="local")
        assert len(residents(fleet)) == 1


@contextlib.contextmanager
def fleet_with(directory, *options):
    """A fleet whose agents have these options, with m@1."""
    class Other(Rekindle):
        def _daemon(self, role, *arguments):
            return super()._daemon(role, *arguments, *(options if role == "agent" else ()))

    directory.mkdir()
    running = Other(directory)
    try:
        rekindle.publish(weights(1), "m@1", agent=running.store("a"))
        yield running
    finally:
        running.close()


def test_copies_of_workers_that_do_not_come_back_expire(memory_directory):
    with fleet_with(memory_directory / "expire", "--resident-ttl", "1ms") as running:
        with Worker(running) as first:
            assert residents(running)
            check(first.ready)
        assert eventually(lambda: not residents(running))


def test_an_agent_that_keeps_none_says_so(memory_directory):
    with fleet_with(memory_directory / "none", "--resident-ttl", "0s") as running, Worker(running) as first:
        assert any("--resident-ttl 0" in line for line in first.ready["warned"])
        assert not first.ready["kept"]
        assert first.ready["sum"] == total(1)


def test_an_agent_uses_the_keeper_of_another_container_and_starts_none(memory_directory):
    with fleet_with(memory_directory / "outside", "--external-keeper") as running:
        with Worker(running) as first:
            assert any("keeper" in line for line in first.ready["warned"])
            assert keeper_of(running) is None
        keeper = subprocess.Popen([BINARY, "keeper", "--directory", f"{running.store('a')}/agent"],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert eventually(lambda: (running.store("a") / "agent/keeper.sock").exists())
            with Worker(running) as second:
                check(second.ready, rung="local")
                running.kill_agent("a")
                running.start_agent("a")
            with Worker(running) as third:
                check(third.ready, rung="resident")
            assert keeper_of(running) == keeper.pid
        finally:
            keeper.kill()
            keeper.wait(PATIENCE_S)


STRANGER = 65534
# Ends with 0 if the keeper does not take the connection, or closes it without an answer.
SPEAKS_TO_KEEPER = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(20)
try:
    connection.connect(f"{sys.argv[1]}/agent/keeper.sock")
    sys.exit(len(connection.recv(1)))
except (PermissionError, ConnectionError) as why:
    print(why)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts a worker of another user")
def test_another_user_gets_no_copy_and_gives_no_memory_back(memory_directory):
    memory_directory.chmod(0o755)
    with fleet_with(memory_directory / "users", "--allow-uid", str(STRANGER)) as running:
        with Worker(running) as first:
            check(first.ready)
        with Worker(running, user=STRANGER) as stranger:
            check(stranger.ready, rung="local")
            assert "belongs to another user" in events(running, "no_resident")[-1]["why"]
            # Its own copy lies beside that of the other user, which it has not driven out.
            assert sorted(copy["users"] for copy in residents(running)) == [0, 1]
            store = running.store("a")
            as_stranger = {"user": STRANGER, "capture_output": True, "text": True, "timeout": PATIENCE_S}
            released = subprocess.run([BINARY, "release", "--store", store], **as_stranger)
            assert released.returncode != 0
            spoken = subprocess.run([sys.executable, "-c", SPEAKS_TO_KEEPER, store], **as_stranger)
            assert spoken.returncode == 0, spoken.stdout + spoken.stderr
            stranger.kill()
        with Worker(running) as second:
            check(second.ready, rung="resident")

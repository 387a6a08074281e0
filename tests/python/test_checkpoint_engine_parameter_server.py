"""ParameterServer, each rank beside checkpoint-engine's own receiver."""
import concurrent.futures
import inspect
import json
import os
import pathlib
import pickle
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from checkpoint_engine_receiver import Receiver
from conftest import PATIENCE_S, eventually, free_port
from test_checkpoint_engine import expected, make_tensors
from test_checkpoint_engine_serve import last_round

import rekindle as rk
from rekindle.compat.checkpoint_engine import ParameterServer, ReceiverError

RANK_SCRIPT = pathlib.Path(__file__).with_name("checkpoint_engine_rank.py")
UPDATE_SCRIPT = RANK_SCRIPT.with_name("checkpoint_engine_update_rank.py")


def run_ranks(options, steps):
    """Each rank's answers to its steps; rank r has options[r] and steps[r]."""
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port() - 1),
                                "WORLD_SIZE": str(len(steps))}
    ranks = [subprocess.Popen([sys.executable, RANK_SCRIPT, json.dumps(given)],
                              env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE,
                              stdin=subprocess.DEVNULL, text=True)
             for rank, given in enumerate(zip(options, steps))]
    try:
        said = [rank.communicate(timeout=2 * PATIENCE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    return [[json.loads(line) for line in lines.splitlines()] for lines in said]


def update_ranks(options):
    """Runs checkpoint-engine's test on one process for each rank."""
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port() - 1),
                                "WORLD_SIZE": str(len(options))}
    ranks = [subprocess.Popen([sys.executable, UPDATE_SCRIPT, json.dumps(given)],
                              env=environment | {"RANK": str(rank)}, stdin=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True)
             for rank, given in enumerate(options)]
    try:
        said = [rank.communicate(timeout=2 * PATIENCE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(said)


@pytest.fixture(scope="module")
def whole():
    return make_tensors(seed=3)


@pytest.fixture(scope="module")
def halves(whole, memory_directory):
    """Rank 0's part: two files, of which a named tensor is newer than a file's; rank 1's: named."""
    names = sorted(whole)
    first = {name: whole[name] for name in names[::2]}
    middle = len(first) // 2
    files = []
    for index, part in enumerate((list(first)[:middle], list(first)[middle:])):
        files.append(str(memory_directory / f"part-{index}.safetensors"))
        safetensors.torch.save_file({name: first[name] for name in part}, files[-1])
    newer = list(first)[0]
    stale = {name: first[name] for name in list(first)[:middle]} | {
        newer: torch.zeros_like(first[newer])}
    safetensors.torch.save_file(stale, files[0])
    torch.save({newer: whole[newer]}, memory_directory / "newer.pt")
    torch.save({name: whole[name] for name in names[1::2]}, memory_directory / "second.pt")
    return [{"files": files, "tensors": str(memory_directory / "newer.pt")},
            {"tensors": str(memory_directory / "second.pt")}]


@pytest.fixture
def options(rekindle):
    return [{"device": "double:0", "agent": str(rekindle.store("a"))},
            {"device": "double:1", "agent": str(rekindle.store("b"))}]


def versions(rekindle):
    """Of parts, as the coordinator knows them."""
    fleet = rk.status(coordinator=rekindle.coordinator)
    return [entry["model"] for entry in fleet["versions"] if entry["state"] == "ready"]


def test_two_ranks_on_two_hosts(rekindle, options, whole, halves):
    """Real ranks, as under torchrun. Each registers its part; every worker gets both; parts that
    are unregistered are gone."""
    step = [["group", {}], ["grouped", {}], ["gather", {"name": "iteration-0"}],
            ["update", {"name": "iteration-0"}], ["grouped", {}],
            ["update", {"name": "iteration-0", "ranks": [1]}],
            ["unregister", {"name": "iteration-0"}], ["unregister", {"name": "iteration-0"}],
            ["barrier", {}]]
    said = run_ranks(options, [[["register", {"name": "iteration-0", **half}]] + step
                               for half in halves])
    metas = said[0][3]
    assert metas == said[1][3] and sorted(metas) == ["0", "1"]
    assert metas["0"]["tensors"] + metas["1"]["tensors"] == len(whole)
    assert metas["0"]["model"] == metas["1"]["model"]
    assert metas["1"]["model"].startswith("iteration-0.checkpoint@")
    assert [one[2] for one in said] == [True, True] and [one[5] for one in said] == [False, False]
    everyone, nobody = said[0][4], said[1][4]
    assert [report[0]["tensors"] for report in everyone] == [expected(whole)] * 2 and nobody == []
    assert said[0][6] == [] and said[1][6][0][0]["tensors"] == expected(whole)
    assert [one[7:] for one in said] == [[None] * 3] * 2
    eventually(lambda: not [model for model in versions(rekindle)
                            if model.startswith("iteration-0.")])


def together(servers, work):
    """What `work(rank, server)` returns or raises, on all at once."""
    def attempt(rank):
        try:
            return work(rank, servers[rank])
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(servers)) as pool:
        return list(pool.map(attempt, range(len(servers))))


@pytest.fixture
def pair(options):
    """Two ranks, on two hosts, in threads of this process."""
    port = free_port()
    made = together([None] * 2, lambda rank, _: ParameterServer(
        rank=rank, world_size=2, master_addr="127.0.0.1", master_port=port, **options[rank]))
    assert all(isinstance(server, ParameterServer) for server in made), made
    return made


def register(pair, halves, name):
    for server, half in zip(pair, halves):
        server.register_checkpoint(name, files=half.get("files"),
                                   named_tensors=torch.load(half["tensors"], weights_only=True))


class Engine:
    """What asks workers to receive: the first of `ranks`, for all of them."""

    def __init__(self, ranks=(0, 1), faults=None):
        self.ranks, self.faults, self.reports = ranks, faults or {}, []

    def of(self, rank):
        return self.receive if rank == self.ranks[0] else lambda handles: None

    def receive(self, handles):
        workers = [Receiver(handles[rank][1], *self.faults.get(rank, ())) for rank in self.ranks]
        self.reports = [worker.report() for worker in workers]
        if any("error" in report for report in self.reports):
            raise RuntimeError("the engine has answered 400")


def test_a_worker_that_fails_fails_every_rank(pair, whole, halves):
    register(pair, halves, "failing")
    together(pair, lambda rank, server: server.gather_metas("failing"))
    engine = Engine(faults={1: ["--fault", "error"]})
    failed = together(pair, lambda rank, server: server.update("failing", engine.of(rank)))
    assert isinstance(failed[1], ReceiverError) and "no parameter of this name" in str(failed[1])
    assert isinstance(failed[0], rk.UnavailableError | RuntimeError)

    engine = Engine()  # the next goes well
    failed = together(pair, lambda rank, server: server.update("failing", engine.of(rank)))
    assert failed == [None] * 2
    assert [report[0]["tensors"] for report in engine.reports] == [expected(whole)] * 2


def test_a_draft_model_on_every_rank(pair, whole, halves):
    """Rank 1, which asks nobody, goes on until rank 0 has its answer."""
    register(pair, halves, "drafted")
    together(pair, lambda rank, server: server.gather_metas("drafted"))
    engine = Engine(faults={rank: ["--passes", "2"] for rank in (0, 1)})
    failed = together(pair, lambda rank, server: server.update("drafted", engine.of(rank)))
    assert failed == [None] * 2
    for report in engine.reports:
        assert [one["tensors"] for one in report] == [expected(whole)] * 2


@pytest.fixture
def neighbours(rekindle):
    """Two ranks of one host."""
    port, agent = free_port(), str(rekindle.store("a"))
    return together([None] * 2, lambda rank, _: ParameterServer(
        rank=rank, world_size=2, master_addr="127.0.0.1", master_port=port, agent=agent,
        device=f"double:{rank}"))


def test_ranks_share_the_uploads(rekindle, neighbours, whole, halves):
    register(neighbours, halves, "shared")
    assert together(neighbours, lambda rank, server: server.gather_metas("shared")) == [None] * 2
    for _ in range(2):
        engine = Engine()
        assert together(neighbours, lambda rank, server: server.update(
            "shared", engine.of(rank))) == [None] * 2
        assert [report[0]["tensors"] for report in engine.reports] == [expected(whole)] * 2
    done = last_round(rekindle, "shared.checkpoint")
    assert (len(done["members"]), done["ready"], done["by_broadcast"]) == (2, 2, 2), done


def test_a_part_that_is_registered_anew_is_published_with_the_others(rekindle, neighbours):
    def register_and_gather(values):
        for rank, value in values.items():
            neighbours[rank].unregister_checkpoint("anew")
            neighbours[rank].register_checkpoint(
                "anew", named_tensors={f"w{rank}": torch.full((300,), value)})
        assert together(neighbours, lambda rank, server: server.gather_metas("anew")) == [None] * 2
        return neighbours[0].get_metas()

    first = register_and_gather({0: 1.0, 1: 2.0})
    assert neighbours[1].get_metas() == first
    together(neighbours, lambda rank, server: server.gather_metas("anew"))
    assert neighbours[0].get_metas() == first, "nothing was registered since"
    second = register_and_gather({1: 3.0})
    assert second[0]["model"] != first[0]["model"]
    with rk.attach(second[0]["model"], None, agent=rekindle.store("a")) as session:
        assert {name: set(tensor.tolist()) for name, tensor in session} == {
            "w0": {1.0}, "w1": {3.0}}
    for server in neighbours:
        server.unregister_checkpoint("anew")
    eventually(lambda: "anew.checkpoint" not in versions(rekindle))


def test_tensors_are_copied_when_they_are_registered(rekindle, server):
    tensor = torch.ones(1000)
    server.register_checkpoint("copied", named_tensors={"w": tensor})
    tensor.zero_()
    server.gather_metas("copied")
    with rk.attach("copied.checkpoint", agent=rekindle.store("a")) as session:
        assert dict(session)["w"].sum() == 1000


def test_ranks_that_disagree_about_a_tensor_all_fail(neighbours):
    for rank, rows in ((0, 3), (1, 4)):
        neighbours[rank].register_checkpoint("torn", named_tensors={"w": torch.ones(rows)})
    failed = together(neighbours, lambda rank, server: server.gather_metas("torn"))
    assert all(isinstance(error, rk.Error) and "'w'" in str(error) for error in failed), failed
    assert [server.get_metas() for server in neighbours] == [{}, {}]


UPDATES = {
    "from files, to some and to all": {"lists": [[0], [1], [], [0, 1], [1]], "from_files": True},
    "a worker that fails": {"lists": [[]], "fails": True},
}


@pytest.mark.parametrize("case", UPDATES)
@pytest.mark.parametrize("stores", ["aa", "ab"])
def test_checkpoint_engines_own_test_of_updates(rekindle, tmp_path, case, stores):
    """Its logic, with this class in the place of its, on one host and on two."""
    update_ranks([UPDATES[case] | {"device": f"double:{rank}", "agent": str(rekindle.store(store)),
                                   "seed": 7, "directory": str(tmp_path)}
                  for rank, store in enumerate(stores)])


def test_instances_that_join_use_what_others_have_registered(pair, options, whole, halves):
    register(pair, halves, "kept")
    together(pair, lambda rank, server: server.gather_metas("kept"))
    metas = pickle.dumps(pair[0].get_metas())  # as SGLang's script keeps them
    joining = ParameterServer(rank=0, world_size=1, **options[1])
    joining.gather_metas("kept")
    assert joining.get_metas() == {}
    joining.load_metas(pickle.loads(metas))
    engine = Engine(ranks=[0])
    joining.update("kept", engine.of(0), ranks=[0])
    assert engine.reports[0][0]["tensors"] == expected(whole)


def test_what_a_dead_process_has_registered_is_replaced(rekindle, options):
    for value in range(2):  # the first one ends without unregistering
        server = ParameterServer(rank=0, world_size=1, **options[0])
        server.register_checkpoint("again", named_tensors={"w": torch.full((3,), value)})
        server.gather_metas("again")

    def held():
        return [entry["model"] for entry in rk.status(agent=rekindle.store("a"))["holdings"]
                if entry["model"] == "again.checkpoint"]

    eventually(lambda: len(held()) == 1)
    with rk.attach("again.checkpoint", agent=rekindle.store("a")) as session:
        assert dict(session)["w"].tolist() == [1, 1, 1]


def test_an_update_of_nothing_is_an_error_on_every_rank(pair):
    together(pair, lambda rank, server: server.gather_metas("none"))
    assert [server.get_metas() for server in pair] == [{}, {}]
    failed = together(pair, lambda rank, server: server.update("none", lambda handles: None))
    for error in failed:
        assert isinstance(error, rk.NotFoundError) and "no rank has registered 'none'" in str(error)


@pytest.fixture
def server(rekindle, monkeypatch):
    return ParameterServer(rank=0, world_size=1, device="double:0", agent=rekindle.store("a"))


def test_arguments_that_are_wrong(server, memory_directory, monkeypatch):
    (memory_directory / "weights.npy").touch()
    for files, text in (([str(memory_directory / "weights.npy")], "only .safetensors"),
                        ([str(memory_directory / "none.safetensors")], "no such file")):
        with pytest.raises(rk.InvalidError, match=text):
            server.register_checkpoint("wrong", files=files)
    with pytest.raises(rk.InvalidError, match="model name"):
        server.register_checkpoint("a name", named_tensors={"w": torch.ones(1)})
    server.register_checkpoint("twice", named_tensors={"w": torch.ones(1)})
    with pytest.raises(rk.InvalidError, match="already"):
        server.register_checkpoint("twice", named_tensors={"w": torch.ones(1)})
    with pytest.raises(rk.InvalidError, match="metas of rank 0"):
        server.load_metas({0: object()})
    with pytest.raises(rk.InvalidError, match="req_func"):
        server.update("twice", None)
    for wrong in ({"rank": 2, "world_size": 2}, {"rank": 0, "world_size": 2, "device": "double:0"},
                  {"rank": 0, "world_size": 1, "device": "double:0", "mem_fraction": 2.0}):
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        with pytest.raises(rk.InvalidError):
            ParameterServer(**wrong)


def test_a_rank_that_has_nothing_registers_nothing(server):
    server.register_checkpoint("nothing")
    server.gather_metas("nothing")
    assert server.get_metas() == {}
    server.unregister_checkpoint("nothing")


def test_it_takes_what_checkpoint_engines_takes():
    """Every public method and argument of the class that it stands in for."""
    from checkpoint_engine.ps import ParameterServer as Original
    methods = [name for name, value in vars(Original).items()
               if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_"))]
    assert {"register_checkpoint", "gather_metas", "update"} < set(methods)
    for name in methods:
        theirs = inspect.signature(getattr(Original, name)).parameters
        ours = inspect.signature(getattr(ParameterServer, name)).parameters
        for argument, parameter in theirs.items():
            assert argument in ours, f"{name}({argument})"
            assert ours[argument].kind == parameter.kind, f"{name}({argument})"
            assert ours[argument].default == parameter.default, f"{name}({argument})"

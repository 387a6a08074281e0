"""What the engine integrations share, without an engine: the order of layers, whole tensors, what a
loader does besides copying, completeness, ranks. The engines themselves: engines/."""
import inspect
import json
import pickle
import sys
import types

import pytest
import torch
from torch import nn

import rekindle as rk
from rekindle._engines.completeness import check_loaded
from rekindle._engines.layers import by_layer, layer_of
from rekindle._engines.loading import ALONE, Place, fill, held, is_about_weights, one_version
from rekindle._engines.options import Options
from rekindle._engines.ranks import ONE, Ranks
from rekindle._engines.reading import whole_tensors
from rekindle._engines.writer import Spec, Writer
from rekindle.recording.effects import Unrecordable
from rekindle.recording.recorder import record_or_refuse
from rekindle.recording.tracer import TensorMeta
from rekindle.vllm import WorkerExtension
from rekindle.vllm.reloading import reload


# --- order


def test_a_layer_comes_as_soon_as_it_is_complete():
    names = ["embed", "m.0.a", "m.1.a", "m.0.b", "m.1.experts.3.b", "norm"]
    assert [layer_of(n) for n in names] == ["embed", "m.0", "m.1", "m.0", "m.1", "norm"]
    taken = []

    def arriving():
        for name in names:
            taken.append(name)
            yield name, None

    seen = [(name, len(taken)) for name, _ in by_layer(arriving(), names)]
    assert seen == [("embed", 1), ("m.0.a", 4), ("m.0.b", 4), ("m.1.a", 5),
                    ("m.1.experts.3.b", 5), ("norm", 6)]


# --- sessions


@pytest.fixture(scope="module")
def tensors(rekindle):
    torch.manual_seed(0)
    made = {"q": torch.randn(8, 4), "k": torch.randn(4, 4), "bias": torch.randn(8),
            "norm": torch.randn(4).to(torch.bfloat16)}
    rk.publish(made, "parts@1", agent=rekindle.store("a"))
    return made


@pytest.mark.parametrize("device", [None, "double:0"])
def test_whole_tensors_are_copies_and_what_a_session_lacks_is_not_a_number(
        rekindle, tensors, device):
    boxes = [rk.Box("q", (0, 0), (2, 4)), rk.Box("q", (6, 0), (2, 4)), rk.Box("norm")]
    with rk.attach("parts", 1, shard=boxes, agent=rekindle.store("a"), device=device) as session:
        got = dict(whole_tensors(session, 10.0))
    assert got.keys() == {"q", "norm"}
    assert torch.equal(got["q"][:2], tensors["q"][:2])
    assert torch.equal(got["q"][6:], tensors["q"][6:])
    assert got["q"][2:6].isnan().all()
    assert torch.equal(got["norm"], tensors["norm"])
    got["norm"].fill_(1)  # ours to write


def test_a_writer_streams_and_refuses_what_was_not_announced(rekindle):
    specs = [Spec("w", torch.bfloat16, (3, 2)), Spec("none", torch.float32, (0,))]
    tensor = torch.arange(6).view(3, 2).to(torch.bfloat16)
    store = str(rekindle.store("a"))
    with Writer("written@1", specs, store) as writer:
        writer.write("w", tensor)
        for name, wrong in (("w", tensor), ("x", tensor), ("none", torch.zeros(1))):
            with pytest.raises(rk.InvalidError, match=f"'{name}'"):
                writer.write(name, wrong)
        with pytest.raises(rk.InvalidError, match="'none' was announced and did not come"):
            writer.commit()
        writer.write("none", torch.zeros(0))
        writer.commit(30.0)
    with rk.attach("written", 1, agent=store) as session:
        assert torch.equal(dict(session)["w"], tensor)
    with pytest.raises(RuntimeError), Writer("written@2", specs, store) as writer:
        writer.write("w", tensor)
        raise RuntimeError("the trainer fails")
    with pytest.raises((rk.NotFoundError, rk.TimeoutError)):
        rk.attach("written", 2, agent=store, timeout=0.2)


# --- loaders


class Fused(nn.Module):
    """As engines do it: q and k in one parameter, of which a rank has a half."""

    def __init__(self, rank=0):
        super().__init__()
        self.qk = nn.Parameter(torch.full((6, 4), float("nan")), requires_grad=False)
        self.norm = nn.Parameter(torch.full((4,), float("nan"), dtype=torch.bfloat16),
                                 requires_grad=False)
        self.rank = rank

    def load_weights(self, weights):
        loaded = set()
        for name, weight in weights:
            if name == "norm":
                self.norm.data.copy_(weight)
                loaded.add("norm")
            elif name in ("q", "k"):
                rows = weight.shape[0] // 2
                to = self.qk.data.narrow(0, 0 if name == "q" else 4, rows)
                to.copy_(weight.narrow(0, self.rank * rows, rows))
                loaded.add("qk")
        return loaded


class Derived(Fused):
    """Computes from its parameters at the end of loading, as MLA models do."""

    def load_weights(self, weights):
        loaded = super().load_weights(weights)
        self.total = float(self.qk.sum())
        return loaded


class Flagged(Fused):
    def load_weights(self, weights):
        loaded = super().load_weights(weights)
        self.is_loaded = True
        return loaded


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache"))


def options_of(rekindle, **more):
    return Options.parse({"model": "parts", "agent": str(rekindle.store("a")), **more})


@pytest.mark.parametrize("device", [None, "double:0"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_filled_with_its_slices_and_fetches_no_more(rekindle, tensors, rank, device):
    for _ in range(2):  # recorded, then from the cache
        model = Fused(rank)
        now = fill(model, model.load_weights, options_of(rekindle, device=device),
                   Place("", 0, 0, 1, {"rank": rank}), [Fused])
        assert torch.equal(model.qk[:4], tensors["q"][4 * rank:4 * rank + 4])
        assert torch.equal(model.qk[4:], tensors["k"][2 * rank:2 * rank + 2])
        assert torch.equal(model.norm, tensors["norm"])
        assert held("target") is now and not now.session.closed
        assert {info.name: info.shape for info in now.session.tensors()} == {
            "q": (4, 4), "k": (2, 4), "norm": (4,)}


class Kept(Fused):
    def load_weights(self, weights):
        self.held = dict(weights)
        return super().load_weights(iter(self.held.items()))


class Mapped(Fused):
    """Reads a buffer that no weights go to, as loaders of experts do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.tensor([0, 4]), persistent=False)

    def load_weights(self, weights):
        assert self.rows[1].item() == 4
        return super().load_weights(weights)


@pytest.mark.parametrize("kind, why", [(Derived, "with qk"), (Kept, "sets held")])
def test_a_loader_that_does_more_than_copy_is_given_whole_tensors(
        rekindle, tensors, kind, why, caplog):
    caplog.set_level("INFO", "rekindle")
    for _ in range(2):  # and its recording is never cached
        caplog.clear()
        model = kind()
        now = fill(model, model.load_weights, options_of(rekindle), ALONE, [kind])
        assert why in caplog.text
        assert now.boxes is None
        assert torch.equal(model.qk[:4], tensors["q"][:4])
        if kind is Derived:
            assert model.total == float(model.qk.sum())


def test_what_a_loader_reads_of_other_memory_than_it_fills_is_fine(rekindle, tensors):
    model = Mapped()
    now = fill(model, model.load_weights, options_of(rekindle), ALONE, [Mapped])
    assert now.boxes is not None and torch.equal(model.qk[:4], tensors["q"][:4])


def test_a_loader_that_sets_attributes_is_recorded_each_time(rekindle, tensors):
    for _ in range(2):
        model = Flagged()
        now = fill(model, model.load_weights, options_of(rekindle), ALONE, [Flagged])
        assert now.boxes is not None and model.is_loaded
        assert torch.equal(model.qk[:4], tensors["q"][:4])


def test_of_several_ranks_the_instance_is_committed_when_all_are_filled(rekindle, tensors):
    import threading
    failed = []

    def rank(number):
        model = Fused(number)
        try:
            fill(model, model.load_weights, options_of(rekindle, commit_timeout=30.0),
                 Place("two", 1, number, 2, {"rank": number}), None, role=f"rank {number}")
        except Exception as why:
            failed.append(why)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    model = Fused(0)
    with pytest.raises(TimeoutError):  # alone it never is
        fill(model, model.load_weights, options_of(rekindle, commit_timeout=0.3),
             Place("lonely", 1, 0, 2), None)


def test_a_part_of_a_parameter_that_nothing_is_for_is_named(rekindle, tensors):
    model = Fused()
    rk.publish({"q": tensors["q"], "norm": tensors["norm"]}, "without-k@1",
               agent=rekindle.store("a"))
    options = options_of(rekindle, model="without-k")
    with pytest.raises(rk.InvalidError, match=r"qk \(16 of 24 elements written\)"):
        fill(model, model.load_weights, options, ALONE, [Fused])
    allowed = options_of(rekindle, model="without-k", allow_unwritten=["^qk$"])
    fill(model, model.load_weights, allowed, ALONE, [Fused])


def test_what_a_loader_says_counts_where_nothing_was_recorded():
    model = Fused()
    check_loaded(model, {"qk", "norm"}, [])
    check_loaded(model, None, [])
    with pytest.raises(rk.InvalidError, match=r"norm \(nothing written\)"):
        check_loaded(model, {"qk"}, [])
    check_loaded(model, {"qk"}, ["^norm$"])


def recorded(model, before):
    """The plan of a loader that does something to the model first."""
    def load(pairs):
        before()
        return model.load_weights(pairs)
    return record_or_refuse(load, {"norm": TensorMeta((4,), torch.bfloat16),
                                   "q": TensorMeta((8, 4), torch.float32)}, model)


def test_a_recording_sees_reads_and_lets_views_and_constants_pass():
    model = Fused()

    def harmless():
        model.qk.data.narrow(0, 0, 2).fill_(0)
        model.qk.view(-1).shape
        torch.ones(3).sum()

    assert recorded(model, harmless).opaque == ()
    with pytest.raises(Unrecordable, match="it does sum with qk"):
        recorded(model, lambda: model.qk[2:4].sum())
    with pytest.raises(Unrecordable, match="it does mul_ with norm"):
        recorded(model, lambda: model.norm.data.mul_(2))
    with pytest.raises(ZeroDivisionError):  # is not hidden
        recorded(model, lambda: 1 // 0)


def test_what_a_reload_leaves_out_is_named_unless_it_is_allowed_to(rekindle, tensors, monkeypatch):
    """vLLM's bookkeeping is a stand-in here: of the one layer, a part of `qk` has come."""
    layer = types.SimpleNamespace(can_load=lambda: True, load_numel=0, loaded_weights=[])

    def rows(param, weight):
        param.data[:4].copy_(weight)

    class Reloaded(Fused):
        def load_weights(self, weights):
            list(weights)
            bound = inspect.signature(rows).bind(self.qk, torch.ones(4, 4))
            layer.load_numel, layer.loaded_weights = 16, [("qk", bound)]

    name = "vllm.model_executor.model_loader.reload.layerwise"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(
        get_layerwise_info=lambda module: layer, _get_original_loader=lambda parameter: rows))

    def run(*allowed):
        layer.load_numel, layer.loaded_weights, model = 0, [], Reloaded()
        with rk.attach("parts", 1, agent=rekindle.store("a")) as session:
            reload(model, Options(allow_unwritten=allowed), session,
                   lambda pairs: model.load_weights(pairs))

    with pytest.raises(rk.InvalidError, match=r"qk \(16 of 24 elements written\), norm \(nothing"):
        run()
    with pytest.raises(rk.InvalidError, match=r"of norm \(nothing written\): the model must not"):
        run("^qk$")
    run("^qk$", "^norm$")


def test_status_of_a_worker_is_json(rekindle, tensors):
    model = Fused()
    fill(model, model.load_weights, options_of(rekindle), ALONE, None)
    said = json.loads(json.dumps(WorkerExtension().rekindle_status()))["target"]
    assert said["model"] == "parts" and said["version"] == 1 and said["recorded"]
    assert WorkerExtension().rekindle_wait_for_update(0.0) is None
    rk.publish({"q": tensors["q"] + 1}, "parts@2", agent=rekindle.store("a"))
    assert WorkerExtension().rekindle_wait_for_update(30.0) == 2


def test_ranks_load_the_version_that_the_first_one_finds(rekindle, tensors):
    store = rekindle.store("a")
    said = []

    def to_all(value):
        said.append(pickle.dumps([value, None]))  # as on its way to others
        return [value, None]
    first, other = Ranks(0, 2, to_all), Ranks(1, 2, lambda _: pickle.loads(said[-1]))
    rk.publish(tensors, "ranks@1", agent=store)
    options = options_of(rekindle, model="ranks")
    assert one_version(options, first).version == 1
    rk.publish(tensors, "ranks@2", agent=store)
    assert one_version(options, other).version == 1
    with pytest.raises(rk.NotFoundError):
        one_version(options_of(rekindle, model="nobody-has-it"), first)
    with pytest.raises(rk.NotFoundError, match="nobody-has-it"):
        one_version(options, other)


# --- ranks


def together(work, size=2):
    """What `work(ranks)` returns or raises on each rank; each is a thread."""
    import threading
    meeting, said, found = threading.Barrier(size, timeout=60), [None] * size, [None] * size

    def gather(rank, value):
        said[rank] = pickle.dumps(value)  # as on its way between processes
        meeting.wait()
        values = [pickle.loads(one) for one in said]
        meeting.wait()
        return values

    def run(rank):
        try:
            found[rank] = work(Ranks(rank, size, lambda value: gather(rank, value)))
        except Exception as why:
            found[rank] = why

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def failing(ranks, errors, undone):
    def step():
        if ranks.rank in errors:
            raise errors[ranks.rank]
        return ranks.rank
    return ranks.together(step, undone.append)


def test_a_step_is_taken_by_all_ranks_or_has_failed_on_all():
    undone = []
    assert together(lambda ranks: failing(ranks, {}, undone), 3) == [0, 1, 2] and undone == []
    lost = rk.PeerLostError("the agent is gone")
    found = together(lambda ranks: failing(ranks, {1: lost}, undone), 3)
    assert found[1] is lost and sorted(undone) == [0, 2]
    for one in (found[0], found[2]):
        assert isinstance(one, rk.PeerLostError) and str(one) == "rank 1 of 3: the agent is gone"


def test_all_ranks_meet_the_failure_that_a_fall_back_would_not_mend():
    found = together(lambda ranks: failing(
        ranks, {0: rk.TimeoutError("late"), 1: RuntimeError("a bug")}, []))
    assert [is_about_weights(one) for one in found] == [False, False]
    assert isinstance(found[1], RuntimeError) and "a bug" in str(found[0])
    assert str(found[0].__cause__) == "late"


def test_a_rank_that_is_gone_ends_the_step_and_one_alone_asks_nobody():
    undone = []

    def gone(value):
        raise ConnectionError("closed by peer")

    with pytest.raises(rk.InternalError, match="is gone: closed by peer"):
        Ranks(0, 2, gone).together(lambda: 1, undone.append)
    assert undone == [1]
    with pytest.raises(ZeroDivisionError):
        Ranks(0, 2, gone).together(lambda: 1 // 0)
    assert ONE.together(lambda: 5) == ONE.first(5) == 5


def test_when_a_rank_cannot_be_filled_none_is(rekindle, tensors):
    """At once: the others would wait for it to commit."""
    class Breaks(Fused):
        def load_weights(self, weights):
            list(weights)
            raise rk.CorruptError("rotten")

    def rank(ranks):
        model = (Breaks if ranks.rank == 1 else Fused)(ranks.rank)
        return fill(model, model.load_weights, options_of(rekindle, version=1, record=False),
                    Place("torn", 1, ranks.rank, 2), None, f"torn {ranks.rank}", ranks)

    found = together(rank)
    assert [type(one) for one in found] == [rk.CorruptError, rk.CorruptError]
    assert held("torn 0") is None and held("torn 1") is None


def test_the_plugin_lets_a_vllm_run_that_it_does_not_know(monkeypatch, caplog):
    from rekindle import vllm
    monkeypatch.setattr("rekindle.vllm.versions.installed", lambda package: "0.99.0")
    vllm.register()
    assert "vLLM 0.99.0 is not known" in caplog.text

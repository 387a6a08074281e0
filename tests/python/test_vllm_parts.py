"""What the engine integrations share, without an engine: options, the order of layers, whole
tensors, what a loader does besides copying, and completeness. The engines themselves: engines/."""
import json
import pickle

import pytest
import torch
from torch import nn

import rekindle as rk
from rekindle._engines.completeness import check_loaded
from rekindle._engines.effects import EffectWatch, Unrecordable
from rekindle._engines.layers import by_layer, layer_of
from rekindle._engines.loading import ALONE, Place, fill, held, one_version
from rekindle._engines.options import Options
from rekindle._engines.reading import whole_tensors
from rekindle._engines.writer import Spec, Writer
from rekindle.sglang.versions import supported as sglang_supported
from rekindle.vllm import WorkerExtension
from rekindle.vllm.versions import supported as vllm_supported


# --- options


def test_options_are_what_the_user_says_and_defaults():
    options = Options.parse({"model": "qwen3", "version": 41, "record": False,
                             "allow_unwritten": ["bias$"], "attach_timeout": 5})
    assert (options.name, options.version, options.record) == ("qwen3", 41, False)
    assert options.allow_unwritten == ("bias$",) and options.fallback is None


@pytest.mark.parametrize("config, named", [
    ({"modle": "x"}, "'modle'"), ({"model": 3}, "model"), ({"record": "yes"}, "record"),
    ({"attach_timeout": 0}, "attach_timeout"), ({"fallback": "dummy"}, "fallback"),
    ({"generation": -1}, "generation"), ({"version": True}, "version"), ([], "object"),
    ({"allow_unwritten": "bias"}, "allow_unwritten")])
def test_a_wrong_option_is_refused_by_name(config, named):
    with pytest.raises(rk.InvalidError, match=named):
        Options.parse(config)


def test_a_draft_of_another_checkpoint_must_be_named(monkeypatch):
    options = Options.parse({"model": "target", "group": "g"})
    assert options.of_draft(same_checkpoint=True).name == "target"
    assert options.of_draft(same_checkpoint=True).group is None
    with pytest.raises(rk.InvalidError, match="draft_model"):
        options.of_draft(same_checkpoint=False)
    named = Options.parse({"model": "target", "draft_model": "eagle", "draft_version": 2})
    assert (named.of_draft(False).name, named.of_draft(False).version) == ("eagle", 2)
    monkeypatch.delenv("REKINDLE_MODEL", raising=False)
    with pytest.raises(rk.InvalidError, match="no model"):
        Options().name
    monkeypatch.setenv("REKINDLE_MODEL", "from-run")
    assert Options().name == "from-run"


@pytest.mark.parametrize("version, is_supported", [
    ("0.23.0", True), ("0.26.1", True), ("0.33.0+cu130", True), ("0.22.9", False),
    ("0.34.0", False), ("1.0.0", False), ("dev", False)])
def test_vllm_versions(version, is_supported):
    assert vllm_supported(version) is is_supported


@pytest.mark.parametrize("version, is_supported", [
    ("0.5.23", True), ("0.5.23.post1", True), ("0.5.22", False), ("0.5.230", False), ("", False)])
def test_sglang_versions(version, is_supported):
    assert sglang_supported(version) is is_supported


def test_a_worker_extension_has_prefixed_names_only_and_no_state():
    names = [name for name in dir(WorkerExtension) if not name.startswith("__")]
    assert names and all(name.startswith("rekindle_") for name in names)
    assert "__init__" not in vars(WorkerExtension)


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


def test_the_watch_sees_reads_and_lets_views_and_constants_pass():
    model = Fused()
    with EffectWatch(model) as watch:
        model.qk.data.narrow(0, 0, 2).fill_(0)
        model.qk.view(-1).shape
        torch.ones(3).sum()
    assert watch.reads == {}
    with EffectWatch(model) as watch:
        model.qk[2:4].sum()
    assert list(watch.reads) == ["qk"]
    with pytest.raises(Unrecordable, match="it does mul_ with norm"), EffectWatch(model):
        model.norm.data.mul_(2)
    with pytest.raises(ZeroDivisionError), EffectWatch(model):
        model.norm.sum()
        raise ZeroDivisionError  # is not hidden


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

    def first(value):
        said.append(value)
        return value
    rk.publish(tensors, "ranks@1", agent=store)
    options = options_of(rekindle, model="ranks")
    assert one_version(options, True, first).version == 1
    rk.publish(tensors, "ranks@2", agent=store)
    assert one_version(options, False, lambda _: said[-1]).version == 1
    with pytest.raises(rk.NotFoundError):
        one_version(options_of(rekindle, model="nobody-has-it", attach_timeout=0.2), True, first)
    with pytest.raises(rk.NotFoundError, match="nobody-has-it"):  # pickled on its way to others
        one_version(options, False, lambda _: pickle.loads(pickle.dumps(said[-1])))


def test_the_plugin_lets_a_vllm_run_that_it_does_not_know(monkeypatch, caplog):
    from rekindle import vllm
    monkeypatch.setattr("rekindle.vllm.versions.installed", lambda package: "0.99.0")
    vllm.register()
    assert "vLLM 0.99.0 is not known" in caplog.text

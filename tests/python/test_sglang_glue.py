"""Our side of SGLang's interfaces, with a small stand-in for SGLang."""
import types

import pytest
import torch
from torch import nn

import rekindle as rk
from sglang_stand_in import (  # noqa: F401  (fixtures)
    DefaultModelLoader, LoadConfig, LoadFormat, Model, Registry, from_disk, group, load, publish,
    published, sglang, silent)


def test_the_plugin_adds_the_format_once_and_leaves_others_alone(sglang):
    from rekindle import sglang as ours
    from rekindle.sglang.hooks import verify_load_format
    ours.plugin()
    ours.plugin()
    assert sglang.choices == ["auto", "rekindle"]
    (target, hook, kind), (adapters, _, _), (recovery, _, _) = Registry.registered
    assert adapters == "sglang.srt.lora.lora.LoRAAdapter.initialize_weights"
    assert recovery == "sglang.srt.eplb.eplb_manager.update_expert_location_with_recovery"
    assert target == "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    assert (hook, kind) == (verify_load_format, "around")
    config = LoadConfig("auto")
    hook(LoadConfig._verify_load_format, config)
    assert config.load_format is LoadFormat.AUTO


def test_an_unknown_sglang_is_refused(monkeypatch):
    from rekindle import sglang as ours
    monkeypatch.setattr("rekindle.sglang.versions.installed", lambda package: "0.6.0")
    with pytest.raises(rk.InvalidError, match="0.6.0"):
        ours.plugin()


def test_a_model_gets_its_slices_and_is_post_processed(rekindle, published):
    from rekindle._engines.loading import held
    _, model = load(rekindle)
    assert torch.equal(model.part, published["w"][2:])
    assert DefaultModelLoader.steps == ["postprocess"]
    assert [(i.name, i.shape) for i in held("target").session.tensors()] == [("w", (2, 2))]


def test_the_own_loader_takes_over_only_when_asked_to(rekindle, published):
    wrong = {"model": "nobody-has-it", "attach_timeout": 0.2}
    with pytest.raises((rk.NotFoundError, rk.TimeoutError)):
        load(rekindle, **wrong)
    _, model = load(rekindle, **wrong, fallback="default")
    assert torch.equal(model.part, torch.full((2, 2), 7.0))


def test_an_update_by_name_holds_the_new_session_and_lets_go_of_the_old_one(rekindle, published):
    from rekindle import sglang as ours
    from rekindle._engines.loading import held
    _, model = load(rekindle, instance="sg-0")
    before = held("target")
    later = publish(rekindle, "sg@2", 2)
    DefaultModelLoader.steps = []
    ours.load(model, ours.version("sg", 2))
    assert torch.equal(model.part, later)
    assert DefaultModelLoader.steps == []  # SGLang's begin and end of an update do that
    now = held("target")
    assert now.session.version == 2 and now.place.generation > before.place.generation
    assert "closed" in repr(before.session)
    ours.load(model, [("w", torch.zeros(4, 2))])  # of the engine's own
    assert torch.equal(model.part, torch.zeros(2, 2))


def test_a_staged_version_is_taken_while_the_model_serves(rekindle, published):
    from rekindle import sglang as ours
    from rekindle._engines.loading import held
    from rekindle._engines.staging import staged_status
    publish(rekindle, "stg@1", 1)
    _, model = load(rekindle, model="stg", instance="sg-staged", device="double:0",
                    staging_reserve_bytes=0)
    served = model.part.clone()
    second, third = (publish(rekindle, f"stg@{n}", n) for n in (12, 13))
    ours.load(model, ours.stage("stg", 12))
    assert staged_status("target", 30.0)["staged"]
    assert torch.equal(model.part, served) and held("target").session.version != 12
    # Another version: the staged one is given up.
    ours.load(model, ours.version("stg", 13))
    assert torch.equal(model.part, third)
    with pytest.raises(rk.NotFoundError, match="stage one before"):
        staged_status("target")
    ours.load(model, ours.stage("stg", 12))
    assert staged_status("target", 30.0)["staged"]
    ours.load(model, ours.version("stg", 12))
    assert torch.equal(model.part, second) and held("target").session.version == 12


def test_a_version_that_does_not_fit_is_not_staged(rekindle, published):
    from rekindle import sglang as ours
    from rekindle._engines.loading import held
    publish(rekindle, "fits@1", 1)
    _, model = load(rekindle, model="fits", device="double:0", staging="require",
                    staging_reserve_bytes=8 << 30)
    served = model.part.clone()
    publish(rekindle, "fits@14", 14)
    with pytest.raises(rk.ExhaustedError, match="no room to stage fits@14"):
        ours.load(model, ours.stage("fits", 14))
    rk.publish({"w": torch.zeros(3, 2)}, "fits@15", agent=rekindle.store("a"))
    with pytest.raises(rk.InvalidError, match="w is float32"):
        ours.load(model, ours.stage("fits", 15))
    assert torch.equal(model.part, served) and held("target").torn is None


def test_an_update_from_disks_place_takes_the_newest_and_goes_back_when_it_fails(rekindle, sglang):
    from rekindle._engines.loading import held
    first = publish(rekindle, "disk@1", 1)
    _, model = load(rekindle, model="disk")
    sglang.server.model_loader_extra_config = {"model": "disk", "agent": str(rekindle.store("a"))}
    DefaultModelLoader.steps = []
    second = publish(rekindle, "disk@2", 2)
    from_disk(model)()
    assert torch.equal(model.part, second) and held("target").session.version == 2
    assert DefaultModelLoader.steps == ["restore", "postprocess"]
    rk.publish({"unused": first}, "disk@3", agent=rekindle.store("a"))
    attempt = from_disk(model)
    with pytest.raises(rk.InvalidError, match="disk@3 does not fit .* has no w, .* keeps disk@2"):
        attempt()
    assert held("target").torn is None and torch.equal(model.part, second)
    attempt()
    assert torch.equal(model.part, second)
    assert held("target").session.version == 2 and held("target").torn is None


@pytest.mark.parametrize("record", [True, False])
def test_a_loader_that_writes_a_part_only_is_an_error(rekindle, published, monkeypatch, record):
    from rekindle import sglang as ours
    _, model = load(rekindle, record=record)

    def load_weights(weights):
        for name, weight in weights:
            if name == "w":
                model.part.data[:1].copy_(weight.narrow(0, 2, 1))

    monkeypatch.setattr(model, "load_weights", load_weights)
    with pytest.raises(rk.InvalidError, match=r"part \(2 of 4 elements written\)"):
        ours.load(model, ours.version("sg", 1))


def test_pipeline_stages_refuse_an_update_before_anything_is_written(rekindle, published, sglang):
    from rekindle import sglang as ours
    _, model = load(rekindle)
    sglang.parallel.pp_size = 2
    before = model.part.clone()
    with pytest.raises(rk.InvalidError, match="2 pipeline stages"):
        ours.load(model, ours.version("sg", 1))
    assert torch.equal(model.part, before)


def test_each_data_parallel_replica_is_an_instance(rekindle, published, sglang):
    from rekindle._engines.loading import held
    sglang.parallel.dp_rank = 3
    load(rekindle, instance="sg-dp")
    assert held("target").place.instance == "sg-dp.dp3"


def test_a_loader_that_copies_by_way_of_a_buffer_is_recorded(rekindle, published, monkeypatch):
    """What sees writes must not ask stand-ins for their memory."""
    from rekindle import sglang as ours
    from rekindle._engines.loading import held
    _, model = load(rekindle)

    def load_weights(weights):
        for name, weight in weights:
            if name == "w":
                part = weight.narrow(0, 2, 2)
                buffer = torch.empty_like(part)
                buffer.copy_(part)
                model.part.data.copy_(buffer)

    monkeypatch.setattr(model, "load_weights", load_weights)
    ours.load(model, ours.version("sg", 1))
    assert [info.shape for info in held("target").session.tensors()] == [(2, 2)]


# --- ranks


def recover(model, load_format="rekindle", **filtered):
    """As `update_expert_location_with_recovery` does for a rank that lacks experts."""
    from rekindle.sglang.recovery import recovering

    def update(path, load_format, weight_name_filter=None):  # SGLang's, as far as it matters here
        from rekindle.sglang.loader import RekindleModelLoader
        loader = RekindleModelLoader(LoadConfig(RekindleModelLoader))
        pairs = loader._get_weights_iterator(types.SimpleNamespace(
            model_config=types.SimpleNamespace(model_path=path)))
        if weight_name_filter is not None:
            pairs = (pair for pair in pairs if weight_name_filter(pair[0]))
        try:
            loader.load_weights_and_postprocess(model, pairs, torch.device("cpu"))
        except Exception as why:
            return False, str(why)
        return True, "Succeeded"

    def original(*, update_weights_from_disk_callable):
        update_weights_from_disk_callable("m", load_format, **filtered)

    recovering(original, update_weights_from_disk_callable=update)


@pytest.mark.parametrize("filtered", [{"weight_name_filter": lambda name: name == "w"}, {}],
                         ids=["some", "all"])
def test_a_rank_that_lacks_experts_gets_those_of_the_version_held_and_asks_nobody(
        rekindle, sglang, filtered, monkeypatch):
    from rekindle._engines.loading import held
    name = f"lacks-{len(filtered)}"
    first = publish(rekindle, f"{name}@1", 1)
    _, model = load(rekindle, model=name, instance=name)
    sglang.server.model_loader_extra_config = {"model": name, "agent": str(rekindle.store("a"))}
    publish(rekindle, f"{name}@2", 2)
    model.part.data.fill_(float("nan"))
    before, DefaultModelLoader.steps = held("target"), []
    sglang.world.group = sglang.world.tensor_parallel = silent()
    given, inner = [], model.load_weights
    monkeypatch.setattr(model, "load_weights", lambda pairs: inner(
        (given.append(pair[0]) or pair) for pair in pairs))
    recover(model, **filtered)
    assert torch.equal(model.part, first)
    assert set(given) == ({"w"} if filtered else {"w", "unused"})
    assert held("target") is before and not before.session.closed
    assert DefaultModelLoader.steps == ["postprocess"]


def test_experts_that_cannot_be_had_end_the_server(rekindle, published, sglang, monkeypatch):
    """SGLang does not look at what its own update says."""
    _, model = load(rekindle)
    sglang.world.group = silent()
    with pytest.raises(rk.InternalError, match="has none of the tensors that SGLang asks for"):
        recover(model, weight_name_filter=lambda name: False)
    from rekindle._engines.loading import let_go
    let_go("target")
    with pytest.raises(rk.InternalError, match="have not come through Rekindle"):
        recover(model)
    sglang.server.model_loader_extra_config = {"model": "sg", "fallback": "default"}
    monkeypatch.setattr(DefaultModelLoader, "_get_weights_iterator", lambda self, source: iter(
        [("w", torch.full((4, 2), 7.0))]), raising=False)
    recover(model)
    assert torch.equal(model.part, torch.full((2, 2), 7.0))


@pytest.mark.parametrize("file_format", [False, True])
def test_an_adapter_is_read_from_files_whatever_the_model_came_from(
        rekindle, published, file_format):
    from rekindle.sglang.hooks import adapter_from_files, verify_load_format

    def initialize_weights(adapter):
        own = DefaultModelLoader(adapter.load_config)
        adapter.weights = dict(own._get_all_weights(None, None))

    config = LoadConfig("auto" if file_format else "rekindle", {} if file_format else {
        "model": "sg", "agent": str(rekindle.store("a"))})
    verify_load_format(LoadConfig._verify_load_format, config)
    adapter = types.SimpleNamespace(load_config=config)
    adapter_from_files(initialize_weights, adapter)
    assert torch.equal(adapter.weights["w"], torch.full((4, 2), 7.0))
    assert (adapter.load_config is config) == file_format
    if not file_format:  # the model's stays
        assert config.model_loader_extra_config["model"] == "sg"


def test_a_backup_of_experts_that_rekindle_does_not_fill_is_refused(rekindle, published, sglang):
    from rekindle import sglang as ours
    sglang.experts.enable_elastic_expert_backup = True
    _, model = load(rekindle)  # without a backend SGLang makes none
    sglang.experts.elastic_ep_backend = "mooncake"
    with pytest.raises(rk.InvalidError, match="start the server without it"):
        load(rekindle)
    before = model.part.clone()
    publish(rekindle, "sg@3", 3)
    with pytest.raises(rk.InvalidError, match="--enable-elastic-expert-backup"):
        ours.load(model, ours.version("sg", 3))
    with pytest.raises(rk.InvalidError, match="--enable-elastic-expert-backup"):
        from_disk(model)()
    assert torch.equal(model.part, before)


def test_ranks_that_share_a_draft_load_the_version_that_the_first_one_finds(rekindle, sglang):
    from rekindle._engines.loading import held
    publish(rekindle, "target@1", 1)
    first = publish(rekindle, "draft@1", 1)
    load(rekindle, model="target")
    heard = []
    sglang.world.tensor_parallel = group(lambda value: heard.append(value))  # and has not failed
    sglang.world.group = silent()
    _, model = load(rekindle, "d", True, model="target", draft_model="draft")
    assert heard[0] == 1 and set(heard[1:]) == {None}
    assert torch.equal(model.part, first) and held("draft").session.version == 1

    publish(rekindle, "draft@2", 2)
    said = iter([1])  # of the first rank, that has not seen the newest; then nothing fails
    sglang.world.tensor_parallel = types.SimpleNamespace(
        rank_in_group=1, world_size=2,
        all_gather_object=lambda value: [next(said, value), value])
    _, model = load(rekindle, "d", True, model="target", draft_model="draft")
    assert torch.equal(model.part, first) and held("draft").session.version == 1


def test_a_draft_that_fails_on_another_rank_fails_here(rekindle, published, sglang):
    from rekindle._engines.loading import held
    from rekindle._engines.ranks import _Failure
    sglang.world.tensor_parallel = group(
        lambda value: _Failure("CORRUPT", "rotten") if value is None else value)
    with pytest.raises(rk.CorruptError, match="rank 1 of 2: rotten"):
        load(rekindle, "d", True, draft_model="sg")
    assert held("draft") is None


def test_a_rank_that_joins_says_its_version_and_asks_nobody(rekindle, published, sglang):
    from rekindle._engines.loading import held
    sglang.experts.is_ep_joiner = True
    sglang.world.group = sglang.world.tensor_parallel = silent()
    with pytest.raises(rk.InvalidError, match="say which version"):
        load(rekindle)
    _, model = load(rekindle, version=1, instance="joined")
    assert torch.equal(model.part, published["w"][2:])
    assert held("target").place.world == 1


def test_ranks_that_are_to_load_different_versions_do_not(rekindle, published, sglang):
    from rekindle import sglang as ours
    _, model = load(rekindle)
    before = model.part.clone()
    sglang.world.group = group(lambda value: "sg@7" if value == "sg@1" else value)
    with pytest.raises(rk.InternalError, match="are to load sg@1, sg@7 at the same time"):
        ours.load(model, ours.version("sg", 1))
    assert torch.equal(model.part, before)


@pytest.mark.parametrize("algorithm, lacks", [
    ("EAGLE", None), ("EAGLE3", r"lm_head\.weight \(nothing"),
    ("STANDALONE", r"embed_tokens\.weight \(nothing"),
    ("DFLASH", r"embed_tokens\.weight \(nothing")])
def test_a_draft_may_lack_what_sglang_gives_it_of_the_target(
        rekindle, published, sglang, monkeypatch, algorithm, lacks):
    class Draft(Model):
        def __init__(self):
            super().__init__()
            self.embed_tokens, self.lm_head = nn.Embedding(2, 2), nn.Linear(2, 2, bias=False)

    monkeypatch.setattr(DefaultModelLoader, "makes", Draft)
    sglang.speculation.speculative_algorithm = algorithm
    if lacks is None:
        _, model = load(rekindle, "d", True, draft_model="sg", draft_version=1)
        assert torch.equal(model.part, published["w"][2:])
    else:
        with pytest.raises(rk.InvalidError, match=lacks):
            load(rekindle, "d", True, draft_model="sg")
    with pytest.raises(rk.InvalidError, match="embed_tokens"):
        load(rekindle)  # as a target

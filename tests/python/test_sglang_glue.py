"""Our side of SGLang's interfaces, with a small stand-in for SGLang: what of it is used is written
down here, from the sources of 0.5.23. It says nothing about SGLang itself."""
import enum
import sys
import types
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import rekindle as rk


class LoadFormat(str, enum.Enum):
    AUTO = "auto"


@dataclass
class LoadConfig:
    load_format: object = "auto"
    model_loader_extra_config: object = field(default_factory=dict)
    draft_model_idx: object = None

    def _verify_load_format(self):
        self.load_format = LoadFormat(self.load_format)


class DefaultModelLoader:
    """Makes a model, and asks itself for weights in the two places where ours steps in."""

    steps = []  # what was called, by static methods too

    def __init__(self, load_config):
        if load_config.model_loader_extra_config:
            raise ValueError("unexpected extra config")
        self.load_config = load_config

    def load_model(self, *, model_config, device_config):
        model = Model()
        self.load_weights_and_postprocess(
            model, self._get_all_weights(model_config, model), torch.device(device_config.device))
        return model.eval()

    def _get_all_weights(self, model_config, model):
        return iter([("w", torch.full((4, 2), 7.0))])  # "files"

    @staticmethod
    def load_weights_and_postprocess(model, weights, target_device):
        DefaultModelLoader.load_weights_only(model, weights, target_device)
        DefaultModelLoader.postprocess_weights(model, target_device)

    @staticmethod
    def load_weights_only(model, weights, target_device):
        model.load_weights(weights)

    @staticmethod
    def postprocess_weights(model, target_device):
        DefaultModelLoader.steps.append("postprocess")

    @staticmethod
    def restore_weights_before_loading(model, target_device):
        DefaultModelLoader.steps.append("restore")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Parameter(torch.full((2, 2), float("nan")), requires_grad=False)

    def load_weights(self, weights):  # SGLang's return nothing
        for name, weight in weights:
            if name == "w":
                self.part.data.copy_(weight.narrow(0, 2, 2))


class Registry:
    registered = []

    @classmethod
    def register(cls, target, hook, hook_type):
        cls.registered.append((target, hook, hook_type))


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    choices = ["auto"]
    server = types.SimpleNamespace(model_path="m", model_loader_extra_config=None)
    parallel = types.SimpleNamespace(pp_size=1, dp_rank=None, attn_dp_size=1)
    parts = {
        "arg_groups.choices": {"LOAD_FORMAT_CHOICES": choices,
                               "add_load_format_choices": choices.extend},
        "plugins.hook_registry": {"HookRegistry": Registry,
                                  "HookType": types.SimpleNamespace(AROUND="around")},
        "configs.load_config": {"LoadConfig": LoadConfig, "LoadFormat": LoadFormat},
        "model_loader.loader": {"DefaultModelLoader": DefaultModelLoader,
                                "BaseModelLoader": type("Base", (), {"__init__": base_init})},
        "distributed.parallel_state": {"get_world_group": lambda: types.SimpleNamespace(
            rank_in_group=0, world_size=1, all_gather_object=lambda value: [value])},
        "runtime_context": {"get_model": lambda: server, "get_parallel": lambda: parallel}}
    for name, contents in parts.items():
        module = types.ModuleType(f"sglang.srt.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for ours in ("loader", "updating", "hooks", "filling", "ranks"):
        monkeypatch.delitem(sys.modules, f"rekindle.sglang.{ours}", raising=False)
        monkeypatch.delattr(f"rekindle.sglang.{ours}", raising=False)
    monkeypatch.setattr("rekindle.sglang.versions.installed", lambda package: "0.5.23")
    monkeypatch.setattr("rekindle._engines.loading._held", {})
    DefaultModelLoader.steps, Registry.registered = [], []
    return types.SimpleNamespace(choices=choices, server=server, parallel=parallel)


def base_init(self, load_config):
    self.load_config = load_config


@pytest.fixture(scope="module")
def published(rekindle):
    every = {"w": torch.arange(8.0).view(4, 2), "unused": torch.ones(3)}
    rk.publish(every, "sg@1", agent=rekindle.store("a"))
    return every


def load(rekindle, **options):
    """As SGLang does: the configuration is checked, the loader made and run."""
    from rekindle.sglang.hooks import verify_load_format
    config = LoadConfig("rekindle", {"model": "sg", "agent": str(rekindle.store("a")), **options})
    verify_load_format(LoadConfig._verify_load_format, config)
    loader = config.load_format(config)
    return loader, loader.load_model(
        model_config=types.SimpleNamespace(model_path="m"),
        device_config=types.SimpleNamespace(device="cpu"))


def test_the_plugin_adds_the_format_once_and_leaves_others_alone(sglang):
    from rekindle import sglang as ours
    from rekindle.sglang.hooks import verify_load_format
    ours.plugin()
    ours.plugin()
    assert sglang.choices == ["auto", "rekindle"]
    (target, hook, kind), = Registry.registered
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


def from_disk(model, **config):
    """As `update_weights_from_disk`: a loader without options, asked for weights, then to load."""
    from rekindle.sglang.loader import RekindleModelLoader
    loader = RekindleModelLoader(LoadConfig(RekindleModelLoader))
    source = types.SimpleNamespace(model_config=types.SimpleNamespace(model_path="m", **config))

    def attempt():
        weights = loader._get_weights_iterator(source)
        DefaultModelLoader.restore_weights_before_loading(model, torch.device("cpu"))
        loader.load_weights_and_postprocess(model, weights, torch.device("cpu"))
    return attempt


def publish(rekindle, name, factor):
    later = {"w": torch.arange(8.0).view(4, 2) * factor, "unused": torch.ones(3)}
    rk.publish(later, name, agent=rekindle.store("a"))
    return later["w"][2:]


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
    with pytest.raises(rk.InvalidError, match="must not serve"):
        attempt()
    assert "disk@3" in held("target").torn
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


def test_what_a_loader_writes_is_seen_in_its_threads_too():
    """As DeepSeek's: tensors in host memory are copied by a pool."""
    from concurrent.futures import ThreadPoolExecutor

    from rekindle._engines.writes import WriteWatch
    model = nn.ParameterDict({name: nn.Parameter(torch.empty(4, 2), requires_grad=False)
                              for name in ("whole", "part", "other", "none")})
    submit = ThreadPoolExecutor.submit
    with WriteWatch(model) as watch, ThreadPoolExecutor() as pool:
        done = pool.submit(lambda: (model["whole"].data[:3].copy_(torch.ones(3, 2)),
                                    model["whole"].data[3:].fill_(0)))
        model["part"].data[1:].copy_(torch.ones(3, 2))
        model["part"].data[1:].copy_(torch.zeros(3, 2))
        model["other"].data = torch.ones(4, 2)
        done.result()
    assert watch.elements() == {"whole": 8, "part": 6, "other": 8, "none": 0}
    assert ThreadPoolExecutor.submit is submit

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
    parts = {
        "arg_groups.choices": {"LOAD_FORMAT_CHOICES": choices,
                               "add_load_format_choices": choices.extend},
        "plugins.hook_registry": {"HookRegistry": Registry,
                                  "HookType": types.SimpleNamespace(AROUND="around")},
        "configs.load_config": {"LoadConfig": LoadConfig, "LoadFormat": LoadFormat},
        "model_loader.loader": {"DefaultModelLoader": DefaultModelLoader,
                                "BaseModelLoader": type("Base", (), {"__init__": base_init})},
        "distributed": {"get_world_group": lambda: types.SimpleNamespace(
            rank_in_group=0, world_size=1)},
        "runtime_context": {"get_model": lambda: types.SimpleNamespace(model_path="m")}}
    for name, contents in parts.items():
        module = types.ModuleType(f"sglang.srt.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for ours in ("loader", "updating", "hooks"):
        monkeypatch.delitem(sys.modules, f"rekindle.sglang.{ours}", raising=False)
    monkeypatch.setattr("rekindle.sglang.versions.installed", lambda package: "0.5.23")
    monkeypatch.setattr("rekindle._engines.loading._held", {})
    DefaultModelLoader.steps, Registry.registered = [], []
    return types.SimpleNamespace(choices=choices)


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


def test_a_running_model_takes_versions_in_both_ways(rekindle, published):
    from rekindle import sglang as ours
    from rekindle._engines.loading import held
    _, model = load(rekindle, instance="sg-0")
    first = held("target").place.generation
    later = {"w": published["w"] + 10, "unused": torch.ones(3)}
    rk.publish(later, "sg@2", agent=rekindle.store("a"))
    DefaultModelLoader.steps = []
    ours.load(model, ours.version("sg", 2))
    assert torch.equal(model.part, later["w"][2:])
    assert DefaultModelLoader.steps == ["restore", "postprocess"]
    assert held("target").session.version == 2 and held("target").place.generation == first + 1
    ours.load(model, [("w", torch.zeros(4, 2))])  # of the engine's own
    assert torch.equal(model.part, torch.zeros(2, 2))
    # /update_weights_from_disk makes a loader without options, and asks it for an iterator.
    from rekindle.sglang.loader import RekindleModelLoader
    pairs = RekindleModelLoader(LoadConfig(RekindleModelLoader))._get_weights_iterator(
        types.SimpleNamespace(prefix="x."))
    assert {name: tuple(tensor.shape) for name, tensor in pairs} == {"x.w": (4, 2),
                                                                     "x.unused": (3,)}

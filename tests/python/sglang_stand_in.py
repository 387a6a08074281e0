"""A small stand-in for SGLang: what of it is used is written down here, from the sources of 0.5.23.
It says nothing about SGLang itself. And what its tests share."""
import enum
import re
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
    makes = None  # a class of model

    def __init__(self, load_config):
        if load_config.model_loader_extra_config:
            raise ValueError("unexpected extra config")
        self.load_config = load_config

    def load_model(self, *, model_config, device_config):
        with torch.device(device_config.device):
            model = DefaultModelLoader.makes()
        self.load_weights_and_postprocess(
            model, self._get_all_weights(model_config, model), torch.device(device_config.device))
        return model.eval()

    def _get_all_weights(self, model_config, model):
        if self.load_config.load_format is not LoadFormat.AUTO:
            raise ValueError("unknown load format")
        return iter([("w", torch.full((4, 2), 7.0))])  # "files"

    @classmethod
    def _filter_mtp_weights(cls, weights, prefix, index):
        for name, weight in weights:
            layer = re.match(r"model\.mtp\.layers\.(\d+)\.", name)
            if layer is None or int(layer[1]) == index:
                yield prefix + re.sub(r"^model\.mtp\.layers\.\d+", "model.mtp.layers.0",
                                      name), weight

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
    return install(monkeypatch)


def install(monkeypatch):
    """Puts the stand-in in SGLang's place."""
    choices = ["auto"]
    server = types.SimpleNamespace(model_path="m", model_loader_extra_config=None, arguments={})
    parallel = types.SimpleNamespace(pp_size=1, dp_rank=None, attn_dp_size=1)
    experts = types.SimpleNamespace(is_ep_joiner=False, enable_elastic_expert_backup=False,
                                    elastic_ep_backend=None)
    speculation = types.SimpleNamespace(speculative_algorithm=None, enable_multi_layer_eagle=False)
    world = types.SimpleNamespace(group=group(), tensor_parallel=group())
    parts = {
        "arg_groups.choices": {"LOAD_FORMAT_CHOICES": choices,
                               "add_load_format_choices": choices.extend},
        "plugins.hook_registry": {"HookRegistry": Registry,
                                  "HookType": types.SimpleNamespace(AROUND="around")},
        "configs.load_config": {"LoadConfig": LoadConfig, "LoadFormat": LoadFormat},
        "model_loader.loader": {"DefaultModelLoader": DefaultModelLoader,
                                "BaseModelLoader": type("Base", (), {"__init__": base_init})},
        "distributed.parallel_state": {"get_world_group": lambda: world.group,
                                       "get_tp_group": lambda: world.tensor_parallel},
        "runtime_context": {"get_model": lambda: server, "get_parallel": lambda: parallel,
                            "get_exec": lambda: types.SimpleNamespace(moe=experts),
                            "get_spec": lambda: speculation,
                            "get_context": lambda: types.SimpleNamespace(
                                resolved_server_args_dict=lambda: server.arguments)}}
    for name, contents in parts.items():
        module = types.ModuleType(f"sglang.srt.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for ours in ("loader", "updating", "hooks", "filling", "ranks", "resident"):
        monkeypatch.delitem(sys.modules, f"rekindle.sglang.{ours}", raising=False)
        monkeypatch.delattr(f"rekindle.sglang.{ours}", raising=False)
    monkeypatch.setattr("rekindle.sglang.versions.installed", lambda package: "0.5.23")
    monkeypatch.setattr("rekindle._engines.loading._held", {})
    DefaultModelLoader.steps, DefaultModelLoader.makes, Registry.registered = [], Model, []
    return types.SimpleNamespace(choices=choices, server=server, parallel=parallel,
                                 experts=experts, speculation=speculation, world=world)


def group(*others, gather=None):
    """This rank, the first, and what others say to what it says."""
    return types.SimpleNamespace(
        rank_in_group=0, world_size=1 + len(others),
        all_gather_object=gather or (lambda value: [value, *(say(value) for say in others)]))


def silent():
    """Another rank is there, and does not take part."""
    def gather(value):
        raise AssertionError("another rank is asked")
    return group(None, gather=gather)


def base_init(self, load_config):
    self.load_config = load_config


@pytest.fixture(scope="module")
def published(rekindle):
    every = {"w": torch.arange(8.0).view(4, 2), "unused": torch.ones(3)}
    rk.publish(every, "sg@1", agent=rekindle.store("a"))
    return every


def load(rekindle, path="m", draft=False, layer=None, **options):
    """As SGLang does: the configuration is checked, the loader made and run. `layer`: of a draft,
    which one."""
    from rekindle.sglang.hooks import verify_load_format
    config = LoadConfig("rekindle", {"model": "sg", "agent": str(rekindle.store("a")), **options},
                        layer)
    verify_load_format(LoadConfig._verify_load_format, config)
    loader = config.load_format(config)
    return loader, loader.load_model(
        model_config=types.SimpleNamespace(model_path=path, is_draft_model=draft),
        device_config=types.SimpleNamespace(device="cpu"))


def from_disk(model, **config):
    """As `update_weights_from_disk`: a loader without options, asked for weights, then to load, and
    not told which layer of a draft it is."""
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

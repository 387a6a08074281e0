"""A small stand-in for verl: what of it is used is written down here, from the sources of 0.9.1. It
says nothing about verl itself."""
import sys
import types

import torch


class CheckpointEngineRegistry:
    made = {}

    @classmethod
    def register(cls, backend):
        return lambda kind: cls.made.setdefault(backend, kind)

    @classmethod
    def get(cls, backend):
        return cls.made[backend]


class CheckpointEngineWithCache:
    pass


class EngineRegistry:
    made = {}

    @classmethod
    def register(cls, model_type, backend, device, vendor=None):
        def add(kind):
            cls.made.update({(model_type, one, at, vendor): kind
                             for one in backend for at in device})
            return kind
        return add


class FSDPEngineWithLMHead:
    """Of verl's FSDP engine, its generator that gathers, and what that asks for."""

    _qat_enabled = False

    def __init__(self, module, model_type):
        self.module = module
        self.model_config = types.SimpleNamespace(
            hf_config=types.SimpleNamespace(model_type=model_type))
        self.gathered = 0

    def get_per_tensor_param(self, **options):
        state = convert_weight_keys(self.module.state_dict(), self.module)

        def gather():
            for name, tensor in state.items():
                self.gathered += 1
                yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return unfuse_moe_params(gather()), None


def unfuse_moe_params(weights):
    for name, tensor in weights:
        base, _, last = name.rpartition(".")
        if not base.endswith(".mlp.experts"):
            yield name, tensor
            continue
        for index, expert in enumerate(tensor):
            if last == "gate_up_proj":
                gate, up = expert.chunk(2)
                yield f"{base}.{index}.gate_proj.weight", gate
                yield f"{base}.{index}.up_proj.weight", up
            else:
                yield f"{base}.{index}.down_proj.weight", expert


def convert_weight_keys(state, model):
    """For one prefix only."""
    old, new = getattr(model, "renamed", ("", ""))
    return {new + name.removeprefix(old) if old and name.startswith(old) else name: tensor
            for name, tensor in state.items()}


def install():
    """Puts the stand-in in verl's place in this process."""
    contents = {
        "verl": {}, "verl.checkpoint_engine": {}, "verl.utils": {}, "verl.workers": {},
        "verl.checkpoint_engine.base": {
            "CheckpointEngineRegistry": CheckpointEngineRegistry,
            "CheckpointEngineWithCache": CheckpointEngineWithCache},
        "verl.utils.model": {"convert_weight_keys": convert_weight_keys},
        "verl.workers.engine": {"EngineRegistry": EngineRegistry,
                                "FSDPEngineWithLMHead": FSDPEngineWithLMHead}}
    for name, members in contents.items():
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
        for key, value in members.items():
            setattr(module, key, value)


class Experts(torch.nn.Module):
    """As transformers packs them."""

    def __init__(self, count, hidden, intermediate):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(count, 2 * intermediate, hidden))
        self.down_proj = torch.nn.Parameter(torch.randn(count, hidden, intermediate))

    def forward(self, x):
        gate, up = torch.einsum("bh,eih->bei", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("bei,ehi->bh", gate.relu() * up, self.down_proj)


class Model(torch.nn.Module):
    """Sizes that no number of ranks divides."""

    renamed = ("body.", "model.")

    def __init__(self):
        super().__init__()
        self.body = torch.nn.ModuleDict({
            "embed": torch.nn.Embedding(11, 6), "norm": torch.nn.LayerNorm(6),
            "mlp": torch.nn.ModuleDict({"experts": Experts(5, 6, 3)})})
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.register_buffer("steps", torch.arange(3))

    def forward(self, tokens):
        x = self.body["norm"](self.body["embed"](tokens))
        return self.head(x + self.body["mlp"]["experts"](x))

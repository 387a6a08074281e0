"""The shards of one of verl's trainer ranks, without communication, and how they reach the
checkpoint engine. Does not import verl."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from rekindle._parts import Part
from rekindle.torch import Split, Unstack, parts_of
from rekindle.torch.names import Rule


class ShardedWeights(Iterator["tuple[str, torch.Tensor]"]):
    """What the `get_per_tensor_param()` of a training engine returns, if the ranks can publish
    their shards.

    As an iterator, it is verl's own generator: every tensor is gathered when it comes. Rekindle
    calls `parts()` instead, and then nothing is gathered. `parts`: returns what this rank
    publishes, for example by `rekindle.torch.parts_of`. `gathered`: returns verl's iterator. Both
    are called on every rank or on none."""

    def __init__(self, parts: Callable[[], list[Part]],
                 gathered: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self.parts = parts
        self._gathered = gathered
        self._iterator: Iterator[tuple[str, torch.Tensor]] | None = None

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._iterator is None:
            self._iterator = iter(self._gathered())
        return next(self._iterator)


def fsdp_parts(module: torch.nn.Module, checkpoint_names: Mapping[str, str] | None = None,
               packed_experts: bool = False) -> list[Part]:
    """Returns the parts of a module in FSDP2 or FSDP1, under the names that verl gives them.

    `checkpoint_names`: from the module's names; without one, names stay, and a name that is missing
    in it is not published. `packed_experts`: the checkpoint has experts as transformers packs them
    (gpt_oss); otherwise each expert becomes a tensor, as by verl's `unfuse_moe_params`."""
    parts = parts_of(module)
    names = {part.name: part.name for part in parts} if checkpoint_names is None else dict(
        checkpoint_names)
    rules: list[Rule] = [names.get]
    if not packed_experts:
        rules += _expert_rules({names[part.name]: part.shape for part in parts
                                if part.name in names})
    return parts_of(parts, names=rules)


def _expert_rules(shapes: Mapping[str, tuple[int, ...]]) -> list[Rule]:
    """Returns rules from [experts, gate and up, hidden] and [experts, hidden, intermediate] to the
    tensors of each expert."""
    down: list[str] = []
    gate_up: dict[int, list[str]] = {}
    for name, shape in shapes.items():
        base, _, last = name.rpartition(".")
        if not base.endswith(".mlp.experts") or len(shape) != 3:
            continue
        if last == "down_proj":
            down.append(base)
        elif last == "gate_up_proj":
            gate_up.setdefault(shape[1], []).append(base)
    rules: list[Rule] = []
    if down:
        rules.append(Unstack(_any(down) + r"\.down_proj", r"\1.{index}.down_proj.weight", True))
    for rows, bases in gate_up.items():
        gate = (rows + 1) // 2  # as torch.chunk
        rules.append(Unstack(_any(bases) + r"\.gate_up_proj", r"\1.{index}.gate_up_proj", True))
        rules.append(Split(_any(bases) + r"\.(\d+)\.gate_up_proj", {
            r"\1.\2.gate_proj.weight": gate, r"\1.\2.up_proj.weight": rows - gate}, optional=True))
    return rules


def _any(names: Iterable[str]) -> str:
    return "(" + "|".join(map(re.escape, names)) + ")"


def share_of(rank: int, world: int, weights: Iterable[tuple[str, torch.Tensor]]) -> list[Part]:
    """Returns this rank's share of tensors that come whole on every rank: each tensor is that of
    the rank with the fewest bytes so far. Copies the share to host memory."""
    taken = [0] * world
    found = []
    for name, tensor in weights:
        owner = taken.index(min(taken))
        taken[owner] += tensor.nbytes
        if owner == rank:
            found += parts_of({name: tensor.detach().to("cpu", copy=True)})
    return found


def is_distributed(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "placements") and hasattr(tensor, "full_tensor")

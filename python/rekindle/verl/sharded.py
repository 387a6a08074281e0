"""The shards of one of verl's trainer ranks, without communication. Does not import verl."""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from rekindle._parts import Part
from rekindle.torch import Split, Unstack, parts_of
from rekindle.torch.names import Rule


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

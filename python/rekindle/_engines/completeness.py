"""Whether every parameter has been written. Engines check less: one says that a fused parameter is
loaded when a part of it is, and that a layer without weights keeps what it had."""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidError
from .coverage import Region, covered, in_bytes

if TYPE_CHECKING:
    from ..recording import Plan

# Scales of a KV cache have defaults; a checkpoint may leave them out.
_WITH_DEFAULT = re.compile(r"(^|\.)(q_scale|k_scale|v_scale|prob_scale|input_scale_ub)$")
_NAMED = 3


def has_default(name: str) -> bool:
    """Whether a checkpoint may leave this parameter out."""
    return _WITH_DEFAULT.search(name) is not None


Regions = Mapping[str, Iterable[Region]]  # by parameter


def check_plan(model: torch.nn.Module, plan: "Plan", returned: Any, allowed: Iterable[str],
               version: str = "") -> None:
    """After a plan was executed: what moves and constants have covered, and of what opaque tensors
    went to, what the loader says, or what was seen of that. InvalidError names what is missing."""
    lacking = unwritten(model, plan, returned, allowed)
    if lacking:
        raise _error(lacking, version)


def unwritten(model: torch.nn.Module, plan: "Plan", returned: Any, allowed: Iterable[str]) -> str:
    """Of a plan that was, or is to be, executed: parameters that are not written in full, and how
    much of them is, in words; "" when there are none."""
    said = _said(returned) if plan.opaque else set()
    if said is None:
        # The loader did not say where it put the opaque tensors.
        return ""
    return described(_short(model, written(plan), _seen(returned) or {}, said), allowed)


def written(plan: "Plan") -> dict[str, set[Region]]:
    """What moves and constants of a plan write of each parameter, in elements."""
    found: dict[str, set[Region]] = {}
    for move in plan.moves():
        found.setdefault(move.parameter, set()).add((move.offset, move.size, move.stride))
    for constant in plan.constants:
        found.setdefault(constant.parameter, set()).add(
            (constant.offset, constant.size, constant.stride))
    return found


def check_loaded(model: torch.nn.Module, returned: Any, allowed: Iterable[str],
                 version: str = "") -> None:
    """After a loader was given whole tensors: what it says that it has loaded (names), or what was
    seen of that (`WriteWatch.regions()`), if there is either."""
    said = _said(returned)
    if said is not None:
        lacking = described(_short(model, {}, _seen(returned) or {}, said), allowed)
        if lacking:
            raise _error(lacking, version)


def _seen(returned: Any) -> Regions | None:
    return returned if isinstance(returned, Mapping) else None


def _said(returned: Any) -> set[str] | None:
    if _seen(returned) is not None:
        return set()
    if isinstance(returned, (set, frozenset)) and all(isinstance(name, str) for name in returned):
        return set(returned)
    return None


def _short(model: torch.nn.Module, elements: Regions, seen: Regions,
           said: set[str]) -> dict[str, str]:
    """Parameters that are not written, or not in full: how much is. What is `seen` is in bytes: a
    loader may write to a view of another dtype."""
    short: dict[str, str] = {}
    for names, parameter in _by_memory(model):
        size, width = parameter.numel(), parameter.element_size()
        if not size or any(name in said or has_default(name) for name in names):
            continue
        regions = [region for name in names for region in seen.get(name, ())]
        regions += [in_bytes(region, width) for name in names for region in elements.get(name, ())]
        _, shape, stride = in_bytes((0, tuple(parameter.shape), parameter.stride()), width)
        count = covered(shape, stride, regions) // width
        if count < size:
            short[names[0]] = amount(count, size)
    return short


def amount(count: int, size: int) -> str:
    """Of a parameter's elements."""
    return f"{count} of {size} elements" if count else "nothing"


def _by_memory(model: torch.nn.Module) -> Iterable[tuple[list[str], torch.Tensor]]:
    """Parameters with all of their names."""
    groups: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not torch.nn.parameter.is_lazy(parameter):
            groups.setdefault(id(parameter), ([], parameter))[0].append(name)
    return groups.values()


def described(short: Mapping[str, str], allowed: Iterable[str]) -> str:
    """The first of parameters that are not written in full, and how much of them is; "" when all
    are allowed to be so. `allowed`: regular expressions of names."""
    patterns = [re.compile(pattern) for pattern in allowed]
    left = {name: how for name, how in short.items()
            if not any(pattern.search(name) for pattern in patterns)}
    named = ", ".join(f"{name} ({how} written)" for name, how in list(left.items())[:_NAMED])
    return named + (f" and {len(left) - _NAMED} more" if len(left) > _NAMED else "")


def _error(lacking: str, version: str) -> InvalidError:
    of = f" in {version}" if version else ""
    return InvalidError(f"not every parameter has weights{of}: {lacking}; publish what is "
                        "missing, or name what needs none in allow_unwritten")

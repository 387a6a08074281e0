"""Checks that every parameter has been written. Engines check less: one counts a fused parameter as
loaded when a part of it is, and lets a layer without weights keep its old values."""
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
    """Raises InvalidError naming the parameters that an executed plan has not written in full. The
    plan says what moves and constants wrote. `returned` says it for opaque tensors: the names that
    the loader reports, or the regions that were seen."""
    lacking = unwritten(model, plan, returned, allowed)
    if lacking:
        raise _error(lacking, version)


def unwritten(model: torch.nn.Module, plan: "Plan", returned: Any, allowed: Iterable[str]) -> str:
    """Returns the parameters that a plan does not write in full, with the amount that it writes, as
    text; "" when there are none. The plan may have been executed or not."""
    said = _said(returned) if plan.opaque else set()
    if said is None:
        # The loader did not say where it put the opaque tensors.
        return ""
    return described(_short(model, written(plan), _seen(returned) or {}, said), allowed)


def written(plan: "Plan") -> dict[str, set[Region]]:
    """Returns what the moves and constants of a plan write of each parameter, in elements."""
    found: dict[str, set[Region]] = {}
    for move in plan.moves():
        found.setdefault(move.parameter, set()).add((move.offset, move.size, move.stride))
    for constant in plan.constants:
        found.setdefault(constant.parameter, set()).add(
            (constant.offset, constant.size, constant.stride))
    return found


def check_loaded(model: torch.nn.Module, returned: Any, allowed: Iterable[str],
                 version: str = "") -> None:
    """Raises InvalidError as check_plan, after a loader got whole tensors. `returned`: the names
    that it reports, or `WriteWatch.regions()`. Anything else is not checked."""
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
    """Returns the parameters that are not written in full, with the written amount. `elements` is
    in elements. `seen` is in bytes, as a loader may write to a view of another dtype."""
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
    """Returns the written amount as text: "3 of 8 elements"."""
    return f"{count} of {size} elements" if count else "nothing"


def _by_memory(model: torch.nn.Module) -> Iterable[tuple[list[str], torch.Tensor]]:
    """Returns each parameter with all of its names."""
    groups: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not torch.nn.parameter.is_lazy(parameter):
            groups.setdefault(id(parameter), ([], parameter))[0].append(name)
    return groups.values()


def described(short: Mapping[str, str], allowed: Iterable[str]) -> str:
    """Returns the first parameters that are not written in full, with the written amount, as text;
    "" when all are allowed. `allowed`: regular expressions of names."""
    patterns = [re.compile(pattern) for pattern in allowed]
    left = {name: how for name, how in short.items()
            if not any(pattern.search(name) for pattern in patterns)}
    named = ", ".join(f"{name} ({how} written)" for name, how in list(left.items())[:_NAMED])
    return named + (f" and {len(left) - _NAMED} more" if len(left) > _NAMED else "")


def _error(lacking: str, version: str) -> InvalidError:
    of = f" in {version}" if version else ""
    return InvalidError(f"not every parameter has weights{of}: {lacking}; publish what is "
                        "missing, or name what needs none in allow_unwritten")

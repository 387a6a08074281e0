"""What a loader does besides putting a checkpoint's elements into its targets.

A recording stands for the loader only where there is nothing of that kind: what a loader computes
from its targets would be computed, while it is recorded, from weights that are not there yet, and
not at all when the plan is carried out; stand-ins that it keeps have no values. The Recorder sees
the first; here is what it looks for, what is left in modules, and which stand-ins are still held.
"""
from __future__ import annotations

import functools
import gc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .targets import Targets

# These need nothing of what was there; the recorder writes down what they leave.
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}


class Unrecordable(Exception):
    """The loader does more than a recording can stand for; the text says what."""


class _Access(NamedTuple):
    """An argument of an operation, from whose values something is computed; `changed`: it is
    changed by that.
    """
    position: int
    name: str
    changed: bool


@functools.lru_cache(maxsize=None)
def _accesses(func: Any) -> tuple[_Access, ...]:
    """None for views, and for what overwrites its target."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        changed = alias is not None and alias.is_write
        passes = alias is not None and (not changed or _operation(func) in _OVERWRITES)
        if "Tensor" in str(argument.type) and not passes:
            found.append(_Access(position, argument.name, changed))
    return tuple(found)


def _operation(func: Any) -> str:
    """aten.mul_.Tensor → "mul_"."""
    return str(func._schema.name).rpartition("::")[2]


class Uses:
    """What was computed from values of targets."""

    def __init__(self, targets: Targets, stand_in: type) -> None:
        self._targets, self._stand_in = targets, stand_in
        self.reads: dict[str, str] = {}  # which targets, and how
        # The operation that changed a tensor in place.
        self.changed: str | None = None

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An operation that is about to be done; views and constants pass."""
        for position, name, changed in _accesses(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, self._stand_in):
                    self._see(func, tensor, changed)

    def _see(self, func: Any, tensor: torch.Tensor, changed: bool) -> None:
        target = self._targets.sharing(tensor)
        if target is not None:
            said = f"it does {_operation(func)} with {target}"
            self.reads.setdefault(target, said)
            self.changed = self.changed or (said if changed else None)


def require_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Unrecordable for targets that get their shape while they are loaded."""
    for name, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor):
            raise Unrecordable(f"{name} has no memory yet")


def still_held(kind: Any, recorder: Any) -> list[Any]:
    """Stand-ins of a recorder that somebody refers to when its loader has ended."""
    def find() -> list[Any]:
        return [thing for thing in gc.get_objects()
                if type(thing) is kind and getattr(thing, "_recorder", None) is recorder]
    if not find():
        return []
    # Frees tensors that only reference cycles keep alive.
    gc.collect()
    return find()


class Attributes:
    """What the modules of a model hold, as it was before a loader's run."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self._before = self._now()

    def compare(self) -> str | None:
        """A name that was set to something without tensors: a plan does for this process then, and
        not for another one, where nobody would set it. Unrecordable for one that has tensors.
        """
        after, found = self._now(), None
        for name in sorted(self._before.keys() | after.keys()):
            if name in after and name in self._before and _same(self._before[name], after[name]):
                continue
            if name not in after or _has(torch.Tensor, after[name].value):
                raise Unrecordable(f"it sets {name}")
            found = name
        return found

    def put_back(self, stand_in: type) -> None:
        """Those that were set to stand-ins; what was added to a list or dict stays in it."""
        for name, now in self._now().items():
            before = self._before.get(name)
            if _has(stand_in, now.value) and (before is None or before.value is not now.value):
                if before is None:
                    del now.holder[now.key]
                else:
                    now.holder[now.key] = before.value

    def _now(self) -> dict[str, _Attribute]:
        found: dict[str, _Attribute] = {}
        for prefix, module in self._model.named_modules() if self._model is not None else ():
            for holder in (vars(module), module._parameters, module._buffers):
                for key, value in holder.items():
                    size = len(value) if isinstance(value, (dict, list, set)) else None
                    found[f"{prefix}.{key}" if prefix else key] = _Attribute(
                        value, size, holder, key)
        return found


class _Attribute(NamedTuple):
    value: Any
    size: int | None
    holder: Any
    key: str


def _has(kind: type, value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has(kind, item) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_has(kind, item) for item in value)
    return isinstance(value, kind)


def _same(one: _Attribute, other: _Attribute) -> bool:
    if isinstance(one.value, (bool, int, float, str)):
        return type(one.value) is type(other.value) and one.value == other.value
    return one.value is other.value and one.size == other.size

"""Finds what a loader does besides copying a checkpoint's elements to its targets.

A recording can replace only a loader that does nothing else. A loader that computes from its
targets would, during a recording, use weights that are not there yet, and the plan would not repeat
the computation. Stand-ins that a loader keeps have no values. The Recorder reports operations to
`Uses`. The rest of this module finds changes in modules, and stand-ins that are still held.
"""
from __future__ import annotations

import functools
import gc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .targets import Targets

# These do not read what they overwrite. The recorder records what they write.
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}


class Unrecordable(Exception):
    """The loader does more than a recording can express. The text says what."""


class _Access(NamedTuple):
    """An argument whose values an operation reads. `changed`: it also changes them."""
    position: int
    name: str
    changed: bool


@functools.lru_cache(maxsize=None)
def _accesses(func: Any) -> tuple[_Access, ...]:
    """Returns the accesses of an operation. Views and overwritten arguments do not count."""
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
    """Notes what a loader computes from values of targets."""

    def __init__(self, targets: Targets, stand_in: type) -> None:
        self._targets, self._stand_in = targets, stand_in
        # Maps a target to a description of its use.
        self.reads: dict[str, str] = {}
        # The operation that changed a tensor in place.
        self.changed: str | None = None

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Notes an operation before it runs. Views and overwrites do not count."""
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
    """Raises Unrecordable for targets that get their shape while they are loaded."""
    for name, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor):
            raise Unrecordable(f"{name} has no memory yet")


def still_held(kind: Any, recorder: Any) -> list[Any]:
    """Returns stand-ins of a recorder that are still referenced after the end of its loader."""
    def find() -> list[Any]:
        return [thing for thing in gc.get_objects()
                if type(thing) is kind and getattr(thing, "_recorder", None) is recorder]
    if not find():
        return []
    # Frees tensors that only reference cycles keep alive.
    gc.collect()
    return find()


class Attributes:
    """The attributes of a model's modules before a loader's run."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self._before = self._now()

    def compare(self) -> str | None:
        """Returns the name of an attribute that was set to something without tensors. The plan is
        then valid only in this process: another one would lack the attribute. Raises Unrecordable
        for an attribute with tensors, or one that was removed.
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
        """Restores attributes that were set to stand-ins. Items added to a list or dict stay."""
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

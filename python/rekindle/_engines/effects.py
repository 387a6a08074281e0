"""What an engine's loader does to a model besides putting weights into it.

A recording stands for the loader only where there is nothing of that kind: what a loader computes
from parameters (some models derive tensors at the end of `load_weights`) would be computed, while
it is recorded, from weights that are not there yet, and not at all when the recording is replayed.
So every operation that reads the model's memory is seen here, and what is left in its modules.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..recording.tracer import Traced

_CONSTANT = {"fill_", "zero_"}  # the recorder writes these down


class Unrecordable(Exception):
    """The loader does more than a recording can stand for; the text says what."""


class EffectWatch(TorchDispatchMode):
    """Around one run of a loader that is recorded. Raises Unrecordable at its end.

    `reads`: names of parameters and buffers that something was computed from, and how. That is fine
    for those that the loader fills with nothing (maps of experts), so the caller decides.
    `sets`: an attribute of a module that the run has set, to something without tensors: a plan does
    for this process then, and not for another one, where nobody would set it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self.reads: dict[str, str] = {}
        self.sets: str | None = None
        self._first: str | None = None
        self._names: dict[int, str] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            key = _storage(tensor)
            if key is None:
                raise Unrecordable(f"{name} has no memory yet")
            self._names.setdefault(key, name)
        self._before = _attributes(model)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._first is None:
            used = list(_arguments(func, args, kwargs))
            if not any(isinstance(tensor, Traced) for tensor, _ in used):  # else the recorder sees
                for tensor, alias in used:
                    self._see(func, tensor, alias)
        return func(*args, **kwargs)

    def _see(self, func: Any, tensor: torch.Tensor, alias: Any) -> None:
        name = self._names.get(_storage(tensor) or 0)
        if name is None or (alias is not None and not alias.is_write):  # not ours, or only a view
            return
        operation = func._schema.name.removeprefix("aten::")
        if alias is None:
            self.reads.setdefault(name, f"it does {operation} with {name}")
        elif operation not in _CONSTANT:
            self._first = f"it does {operation} with {name}"

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        if kind is not None:
            return
        if self._first:
            raise Unrecordable(self._first)
        after = _attributes(self._model)
        for name in sorted(self._before.keys() | after.keys()):
            if name not in after or name not in self._before or not _same(
                    self._before[name], after[name]):
                if name not in after or _has_tensor(after[name][0]):
                    raise Unrecordable(f"it sets {name}")
                self.sets = name


def _storage(tensor: torch.Tensor) -> int | None:
    """Same for all views of one memory, also on the meta device; valid while one of them lives."""
    try:
        return tensor.untyped_storage()._cdata
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None  # uninitialized, or a wrapper of several tensors


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield item, argument.alias_info


def _attributes(model: torch.nn.Module) -> dict[str, tuple[Any, int | None]]:
    """What the modules hold, by name, and the size of what has one."""
    found: dict[str, tuple[Any, int | None]] = {}
    for prefix, module in model.named_modules():
        for group in (vars(module), module._parameters, module._buffers):
            for name, value in group.items():
                size = len(value) if isinstance(value, (dict, list, set)) else None
                found[f"{prefix}.{name}" if prefix else name] = value, size
    return found


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_tensor(item) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_has_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def _same(one: tuple[Any, int | None], other: tuple[Any, int | None]) -> bool:
    if isinstance(one[0], (bool, int, float, str)):
        return type(one[0]) is type(other[0]) and one[0] == other[0]
    return one[0] is other[0] and one[1] == other[1]

"""Watches what a loader of whole tensors writes of a model. Some loaders do not report it."""
from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..recording.targets import span
from ..recording.tracer import Traced
from .coverage import Region, in_bytes
from .fitting import check_conversion

_COPY = torch.ops.aten.copy_.default


class _Written(NamedTuple):
    """A written region of a storage in bytes, with its first byte and one past its last."""

    begin: int
    end: int
    region: Region


class WriteWatch:
    """Watches one run of a loader, in this thread and in the work that it submits to thread pools
    (DeepSeek copies there). One WriteWatch at a time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._before = _storages(model)
        self._written: dict[int, set[_Written]] = {
            key: set() for key in self._before.values() if key is not None}
        self._mode = _Mode(self)

    def __enter__(self) -> "WriteWatch":
        self._submit = submit = ThreadPoolExecutor.submit

        def watched(pool: ThreadPoolExecutor, work: Any, /, *args: Any, **named: Any) -> Any:
            return submit(pool, self._run, work, args, named)

        ThreadPoolExecutor.submit = watched  # type: ignore[method-assign,assignment]
        self._mode.__enter__()
        return self

    def __exit__(self, *why: Any) -> None:
        self._mode.__exit__(*why)
        ThreadPoolExecutor.submit = self._submit  # type: ignore[method-assign]

    def _run(self, work: Any, args: Any, named: Any) -> Any:
        with _Mode(self):
            return work(*args, **named)

    def regions(self) -> dict[str, set[Region]]:
        """Returns the written regions of each parameter in bytes; if its memory was replaced, all
        of it."""
        found: dict[str, set[Region]] = {}
        storages = {key: _Index(written) for key, written in self._written.items()}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            key = _storage(parameter)
            if key != self._before.get(name):
                found[name] = {_bytes(parameter, 0)}
            elif key is not None:
                found[name] = set(_of_parameter(parameter, storages[key]))
        return found

    def check(self, target: Any, source: Any) -> None:
        """Checks a copy before it is made. InvalidError: a copy into a parameter would lose a
        scale."""
        if isinstance(source, torch.Tensor) and not isinstance(target, Traced) and not isinstance(
                source, Traced) and _storage(target) in self._written:
            check_conversion(source, target)

    def note(self, tensor: torch.Tensor) -> None:
        """Notes that an operation has written to a tensor."""
        written = self._written.get(_storage(tensor) or 0)
        if written is not None and tensor.numel():
            with self._lock:
                written.add(_place(tensor))


class _Index:
    """The written regions of one storage, by their place."""

    def __init__(self, written: Iterable[_Written]) -> None:
        self._sorted = sorted(written)
        self._begins = [one.begin for one in self._sorted]
        self._reach = list(accumulate((one.end for one in self._sorted), max))

    def between(self, begin: int, end: int) -> Iterator[_Written]:
        """Yields at least the regions with bytes between `begin` and `end`."""
        at = bisect_left(self._begins, end) - 1
        while at >= 0 and self._reach[at] > begin:
            yield self._sorted[at]
            at -= 1


def _bytes(tensor: torch.Tensor, offset: int) -> Region:
    return in_bytes((offset, tuple(tensor.shape), tuple(tensor.stride())), tensor.element_size())


def _place(tensor: torch.Tensor) -> _Written:
    begin, size, stride = region = _bytes(tensor, int(tensor.storage_offset()))
    return _Written(begin, span(begin, size, stride)[1], region)


def _of_parameter(parameter: torch.Tensor, storage: _Index) -> Iterator[Region]:
    """Yields the written regions, with offsets from the parameter's first byte."""
    if parameter.numel():
        begin, end, _ = _place(parameter)
        for _, _, (offset, size, stride) in storage.between(begin, end):
            yield offset - begin, size, stride


class _Mode(TorchDispatchMode):
    """Notes which tensors operations write."""

    def __init__(self, watch: WriteWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COPY:
            self._watch.check(args[0], args[1])
        done = func(*args, **(kwargs or {}))
        if torch.Tag.inplace_view in func.tags:
            # This operation changes the tensor object, not its memory.
            return done
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else (kwargs or {}).get(
                    argument.name)
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    # A recorder's stand-in has no memory. A request for it ends the recording.
                    if isinstance(item, torch.Tensor) and not isinstance(item, Traced):
                        self._watch.note(item)
        return done


class ConversionWatch(TorchDispatchMode):
    """Watches a loader of whole tensors in this thread. InvalidError: it copies between quantized
    and plain dtypes into a parameter."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._targets = {key for key in _storages(model).values() if key is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COPY and isinstance(args[1], torch.Tensor) and args[0].dtype != args[1].dtype:
            if _storage(args[0]) in self._targets:
                check_conversion(args[1], args[0])
        return func(*args, **(kwargs or {}))


def _storages(model: torch.nn.Module) -> dict[str, int | None]:
    return {name: _storage(parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)}


def _storage(tensor: torch.Tensor) -> int | None:
    """Returns the identity of a tensor's storage, equal for all views of it; None: it has none."""
    try:
        key: int = tensor.untyped_storage()._cdata
        return key
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        # The tensor is uninitialized, or wraps several tensors.
        return None

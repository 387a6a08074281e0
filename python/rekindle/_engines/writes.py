"""What a loader that is given whole tensors writes of a model, where it does not say that."""
from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..recording.tracer import Traced


class WriteWatch:
    """Around one run of a loader: in this thread, and in what it submits to pools of threads
    (DeepSeek's copies in those). One at a time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._regions: dict[int, set[Any]] = {}
        self._before = _storages(model)
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

    def elements(self) -> dict[str, int]:
        """How many elements of each parameter were written; all, of one that has other memory than
        before."""
        found: dict[str, int] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            key = _storage(parameter)
            if key != self._before.get(name):
                found[name] = parameter.numel()
            elif key is not None:
                begin = parameter.storage_offset()
                runs = {run for run in self._regions.get(key, ())
                        if begin <= run[0] < begin + parameter.numel()}
                found[name] = sum(prod(size) for _, size, _ in runs)
        return found

    def note(self, tensor: torch.Tensor) -> None:
        """It has been written to."""
        key = _storage(tensor)
        if key is not None:
            region = tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())
            with self._lock:
                self._regions.setdefault(key, set()).add(region)


class _Mode(TorchDispatchMode):
    """Notes what operations write to."""

    def __init__(self, watch: WriteWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = func(*args, **(kwargs or {}))
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else (kwargs or {}).get(
                    argument.name)
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    # A recorder's stand-in has no memory, and gives up when it is asked for it.
                    if isinstance(item, torch.Tensor) and not isinstance(item, Traced):
                        self._watch.note(item)
        return done


def _storages(model: torch.nn.Module) -> dict[str, int | None]:
    return {name: _storage(parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)}


def _storage(tensor: torch.Tensor) -> int | None:
    """Same for all views of one memory."""
    try:
        key: int = tensor.untyped_storage()._cdata
        return key
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None  # uninitialized, or a wrapper of several tensors

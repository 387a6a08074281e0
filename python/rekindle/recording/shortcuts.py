"""Calls view methods of a stand-in without torch's dispatch, which takes over half of their time.

The method is called on the stand-in's tensor on `meta`, as dispatch would do in the end. Calls
whose result could differ go through dispatch: arguments other than numbers, results that are no
views, errors, and all calls while other modes are active.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import (_DisableTorchDispatch, _get_dispatch_stack_at, _len_torch_dispatch_stack,
                      _len_torch_function_stack)

# The methods with which loaders cut tensors. Dispatch follows all others.
METHODS = ("__getitem__", "chunk", "expand", "flatten", "narrow", "permute", "reshape", "select",
           "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view")
_PLAIN = {int, type(None), type(...)}
_SEQUENCES = {tuple, list, torch.Size}


def shortcut(name: str, made: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Returns a method for a class of stand-ins. `made(stand_in, result)` returns stand-ins for the
    meta tensors of the result, or None to leave the call to dispatch.
    """
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _plain(args) and (not kwargs or _plain(kwargs.values())) and _alone(self._recorder):
            try:
                with _DisableTorchDispatch():
                    views = made(self, method(self._inner, *args, **kwargs))
            except (RuntimeError, IndexError, TypeError, ValueError):
                views = None  # dispatch raises it again
            if views is not None:
                return views
        return method(self, *args, **kwargs)
    return call


def _plain(values: Iterable[Any]) -> bool:
    """Whether all values are numbers, slices, None, ..., or sequences of these."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is slice:
            value = (value.start, value.stop, value.step)
        elif kind not in _SEQUENCES:
            return False
        if not _plain(value):
            return False
    return True


def _alone(recorder: Any) -> bool:
    """Whether the recorder is recording, and no other mode would see an operation."""
    modes = _len_torch_dispatch_stack()
    return (not recorder.ended and _len_torch_function_stack() == 0
            and (modes == 0 or (modes == 1 and _get_dispatch_stack_at(0) is recorder)))

"""The parameters that a loader writes to, found again from any view of them by their storage."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


def named_targets(module: "nn.Module") -> dict[str, torch.Tensor]:
    """Parameters and buffers by all of their names (a tied one has several), also buffers that are
    not saved.
    """
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    return found


def span(offset: int, size: Iterable[int], stride: Iterable[int]) -> tuple[int, int]:
    """First and one past the last element of a view that is not empty."""
    last = offset
    for n, s in zip(size, stride):
        last += (n - 1) * s
    return offset, last + 1


class Targets:
    """Tensors by name, and by storage."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = dict(tensors)
        self._by_storage: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            if tensor.numel():
                self._by_storage.setdefault(storage_key(tensor), []).append(name)

    def find(self, view: torch.Tensor) -> tuple[str, int] | None:
        """(name, offset in elements from the target's first) of what a view that is not empty lies
        in, if any.
        """
        names = self._by_storage.get(storage_key(view))
        if names is None:
            return None
        first, end = span(view.storage_offset(), view.size(), view.stride())
        for name in names:
            tensor = self.tensors[name]
            begin, limit = span(tensor.storage_offset(), tensor.size(), tensor.stride())
            if begin <= first and end <= limit and tensor.dtype == view.dtype:
                return name, first - begin
        return None

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is that of a target."""
        return storage_key(tensor) in self._by_storage


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, while the storage lives; tensors on meta have one, too.
    """
    return tensor.untyped_storage()._cdata

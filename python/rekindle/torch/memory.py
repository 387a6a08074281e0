"""Memory of parameters: which of them share it, where it is, and memory for those on meta."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from .._device import resolve

if TYPE_CHECKING:
    from torch import nn


def identity(value: torch.Tensor) -> Any:
    """Returns a value that is equal for tied parameters: those of the same elements."""
    if not value.numel():
        return id(value)
    storage = value.untyped_storage()._cdata
    return storage, value.storage_offset(), tuple(value.shape), value.stride()


def torch_device(device: Any) -> torch.device:
    """Returns the torch device for `device` of `rekindle.attach`."""
    found = resolve(device, None)
    return torch.device(found.torch_name if found is not None else "cpu")


def common_device(values: Iterable[torch.Tensor]) -> str | None:
    """Returns the device to attach with: the GPU that has all of the values; None: host memory."""
    devices = {value.device for value in values}
    if len(devices) != 1:
        return None
    device = devices.pop()
    return str(device) if device.type == "cuda" else None


def replace(model: nn.Module, wanted: Callable[[torch.Tensor], bool],
            make: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replaces `wanted` parameters and buffers by `make(value)`, and keeps ties. Returns the new
    tensors by all of their names.
    """
    # Keeps the tensors alive, so that their ids stay unique.
    old: dict[int, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    replaced: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            for name, value in list(held.items()):
                if value is None or not (id(value) in made or wanted(value)):
                    continue
                if id(value) not in made:
                    old[id(value)], made[id(value)] = value, _like(value, make(value))
                replaced[f"{prefix}.{name}" if prefix else name] = made[id(value)]
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, value in list(held.items()):
                if id(value) in made:
                    held[name] = made[id(value)]  # type: ignore[assignment]
    return replaced


def _like(value: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(new, requires_grad=value.requires_grad)
    return new


def materialize(model: nn.Module, device: Any) -> None:
    """Allocates memory, without values, for everything on meta."""
    to = torch_device(device)
    replace(model, lambda value: value.is_meta, lambda value: torch.empty_strided(
        value.size(), value.stride(), dtype=value.dtype, device=to))


def some(names: list[str]) -> str:
    """Returns text for a message: the first name, and the number of others."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")

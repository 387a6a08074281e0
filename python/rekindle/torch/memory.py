"""Memory for parameters: which are the same, where they are, and how those on meta get theirs."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from .._device import resolve

if TYPE_CHECKING:
    from torch import nn


def identity(value: torch.Tensor) -> Any:
    """The same for tied parameters: those of the same elements."""
    if not value.numel():
        return id(value)
    storage = value.untyped_storage()._cdata
    return storage, value.storage_offset(), tuple(value.shape), value.stride()


def torch_device(device: Any) -> torch.device:
    """Where torch has what a session brings to `device` (of `rekindle.attach`)."""
    found = resolve(device, None)
    return torch.device(found.torch_name if found is not None else "cpu")


def common_device(values: Iterable[torch.Tensor]) -> str | None:
    """The device to attach for: the GPU that has all of them, else host memory."""
    devices = {value.device for value in values}
    if len(devices) != 1:
        return None
    device = devices.pop()
    return str(device) if device.type == "cuda" else None


def replace(model: nn.Module, wanted: Callable[[torch.Tensor], bool],
            make: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Puts `make(value)` where parameters and buffers are `wanted`, tied ones tied again. By all
    names.
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
    """Memory, not values, for everything that is on meta."""
    to = torch_device(device)
    replace(model, lambda value: value.is_meta, lambda value: torch.empty_strided(
        value.size(), value.stride(), dtype=value.dtype, device=to))


def some(names: list[str]) -> str:
    """For a message: the first, and how many more."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")

"""Makes a model whose uninitialized tensors take no memory of the device."""
from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Smaller ones get memory: they may be written before they are replaced.
SMALLEST_BYTES = 1 << 16


class OnMeta(TorchFunctionMode):
    """Within it, `torch.empty` on `device` makes large tensors on meta. What the model writes to
    them is lost. `leftover` tells whether any of them is still in use."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._storages: list[torch.UntypedStorage] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and self._is_here(kwargs.get("device")):
            made = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
            if made.nbytes >= SMALLEST_BYTES:
                self._storages.append(made.untyped_storage())
                return made
        if func is torch.Tensor.to and args[0].is_meta and args[1:] == ("meta",):
            # An engine that notes layouts must not share memory with what it notes.
            return torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype,
                                       device="meta")
        return func(*args, **kwargs)

    def _is_here(self, device: Any) -> bool:
        found = torch.get_default_device() if device is None else torch.device(device)
        return found.type == self._device.type and None in (
            found.index, self._device.index) or found == self._device

    def leftover(self) -> int:
        """Returns how many of the tensors are in use, the views of one counted once."""
        return sum(torch._C._storage_Use_Count(storage._cdata) > 1 for storage in self._storages)

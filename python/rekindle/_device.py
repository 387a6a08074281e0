"""The device that gets a session's weights, and the stream that reads them there."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from ._optional import module
from .errors import InvalidError

if TYPE_CHECKING:
    import torch

DeviceLike = Union[None, str, "torch.device"]


class Device(NamedTuple):
    """A device. `name` is for the C ABI. `torch_name` is for torch: "cpu" for a device double.

    `stream`: a cudaStream_t, 0 for the default stream."""

    name: str
    torch_name: str
    stream: int

    def on_stream(self) -> Any:
        """Returns a context in which torch queues its work on the session's stream."""
        if self.torch_name == "cpu":
            return contextlib.nullcontext()
        import torch
        return torch.cuda.stream(self._torch_stream())

    def synchronize(self) -> None:
        if self.torch_name != "cpu":
            self._torch_stream().synchronize()

    def _torch_stream(self) -> Any:
        import torch
        if not self.stream:
            return torch.cuda.default_stream(self.torch_name)
        return torch.cuda.ExternalStream(self.stream, device=self.torch_name)


def resolve(device: DeviceLike, stream: Any = None) -> Device | None:
    """Returns the Device to attach with, None for host memory. InvalidError: `stream` is none."""
    if device is None or str(device) == "cpu":
        return None
    name = str(device)
    if name.startswith("double:"):
        return Device(name, "cpu", _pointer(stream))
    torch = module("torch")
    if torch is None or not torch.cuda.is_available():
        return Device(name, name, _pointer(stream))
    if name == "cuda":
        name = f"cuda:{torch.cuda.current_device()}"
    torch_name = _torch_name(torch, name)
    if stream is None:
        stream = torch.cuda.current_stream(torch_name)
    return Device(name, torch_name, _pointer(stream))


def _pointer(stream: Any) -> int:
    if stream is None:
        return 0
    pointer = getattr(stream, "cuda_stream", stream)
    if not isinstance(pointer, int):
        raise InvalidError(f"{stream!r} is no stream: give a torch.cuda.Stream or an integer")
    return pointer


def _torch_name(torch: Any, name: str) -> str:
    if name.startswith("cuda:"):
        return name
    for index in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        if name.removeprefix("GPU-") == uuid.removeprefix("GPU-"):
            return f"cuda:{index}"
    # Either the C library refuses the name, or torch does when it makes a view.
    return name

"""The tensors that load_into writes."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import _numpy, dtypes
from ._device import Device
from ._optional import module
from .boxes import Box, TensorInfo
from .errors import InvalidError

_STATE = ("state_dict", "_save_to_state_dict", "get_extra_state")  # methods of a module


def items_of(target: Any) -> dict[Any, Any]:
    """Returns the tensors, or sequences of tensors, that an nn.Module or a mapping names."""
    if hasattr(target, "state_dict") and not isinstance(target, Mapping):
        found: dict[str, Any] = {}
        if not _add_state(target, "", found, {}):
            found = target.state_dict(keep_vars=True)
        return {name: value for name, value in found.items()
                if _is_torch(value)}  # without values of get_extra_state()
    if not isinstance(target, Mapping):
        raise InvalidError(f"load into a {type(target).__name__}? Give a module, or a mapping of "
                           "names to tensors")
    return target if type(target) is dict else dict(target.items())


def _add_state(module: Any, prefix: str, found: dict[str, Any], known: dict[type, bool]) -> bool:
    """Adds what state_dict() would give. For thousands of modules, that call takes as long as the
    rest of a load. False: for some module, it gives more than parameters and buffers."""
    kind = type(module)
    if kind not in known:
        known[kind] = _has_plain_state(kind)
    held = module.__dict__
    if (not known[kind] or held.get("_state_dict_hooks") or held.get("_state_dict_pre_hooks")
            or any(name in held for name in _STATE)):
        return False
    transient = held["_non_persistent_buffers_set"]
    for values in (held["_parameters"], held["_buffers"]):
        for name, value in values.items():
            if value is not None and name not in transient:
                found[prefix + name] = value
    return all(_add_state(child, f"{prefix}{name}.", found, known)
               for name, child in held["_modules"].items() if child is not None)


def _has_plain_state(kind: type) -> bool:
    torch = module("torch")
    if torch is None or not issubclass(kind, torch.nn.Module):
        return False
    plain = torch.nn.Module
    return not issubclass(kind, torch.jit.ScriptModule) and all(
        getattr(kind, name) is getattr(plain, name) for name in _STATE)


def tensors_of(value: Any) -> list[Any]:
    """Returns the tensors of one value of items_of()."""
    several = isinstance(value, Sequence) and not hasattr(value, "shape")
    return list(value) if several else [value]


def check_key(key: Any) -> None:
    if not isinstance(key, (str, Box)):
        raise InvalidError(f"{key!r} is no name of a tensor and no Box")


def key_text(key: str | Box) -> str:
    if isinstance(key, str):
        return f"'{key}'"
    return f"'{key.tensor}'" + (f" at {list(key.offset)}" if key.offset else "")


def _is_torch(value: Any) -> bool:
    torch = module("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def has_no_memory(tensor: Any) -> bool:
    """Whether a torch tensor only wraps others, as a DTensor or a quantized tensor does. Such a
    tensor claims to be contiguous and to begin at address 0."""
    torch = module("torch")
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) and bool(
        tensor.numel()) and not tensor.data_ptr()


class Destination:
    """One tensor to write. `identity` is equal for two tensors with the same memory."""

    __slots__ = ("name", "tensor", "address", "identity", "_torch")

    def __init__(self, name: str, tensor: Any) -> None:
        self.name, self.tensor = name, tensor
        self._torch = _is_torch(tensor)
        if self._torch:
            if tensor.is_meta:
                raise InvalidError(f"{name} is on the meta device: give it memory first, by "
                                   "to_empty() for example")
            if has_no_memory(tensor):
                raise InvalidError(f"{name} is a {type(tensor).__name__}, which has no memory of "
                                   "its own: give what it wraps, to_local() for example")
            data = tensor.data_ptr() if tensor.numel() else 0
            layout = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        elif hasattr(tensor, "__array_interface__"):
            if not tensor.flags.writeable:
                raise InvalidError(f"{name} is an array that may not be written to")
            data = tensor.__array_interface__["data"][0] if tensor.size else 0
            layout = (tensor.shape, tensor.strides, tensor.dtype, "cpu")
        else:
            raise InvalidError(f"{name} is a {type(tensor).__name__}, not a tensor")
        self.address: int = data
        self.identity: Any = (data, *layout) if data else None

    def check(self, info: TensorInfo) -> None:
        if tuple(self.tensor.shape) != info.shape:
            raise InvalidError(f"{self.name} has shape {list(info.shape)}, its target "
                               f"{list(self.tensor.shape)}")
        if not self._torch:
            _numpy.check(self.name, self.tensor, info.dtype)
        elif not dtypes.converts(self.tensor.dtype):
            raise InvalidError(f"{self.name} is {info.dtype}, its target {self.tensor.dtype}, to "
                               "which torch does not convert")

    def takes_bytes(self, dtype: str, device: Any) -> bool:
        """Whether the tensor takes bytes of this dtype unchanged. InvalidError: elements of less
        than a byte, which torch's shapes count in pairs."""
        dtypes.itemsize(dtype)
        tensor = self.tensor
        return bool(self._torch and tensor.is_contiguous() and tensor.device == device
                    and tensor.dtype is dtypes.torch_dtype(dtype) and not tensor.is_neg())

    def copy(self, source: Any) -> None:
        """Copies `source`: a torch tensor, or a numpy array where torch is missing. Converts where
        dtypes differ."""
        if self._torch:
            self.tensor.copy_(source)
        else:
            _numpy.copy(self.tensor, source)


@contextlib.contextmanager
def copying(device: Device | None) -> Iterator[None]:
    """A context for Destination.copy(): runs copies on the session's stream, and waits for them."""
    torch = module("torch")
    if torch is None:
        yield
        return
    with torch.no_grad():
        if device is None:
            yield
            return
        with device.on_stream():
            yield
        device.synchronize()

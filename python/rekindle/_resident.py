"""Blocks of device memory that outlive this process: the resident copies of rekindle.h.

A block is freed with the last of its holders: tensors here, the agent's keeper, other workers."""
from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _abi
from ._device import Device
from ._native import Native, milliseconds, raise_error, text
from ._optional import module
from ._views import device_tensor
from .boxes import Box

_SEAL_TIMEOUT_S = 120.0


class Block:
    """A block, as bytes in torch. Views of `bytes` keep it mapped."""

    def __init__(self, handle: ctypes.c_void_p, device: Device) -> None:
        abi = _abi.load()
        self.handle = handle
        # At exit, the kernel unmaps it.
        weakref.finalize(self, _free, abi, handle, device.torch_name).atexit = False
        data, size, error = ctypes.c_void_p(), ctypes.c_uint64(), _abi.Error()
        abi.rk_block_memory(handle, ctypes.byref(data), ctypes.byref(size), ctypes.byref(error))
        self.size = size.value
        self.address = data.value or 0
        self._device = device

    def set_read_only(self, read_only: bool) -> None:
        """Whether a write of this process is an error, which ends it on a double. No queued work may
        write to the block. UnavailableError."""
        abi, error = _abi.load(), _abi.Error()
        code = abi.rk_block_set_read_only(self.handle, read_only, ctypes.byref(error))
        if code != _abi.OK:
            raise_error(code, error)

    @property
    def bytes(self) -> Any:
        return device_tensor(self.address, self.size, self._device.torch_name, self)


def _free(abi: ctypes.CDLL, handle: ctypes.c_void_p, device: str) -> None:
    if device != "cpu":
        # Work that reads the block may still be queued.
        torch = module("torch")
        if torch is not None:
            torch.cuda.synchronize(device)
    abi.rk_block_free(handle)


def allocate(native: Native, device: Device, size: int) -> Block:
    """Returns a block of at least `size` bytes. ExhaustedError, UnavailableError."""
    handle = ctypes.c_void_p()
    native.call("rk_block_allocate", size, ctypes.byref(handle))
    return Block(handle, device)


def open_copy(native: Native, device: Device) -> tuple[bytes, list[Block]]:
    """Returns the description and the blocks of a session that was attached with a resident key."""
    address, size, count = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t()
    native.call("rk_resident", ctypes.byref(address), ctypes.byref(size), ctypes.byref(count))
    description = ctypes.string_at(address.value or 0, size.value) if size.value else b""
    handles = (ctypes.c_void_p * count.value)()
    native.call("rk_resident_open", handles, count.value)
    return description, [Block(ctypes.c_void_p(handle), device) for handle in handles]


class Part(NamedTuple):
    """Bytes of a tensor in a block. A tensor may have several."""

    name: str
    block: int
    at: int
    size: int
    # The worker writes to them while it serves.
    changes: bool = False
    # The bytes are exactly those of this box of the version, row by row. None: they are others.
    source: Box | None = None


def seal(native: Native, key: str, description: bytes, blocks: Sequence[Block],
         parts: Sequence[Part]) -> None:
    handles = (ctypes.c_void_p * len(blocks))(*(block.handle for block in blocks))
    # The structures point into these.
    held: list[Any] = []
    tensors = (_abi.ResidentTensor * len(parts))(*(_tensor(part, held) for part in parts))
    native.call("rk_resident_seal", text(key), description, len(description), handles, len(blocks),
                tensors, len(parts), milliseconds(_SEAL_TIMEOUT_S))


def _tensor(part: Part, held: list[Any]) -> _abi.ResidentTensor:
    tensor = _abi.ResidentTensor(name=text(part.name), block=part.block, changes=part.changes,
                                 offset=part.at, bytes=part.size)
    if part.source is not None:
        name = ctypes.c_char_p(text(part.source.tensor))
        lists = [(ctypes.c_uint64 * len(values))(*values)
                 for values in (part.source.offset, part.source.extent)]
        held += [name, *lists]
        tensor.source = _abi.Box(
            tensor=ctypes.cast(name, ctypes.c_void_p), dimensions=len(part.source.extent),
            offset=ctypes.cast(lists[0], ctypes.c_void_p),
            extent=ctypes.cast(lists[1], ctypes.c_void_p))
    return tensor

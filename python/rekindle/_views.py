"""Tensors over memory that librekindle owns: the host map, or buckets on a device.

A view of the host map has its own storage of exactly its bytes, and keeps the session's mapping. A
view of a bucket shares the bucket's storage with other views, and is valid as long as the bucket.
"""
from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import _abi, dtypes
from ._device import Device
from ._listing import InfoReader as InfoReader
from ._optional import module
from .boxes import TensorInfo, row_major
from .errors import UnavailableError

if TYPE_CHECKING:
    import torch

# Rounds the size of a bucket up, so that it can be viewed as any dtype. The padding is never read.
_ROUND = 15


def memory(address: int, nbytes: int, keep: object = None) -> "ctypes.Array[ctypes.c_char]":
    """Returns host memory of this process as a buffer. Views of the buffer keep `keep` alive."""
    view = (ctypes.c_char * nbytes).from_address(address)
    view._keep = keep  # type: ignore[attr-defined]  # an attribute of our own
    return view


class _CudaMemory:
    """Device memory as an array that torch, cupy and numba take without a copy."""

    def __init__(self, address: int, nbytes: int, keep: object) -> None:
        self.keep = keep
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None,
            "version": 2}


def device_tensor(address: int, nbytes: int, device: "torch.device | str",
                  keep: object = None) -> "torch.Tensor":
    """Returns a `torch.uint8` tensor of shape (nbytes,) over device memory; host memory on a
    double.

    `nbytes` > 0. The tensor keeps `keep` alive. The caller keeps the memory mapped."""
    import torch
    if str(device).startswith(("double:", "cpu")):
        return torch.frombuffer(memory(address, nbytes, keep), dtype=torch.uint8)
    return torch.as_tensor(_CudaMemory(address, nbytes, keep), device=torch.device(device))


class HostViews:
    """Makes tensors of the host map: torch tensors, or without torch read-only numpy arrays."""

    def __init__(self, keep: object) -> None:
        self._keep = keep
        self._torch = module("torch")
        if self._torch is None and module("numpy") is None:
            raise UnavailableError("neither torch nor numpy is installed: tensors need one of them")

    def of(self, entries: list[tuple[TensorInfo, int]]) -> Iterator[tuple[TensorInfo, Any]]:
        """Yields a view of each (info, address). One buffer object spans them all."""
        places = [(data, data + info.nbytes) for info, data in entries if info.nbytes]
        low = min((begin for begin, _ in places), default=0)
        high = max((end for _, end in places), default=0)
        span = memory(low, high - low, self._keep)
        return self._torch_views(entries, span, low) if self._torch else self._numpy_views(
            entries, span, low)

    def _torch_views(self, entries: list[tuple[TensorInfo, int]], span: Any,
                     low: int) -> Iterator[tuple[TensorInfo, Any]]:
        from_buffer, torch_dtype = self._torch.frombuffer, dtypes.torch_dtype
        for info, data in entries:
            dtype = torch_dtype(info.dtype)
            if not info.nbytes:
                yield info, self._torch.empty(info.shape, dtype=dtype)
                continue
            count = info.nbytes // dtypes.itemsize(info.dtype)
            flat = from_buffer(span, dtype=dtype, count=count, offset=data - low)
            yield info, flat if len(info.shape) == 1 else flat.view(info.shape)

    def _numpy_views(self, entries: list[tuple[TensorInfo, int]], span: Any,
                     low: int) -> Iterator[tuple[TensorInfo, Any]]:
        import numpy
        array, numpy_dtype = numpy.ndarray, dtypes.numpy_dtype
        read_only = memoryview(span).toreadonly()
        for info, data in entries:
            at = data - low if info.nbytes else 0
            yield info, array(info.shape, numpy_dtype(info.dtype), read_only, at)


class BucketViews:
    """Makes torch tensors of buckets. Tensors in several parts are joined on the device.

    One thread at a time, in the order of the buckets."""

    def __init__(self, device: Device, first: int, infos: list[TensorInfo], keep: object) -> None:
        self._torch = module("torch")
        if self._torch is None:
            raise UnavailableError("torch is not installed: tensors on a device need it")
        self._device, self._keep = device, keep
        self._first, self._infos = first, infos
        self._strides: dict[tuple[int, ...], tuple[int, ...]] = {}
        # Maps an index to the bytes on the device and the number of bytes still missing.
        self._assembling: dict[int, tuple[Any, int]] = {}

    def of(self, pointer: int, count: int) -> Iterator[tuple[TensorInfo, Any]]:
        """Yields the tensors that are complete with this bucket of `count` rk_parts."""
        raw = ctypes.string_at(pointer, count * _abi.PART.size)
        parts = list(_abi.PART.iter_unpack(raw))
        places = [(data, data + nbytes) for _, _, nbytes, data in parts if nbytes]
        low = min((begin for begin, _ in places), default=0)
        high = max((end for _, end in places), default=0)
        size = (high - low + _ROUND) & ~_ROUND
        slot: Any = None
        if places:
            slot = device_tensor(low, size, self._device.torch_name, self._keep)
        typed: dict[str, tuple[Any, int]] = {}
        for tensor, offset, nbytes, data in parts:
            index = (tensor - self._first) // _abi.TENSOR.size
            info = self._infos[index]
            if info.name.startswith(_abi.FILE_PREFIX):
                continue
            if nbytes != info.nbytes:
                whole = self._assemble(index, offset, slot[data - low:data - low + nbytes])
                if whole is not None:
                    yield info, whole
                continue
            yield info, self._view(typed, slot, info, data - low)

    def _view(self, typed: dict[str, tuple[Any, int]], slot: Any, info: TensorInfo,
              at: int) -> Any:
        if not info.nbytes:
            return self._torch.empty(info.shape, dtype=dtypes.torch_dtype(info.dtype),
                                     device=self._device.torch_name)
        known = typed.get(info.dtype)
        if known is None:
            known = (slot.view(dtypes.torch_dtype(info.dtype)), dtypes.itemsize(info.dtype))
            typed[info.dtype] = known
        base, size = known
        strides = self._strides.get(info.shape)
        if strides is None:
            strides = self._strides[info.shape] = row_major(info.shape)
        return base.as_strided(info.shape, strides, at // size)

    def _assemble(self, index: int, offset: int, part: Any) -> Any:
        info = self._infos[index]
        with self._device.on_stream():
            # The memory is also allocated on this stream, so that these copies follow all work
            # of its last user there.
            whole, missing = self._assembling.get(index) or (
                self._torch.empty(info.nbytes, dtype=self._torch.uint8, device=part.device),
                info.nbytes)
            whole[offset:offset + part.numel()].copy_(part)
        missing -= part.numel()
        if missing:
            self._assembling[index] = (whole, missing)
            return None
        self._assembling.pop(index, None)
        return whole.view(dtypes.torch_dtype(info.dtype)).view(info.shape)

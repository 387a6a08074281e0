"""Element types by their names in safetensors ("BF16", "F8_E4M3"), in torch and in numpy."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from ._optional import module
from .errors import InvalidError

if TYPE_CHECKING:
    import numpy
    import torch


class _Entry(NamedTuple):
    bits: int
    torch: str | None  # attribute of the module
    numpy: str | None  # of numpy or of ml_dtypes


_ENTRIES = {
    "BOOL": _Entry(8, "bool", "bool_"),
    "U8": _Entry(8, "uint8", "uint8"),
    "I8": _Entry(8, "int8", "int8"),
    "U16": _Entry(16, "uint16", "uint16"),
    "I16": _Entry(16, "int16", "int16"),
    "U32": _Entry(32, "uint32", "uint32"),
    "I32": _Entry(32, "int32", "int32"),
    "U64": _Entry(64, "uint64", "uint64"),
    "I64": _Entry(64, "int64", "int64"),
    "F16": _Entry(16, "float16", "float16"),
    "BF16": _Entry(16, "bfloat16", "bfloat16"),
    "F32": _Entry(32, "float32", "float32"),
    "F64": _Entry(64, "float64", "float64"),
    "F8_E4M3": _Entry(8, "float8_e4m3fn", "float8_e4m3fn"),
    "F8_E5M2": _Entry(8, "float8_e5m2", "float8_e5m2"),
    "F8_E8M0": _Entry(8, "float8_e8m0fnu", "float8_e8m0fnu"),
    "F4": _Entry(4, "float4_e2m1fn_x2", None),
    "F6_E2M3": _Entry(6, None, None),
    "F6_E3M2": _Entry(6, None, None),
}


def _entry(name: str) -> _Entry:
    entry = _ENTRIES.get(name)
    if entry is None:
        raise InvalidError(f"'{name}' is not a safetensors dtype")
    return entry


def itemsize(name: str) -> int:
    """Returns the bytes of one element. InvalidError: an unknown name, or less than a byte."""
    bits = _entry(name).bits
    if bits % 8:
        raise InvalidError(f"dtype {name} has elements smaller than a byte; store it packed as U8")
    return bits // 8


@functools.lru_cache(maxsize=None)
def torch_dtype(name: str) -> "torch.dtype":
    """Returns the `torch.dtype` of a safetensors name. InvalidError: this torch has none."""
    import torch
    attribute = _entry(name).torch
    found = getattr(torch, attribute, None) if attribute else None
    if not isinstance(found, torch.dtype):
        raise InvalidError(f"torch {torch.__version__} has no dtype {name}")
    return found


@functools.lru_cache(maxsize=None)
def dtype_name(dtype: "torch.dtype") -> str:
    """Returns the safetensors name of a `torch.dtype`. InvalidError: it has none."""
    import torch
    for name, entry in _ENTRIES.items():
        if entry.torch is not None and getattr(torch, entry.torch, None) is dtype:
            return name
    raise _unknown(str(dtype))


@functools.lru_cache(maxsize=None)
def short_name(dtype: "torch.dtype") -> str:
    """Returns "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=None)
def converts(dtype: "torch.dtype") -> bool:
    """Whether torch converts numbers to this dtype. It does not for packed and quantized dtypes."""
    import torch
    try:
        # On the CPU, also in a caller's context of another device: on meta, every copy succeeds.
        torch.empty(1, dtype=dtype, device="cpu").copy_(torch.zeros(1, device="cpu"))
    except RuntimeError:
        return False
    return True


@functools.lru_cache(maxsize=None)
def numpy_dtype(name: str) -> "numpy.dtype[Any]":
    """Returns the `numpy.dtype` of a safetensors name. Dtypes that numpy lacks (BF16, F8_…) are
    those of `ml_dtypes` where that is installed, else opaque bytes (`V2`, `V1`) without
    arithmetic."""
    import numpy
    attribute, size = str(_entry(name).numpy), itemsize(name)
    for package in (numpy, module("ml_dtypes")):
        if hasattr(package, attribute):
            known: numpy.dtype[Any] = numpy.dtype(getattr(package, attribute))
            return known
    return numpy.dtype(f"V{size}")


def numpy_dtype_name(dtype: "numpy.dtype[Any]") -> str:
    """Returns the safetensors name of a `numpy.dtype`, also of `ml_dtypes`. InvalidError: none."""
    for name, entry in _ENTRIES.items():
        if entry.numpy is not None and entry.numpy.rstrip("_") == dtype.name:
            return name
    raise _unknown(f"numpy's {dtype}")


def _unknown(dtype: str) -> InvalidError:
    known = " ".join(name for name, entry in _ENTRIES.items() if entry.bits % 8 == 0)
    return InvalidError(f"{dtype} is not a dtype that Rekindle keeps: convert it, or view it as "
                        f"one of {known}")

"""Copies torch tensors and numpy arrays into numpy arrays.

numpy converts between all of its dtypes, torch only between those that both have. Dtypes that numpy
lacks (BF16, F8) are those of `ml_dtypes` where that is installed, else opaque bytes. Their bits go
unchanged into unsigned integers and opaque elements of the same size.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import dtypes
from ._optional import module
from .errors import InvalidError

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]
    DType = numpy.dtype[Any]


def check(name: str, target: "Array", dtype: str) -> None:
    """Raises InvalidError when copy() cannot copy a tensor of the safetensors dtype `dtype`."""
    source = dtypes.numpy_dtype(dtype)
    if source == target.dtype or _takes_bits(source, target.dtype):
        return
    if not _is_number(target.dtype):
        raise InvalidError(f"{name} is {dtype}, which does not convert to its target's "
                           f"{target.dtype}")
    if not _is_number(source) and module("torch") is None:
        raise InvalidError(f"{name} is {dtype}, which numpy does not convert to {target.dtype}: "
                           f"install ml_dtypes, or give an array of {_bits_of(source)}")


def copy(target: "Array", source: Any) -> None:
    """Copies a torch tensor or numpy array. Converts where dtypes differ."""
    import numpy
    if not isinstance(source, numpy.ndarray):
        source = _array(source, target.dtype)
    if source.dtype != target.dtype and _takes_bits(source.dtype, target.dtype):
        target.view(_bits_of(source.dtype))[...] = source.view(_bits_of(source.dtype))
    else:
        numpy.copyto(target, source, casting="unsafe")


def _array(tensor: Any, wanted: "DType") -> "Array":
    """Returns a contiguous torch tensor as an array: as floats if numpy lacks its dtype and has to
    convert it."""
    import torch
    known = dtypes.numpy_dtype(dtypes.dtype_name(tensor.dtype))
    tensor = tensor.cpu()
    if _is_number(known) and not _is_extension(known):
        found: "Array" = tensor.numpy()
        return found
    if not _is_number(known) and _is_number(wanted) and not _takes_bits(known, wanted):
        return _array(tensor.float(), wanted)
    raw: "Array" = tensor.reshape(-1).view(torch.uint8).numpy().view(known).reshape(tensor.shape)
    return raw


def _takes_bits(source: "DType", target: "DType") -> bool:
    """Whether the bits of a dtype that numpy lacks go unchanged to the target."""
    return (not _is_number(source) or _is_extension(source)) and (
        target.itemsize == source.itemsize and (target.kind == "u" or _is_opaque(target)))


def _bits_of(dtype: "DType") -> str:
    return f"uint{8 * dtype.itemsize}"


def _is_number(dtype: "DType") -> bool:
    return dtype.kind in "biufc" or _is_extension(dtype)


def _is_extension(dtype: "DType") -> bool:
    """Whether this is a number type of ml_dtypes."""
    return dtype.isbuiltin == 2


def _is_opaque(dtype: "DType") -> bool:
    return dtype.kind == "V" and dtype.isbuiltin != 2 and dtype.fields is None

"""Which torch tensors can be published: those whose bytes are their values."""
from __future__ import annotations

from typing import Any

from . import dtypes
from ._targets import has_no_memory
from .errors import InvalidError


def check(name: str, tensor: Any) -> None:
    """Raises InvalidError, naming the tensor, unless it is dense and has memory of its own."""
    import torch
    if tensor.is_meta:
        raise InvalidError(f"'{name}' is on the meta device: it has no bytes to publish")
    if tensor.is_quantized:
        raise InvalidError(f"'{name}' is quantized by torch ({tensor.dtype}): publish its "
                           "int_repr() and its scales, or dequantize() it")
    if tensor.layout is not torch.strided:
        raise InvalidError(f"'{name}' is not a dense tensor ({tensor.layout})")
    if has_no_memory(tensor):
        raise InvalidError(f"'{name}' is a {type(tensor).__name__}, which has no memory of its "
                           "own: publish its full_tensor() or what it wraps")


def dtype_name(name: str, dtype: Any) -> str:
    """Returns the safetensors name of a torch dtype. InvalidError names the tensor."""
    try:
        found = dtypes.dtype_name(dtype)
        dtypes.itemsize(found)
        return found
    except InvalidError as why:
        raise InvalidError(f"'{name}': {why}") from None

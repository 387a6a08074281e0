"""Conversions of parts to another dtype, for `convert=` of `publish`."""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Union

from .. import dtypes
from .._parts import Part

# Takes a part, returns the parts that are published instead.
Convert = Callable[[Part], "list[Part]"]
# A regex for whole names of the checkpoint, or a function.
Select = Union[str, Callable[[str], bool]]

_FLOATING = ("F64", "F32", "F16", "BF16")


def cast(dtype: str, select: Select = ".*") -> Convert:
    """Returns a conversion of floating-point tensors, for example `cast("BF16")`, as torch
    converts. `select`: a regex for whole names, or a function; other tensors stay as they are."""
    torch_dtype, chosen = dtypes.torch_dtype(dtype), selection(select)

    def convert(part: Part) -> list[Part]:
        if part.dtype not in _FLOATING or part.dtype == dtype or not chosen(part.name):
            return [part]
        return [part._replace(dtype=dtype, read=lambda: part.read().to(torch_dtype))]
    return convert


def selection(select: Select) -> Callable[[str], Any]:
    return re.compile(select).fullmatch if isinstance(select, str) else select

"""Describes thousands of torch tensors in one call: addresses, dtypes, shapes, strides.

In Python, each attribute of each tensor costs 100 to 300 ns. DLPack's C exchange API (torch 2.10
and newer) gives C all attributes at once. Without it, callers ask torch for each attribute.
"""
from __future__ import annotations

import ctypes
import functools
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import _abi
from ._optional import module
from .errors import UnavailableError

_MAJOR = 1  # of DLPack
# The index of this function in a DLPackExchangeAPI: it follows version, prev_api and three
# functions.
_DLTENSOR_OF_OBJECT = 5
# Tensors per block. A block is small enough to stay in the CPU's cache.
_BLOCK = 2048
# The expected number of dimensions per tensor. The arrays grow when a tensor has more.
_DIMENSIONS = 4


class Layouts(NamedTuple):
    """Columns with one number for each tensor. `shapes` and `strides` have the dimensions of all
    tensors one after another, in elements."""

    # The address of the first element, or 0 for a tensor without memory.
    data: array[int]
    # Equal numbers mean equal devices.
    devices: array[int]
    # Equal numbers mean equal dtypes, except for torch's integers of at most 8 bits.
    dtypes: array[int]
    ranks: array[int]
    contiguous: array[int]  # 1: as torch's is_contiguous()
    shapes: array[int]
    strides: array[int]
    answers: list[Any]  # results of `question`


def kinds() -> set[type]:
    """Returns the types that describe() takes. Subclasses may give attributes another meaning."""
    torch = module("torch")
    return {torch.Tensor, torch.nn.Parameter} if torch is not None else set()


def describe(tensors: Sequence[Any], question: Callable[[Any], Any]) -> Layouts | None:
    """Returns the layouts of tensors whose types are exactly those of kinds().

    `question`: a function that is also called for each tensor, for example `torch.Tensor.is_neg`.
    None: torch or librekindle lacks the API, or DLPack cannot describe a tensor (sparse, on meta,
    quantized)."""
    exporter = _exporter()
    if exporter is None:
        return None
    found = Layouts(array("Q"), array("Q"), array("I"), array("I"), array("I"), array("q"),
                    array("q"), [])
    for at in range(0, len(tensors), _BLOCK):
        block = tensors[at:at + _BLOCK]
        if not _add_block(found, exporter, block):
            return None
        found.answers.extend(map(question, block))
    return found


def _add_block(found: Layouts, exporter: int, block: Sequence[Any]) -> bool:
    objects, done, size = array("Q", map(id, block)), ctypes.c_size_t(), _abi.TENSOR_LAYOUT.size
    records, capacity, code = array("Q", bytes(size * len(block))), 0, _abi.EXHAUSTED
    while code == _abi.EXHAUSTED:
        capacity = 2 * capacity or _DIMENSIONS * len(block)
        shapes, strides = array("q", bytes(8 * capacity)), array("q", bytes(8 * capacity))
        try:
            code = _abi.load_for_python().rk_describe_tensors(
                exporter, objects.buffer_info()[0], len(block), records.buffer_info()[0],
                shapes.buffer_info()[0], strides.buffer_info()[0], capacity, ctypes.byref(done),
                None)
        except Exception:
            # torch may raise anything here. Callers then use the slower way.
            return False
    if code != _abi.OK:
        return False
    words, halves = size // 8, array("I", records.tobytes())
    found.data.extend(records[0::words])
    found.devices.extend(records[1::words])
    for column, half in ((found.dtypes, 4), (found.ranks, 5), (found.contiguous, 8)):
        column.extend(halves[half::2 * words])
    used = records[3 - words] + halves[5 - 2 * words]
    found.shapes.extend(shapes[:used])
    found.strides.extend(strides[:used])
    return True


@functools.lru_cache(maxsize=None)
def _exporter() -> int | None:
    torch = module("torch")
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) if torch else None
    try:
        _abi.load_for_python()
        return None if capsule is None else exporter_of(capsule)
    except (UnavailableError, ValueError):
        return None


def exporter_of(capsule: Any) -> int | None:
    """Returns the address of dltensor_from_py_object_no_sync in a DLPackExchangeAPI. None: no table
    has our major version. ValueError: another kind of capsule."""
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    pointer_of = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))
    table = pointer_of(capsule, b"dlpack_exchange_api")
    while table:
        major = ctypes.c_uint32.from_address(table).value
        words = (ctypes.c_void_p * (_DLTENSOR_OF_OBJECT + 1)).from_address(table)
        if major == _MAJOR:
            return words[_DLTENSOR_OF_OBJECT]
        table = words[1]  # prev_api
    return None


def _word(code: int, bits: int) -> int:
    return int.from_bytes(struct.pack("=BBH", code, bits, 1), sys.byteorder)  # one lane


# torch exports its integers of less than 8 bits as 8-bit integers.
SHARED_WORDS = {_word(0, 8), _word(1, 8)}
# DLDataTypeCode and bits. Dtypes of less than a byte are absent: no load writes to such tensors.
_WORDS = {name: _word(*code) for name, code in {
    "BOOL": (6, 8), "U8": (1, 8), "I8": (0, 8), "U16": (1, 16), "I16": (0, 16), "U32": (1, 32),
    "I32": (0, 32), "U64": (1, 64), "I64": (0, 64), "F16": (2, 16), "BF16": (4, 16),
    "F32": (2, 32), "F64": (2, 64), "F8_E4M3": (10, 8), "F8_E5M2": (12, 8), "F8_E8M0": (14, 8),
}.items()}


def dtype_words(names: list[str]) -> array[int]:
    """Returns the numbers of Layouts.dtypes for safetensors names; 0, which no tensor has, if
    unknown."""
    words = {name: _WORDS.get(name, 0) for name in set(names)}
    if len(words) == 1:
        return array("I", words.values()) * len(names)
    return array("I", map(words.__getitem__, names))


def shares_word(name: str) -> bool:
    """Whether several dtypes of torch have this dtype's number: only torch tells them apart."""
    return _WORDS.get(name) in SHARED_WORDS

"""Converts a catalog and targets to bytes that are the same in every process, for fingerprints.

Works a column at a time: 100,000 calls of json or hash would take seconds.
"""
from __future__ import annotations

import itertools
import marshal
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from .. import _dlpack
from .tracer import TensorMeta


def of_catalog(catalog: Mapping[str, TensorMeta]) -> Iterator[bytes]:
    """Yields names, shapes and dtypes, in the catalog's order."""
    yield _names(list(catalog))
    yield _numbered(catalog.values(), lambda meta: (tuple(meta.shape), str(meta.dtype)))


def of_targets(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes]:
    """Yields names, shapes, strides, dtypes, devices, shared storages, and offsets in them.

    The bytes with DLPack differ from those without. torch's version decides which are used.
    """
    values = list(tensors.values())
    yield _names(list(tensors))
    layouts = None
    if set(map(type, values)) <= _dlpack.kinds():
        layouts = _dlpack.describe(values, torch.Tensor.storage_offset)
    yield from _asked(values) if layouts is None else _described(values, layouts)


def _asked(values: list[torch.Tensor]) -> Iterator[bytes]:
    yield _packed([tuple(tensor.shape) for tensor in values])
    yield _packed([tensor.stride() for tensor in values])
    yield _numbered([tensor.dtype for tensor in values], str)
    yield _numbered([tensor.device for tensor in values], str)
    yield _packed([tensor.storage_offset() for tensor in values])
    yield _sharing(_storages(values))


def _described(values: list[torch.Tensor], layouts: _dlpack.Layouts) -> Iterator[bytes]:
    for column in layouts.ranks, layouts.shapes, layouts.strides, layouts.dtypes, layouts.devices:
        yield column.tobytes()
    shared = set(layouts.dtypes) & _dlpack.SHARED_WORDS
    yield _numbered([tensor.dtype for tensor, word in zip(values, layouts.dtypes)
                     if word in shared] if shared else (), str)
    offsets = array("q", layouts.answers)
    yield offsets.tobytes()
    yield _ALL_DIFFERENT if _apart(layouts, offsets) else _sharing(_storages(values))


_ALL_DIFFERENT, _ALL_ONE = b"each its own", b"one for all"


def _apart(layouts: _dlpack.Layouts, offsets: array[int]) -> bool:
    """Whether each tensor surely has its own storage: it begins at a different address. Mostly this
    is true, and saves a question to torch for each tensor.
    """
    if any(offsets):
        return False
    begins = set(layouts.data)
    return len(begins) == len(offsets) and 0 not in begins


def _storages(values: list[torch.Tensor]) -> list[int]:
    """Returns storage_key() of each tensor."""
    return list(map(attrgetter("_cdata"), map(torch.Tensor.untyped_storage, values)))


def _sharing(keys: Sequence[int]) -> bytes:
    """Returns bytes that tell which keys are equal."""
    different = len(set(keys))
    if different == len(keys):
        return _ALL_DIFFERENT
    return _ALL_ONE if different == 1 else _numbered(keys, lambda key: "")


def _names(names: list[str]) -> bytes:
    joined = "\0".join(names)
    if joined.count("\0") != len(names) - 1:
        # Either a name contains a NUL, or there are no names.
        return _packed(names)
    return b"\0" + joined.encode("utf-8", "surrogatepass")  # unlike any output of marshal


def _packed(values: list[Any]) -> bytes:
    # Version 2 writes no references, which differ between equal values.
    return marshal.dumps(values, 2)


def _numbered(values: Iterable[Any], text: Callable[[Any], Any]) -> bytes:
    """Returns the different values, and for each value its number among them."""
    numbers: defaultdict[Any, int] = defaultdict(itertools.count().__next__)
    places = array("I", map(numbers.__getitem__, values))
    return _packed([text(value) for value in numbers]) + places.tobytes()

"""Targets that take an entry's bytes as they are, found for all at once.

Nothing is written before the last target is known to be right, so what this takes is added to the
time of a load: it is a microsecond a tensor, where `Destination`s, which also do everything else,
are ten.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import dtypes
from ._listing import Listing
from ._optional import module
from .boxes import Box
from .errors import InvalidError


class Plain(NamedTuple):
    """Of an entry each: contiguous, of its shape and dtype, on the device; no two the same."""

    indices: Sequence[int]  # of entries, ascending
    tensors: list[Any]
    addresses: list[int]

    def by_address(self) -> dict[int, int]:
        """Position in these lists."""
        return {address: at for at, address in enumerate(self.addresses)}

    def without(self, indices: set[int]) -> "Plain":
        mask = [index not in indices for index in self.indices]
        return Plain(*(list(itertools.compress(column, mask)) for column in self))


NOTHING = Plain([], [], [])


def plain_targets(listing: Listing, items: dict[Any, Any],
                  device_name: str) -> tuple[Plain, dict[Any, Any]]:
    """Those of `items` (key → tensor or tensors), and the items that are something else."""
    torch = module("torch")
    if torch is None:
        return NOTHING, items
    keys, values = _aligned(listing, items)
    columns, device = listing.columns, torch.device(device_name)
    kinds = (torch.Tensor, torch.nn.Parameter)  # others may mean something else by what they say
    wanted = {name: _plain_dtype(name) for name in set(columns.dtypes)}
    fits = [type(value) in kinds and value.dtype is wanted[dtype] and value.shape == shape
            and value.device == device and value.is_contiguous() and not value.is_neg()
            and nbytes > 0
            for value, dtype, shape, nbytes in zip(values, *_of_tensors(
                listing, columns.dtypes, columns.shapes, columns.nbytes))]
    found = _Found(listing.tensors, keys, values)
    if not all(fits):
        found = found.only(fits)
    addresses = list(map(torch.Tensor.data_ptr, found.values))
    if len(set(addresses)) != len(addresses):
        found, addresses = found.only(_first_of_each(addresses)), list(dict.fromkeys(addresses))
    plain = Plain(found.indices, found.values, addresses)
    if len(addresses) == len(items):
        return plain, {}
    taken = set(found.keys)
    return plain, {key: value for key, value in items.items() if key not in taken}


class _Found(NamedTuple):
    indices: Sequence[int]
    keys: list[Any]
    values: list[Any]

    def only(self, mask: list[bool]) -> "_Found":
        return _Found(*(list(itertools.compress(column, mask)) for column in self))


def _aligned(listing: Listing, items: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    """For each tensor of the session its key, and what `items` has by that."""
    names, = _of_tensors(listing, listing.columns.names)
    if listing.repeated:  # a name alone means several
        names = [None if name in listing.repeated else name for name in names]
    keys, values = names, list(map(items.get, names))
    if not all(map(items.__contains__, names)) and any(type(key) is not str for key in items):
        keys = list(names)
        offsets, shapes = _of_tensors(listing, listing.offsets, listing.columns.shapes)
        for at, box in enumerate(zip(names, offsets, shapes)):
            for key in (box, (box[0], (), ())):  # equal to the Box of the same
                if values[at] is None and key in items:
                    keys[at], values[at] = key, items[key]
    return keys, [value[0] if type(value) is list and len(value) == 1 else value
                  for value in values]


def _of_tensors(listing: Listing, *columns: Any) -> list[Any]:
    """Without files' entries."""
    if not listing.files:
        return list(columns)
    return [list(map(column.__getitem__, listing.tensors)) for column in columns]


def _plain_dtype(name: str) -> Any:
    """None for what torch does not have, or packs: an error that others raise."""
    try:
        return dtypes.torch_dtype(name) if dtypes.itemsize(name) else None
    except InvalidError:
        return None


def _first_of_each(addresses: list[int]) -> list[bool]:
    first = dict(zip(reversed(addresses), range(len(addresses) - 1, -1, -1)))
    return [first[address] == at for at, address in enumerate(addresses)]

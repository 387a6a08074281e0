"""Finds all targets that take an entry's bytes unchanged, in one pass.

A load writes nothing before it has checked the last target. Until then it only takes buckets
(`_prefetch`), as far as memory allows. A tensor takes 0.5 us by DLPack, 1 us where torch is asked,
and 10 us as a `Destination`, which also handles all other targets.
"""
from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from . import _dlpack, dtypes
from ._listing import Listing
from ._optional import module
from .boxes import Box
from .errors import InvalidError


class Plain(NamedTuple):
    """One target for each of some entries: contiguous, of the entry's shape and dtype, on the
    device. No two are the same."""

    indices: Sequence[int]  # of entries, ascending
    tensors: list[Any]
    addresses: list[int]

    def by_address(self) -> dict[int, int]:
        """Maps each address to its position in these lists."""
        return {address: at for at, address in enumerate(self.addresses)}

    def without(self, indices: set[int]) -> "Plain":
        mask = [index not in indices for index in self.indices]
        return Plain(*(list(itertools.compress(column, mask)) for column in self))


NOTHING = Plain([], [], [])


def plain_targets(listing: Listing, items: dict[Any, Any],
                  device_name: str) -> tuple[Plain, dict[Any, Any]]:
    """Returns the plain targets in `items` (key → tensor or tensors), and the other items."""
    torch = module("torch")
    if torch is None:
        return NOTHING, items
    keys, values = _aligned(listing, items)
    device = torch.device(device_name)
    fits, addresses = _described(listing, values, device) or _asked(listing, values, device)
    found = _Found(listing.tensors, keys, values)
    if not all(fits):
        found = found.only(fits)
    if len(set(addresses)) != len(addresses):
        found, addresses = found.only(_first_of_each(addresses)), list(dict.fromkeys(addresses))
    plain = Plain(found.indices, found.values, addresses)
    if len(addresses) == len(items):
        return plain, {}
    taken = set(found.keys)
    return plain, {key: value for key, value in items.items() if key not in taken}


def _asked(listing: Listing, values: list[Any], device: Any) -> tuple[Sequence[bool], list[int]]:
    """Returns which of `values` are plain targets, and their addresses. Asks torch."""
    torch, columns = module("torch"), listing.columns
    kinds, wanted = _dlpack.kinds(), {name: _plain_dtype(name) for name in set(columns.dtypes)}
    fits = [type(value) in kinds and value.dtype is wanted[dtype] and value.shape == shape
            and value.device == device and value.is_contiguous() and not value.is_neg()
            and nbytes > 0
            for value, dtype, shape, nbytes in zip(values, *_of_tensors(
                listing, columns.dtypes, columns.shapes, columns.nbytes))]
    return fits, list(map(torch.Tensor.data_ptr, itertools.compress(values, fits)))


def _described(listing: Listing, values: list[Any],
               device: Any) -> tuple[Sequence[bool], list[int]] | None:
    """As _asked, by DLPack, a column at a time. None: DLPack cannot describe the tensors."""
    torch, kinds = module("torch"), _dlpack.kinds()
    dtypes, ranks, shapes, nbytes = _of_tensors(
        listing, listing.columns.dtypes, listing.columns.ranks, listing.columns.shapes,
        listing.columns.nbytes)
    exact = None if set(map(type, values)) <= kinds else [type(one) in kinds for one in values]
    if exact is not None:
        values, dtypes, ranks, shapes, nbytes = (
            list(itertools.compress(one, exact)) for one in (values, dtypes, ranks, shapes, nbytes))
    # DLPack does not tell whether a tensor is negated.
    layouts = _dlpack.describe(values, torch.Tensor.is_neg)
    if layouts is None:
        return None
    masks = [_equal(layouts.dtypes, _dlpack.dtype_words(dtypes)), _own_dtypes(values, dtypes),
             _of_shapes(layouts, ranks, shapes), _on(layouts.devices, values, device),
             None if all(layouts.contiguous) else layouts.contiguous,
             None if all(nbytes) else nbytes,
             [not neg for neg in layouts.answers] if any(layouts.answers) else None]
    differing = [mask for mask in masks if mask is not None]
    if not differing and exact is None:
        return [True] * len(values), layouts.data.tolist()
    fits = list(map(all, zip(*differing))) if differing else [True] * len(values)
    addresses = list(itertools.compress(layouts.data, fits))
    if exact is None:
        return fits, addresses
    rest = iter(fits)
    return [one and next(rest) for one in exact], addresses


# For each tensor, whether two columns agree. None: they agree for all.
_Mask = Optional[Sequence[Any]]


def _equal(found: "array[int]", wanted: "array[int]") -> _Mask:
    return None if found == wanted else list(map(operator.eq, found, wanted))


def _own_dtypes(values: list[Any], dtypes: list[str]) -> _Mask:
    """Compares dtypes by torch where several share a number in DLPack."""
    shared = {name for name in set(dtypes) if _dlpack.shares_word(name)}
    return [name not in shared or value.dtype is _plain_dtype(name)
            for value, name in zip(values, dtypes)] if shared else None


def _of_shapes(layouts: _dlpack.Layouts, ranks: Sequence[int], shapes: list[Any]) -> _Mask:
    if layouts.ranks == array("I", ranks) and layouts.shapes == array(
            "q", itertools.chain.from_iterable(shapes)):
        return None
    ends = list(itertools.accumulate(layouts.ranks))
    return [tuple(layouts.shapes[end - rank:end]) == shape
            for end, rank, shape in zip(ends, layouts.ranks, shapes)]


def _on(devices: "array[int]", values: list[Any], device: Any) -> _Mask:
    right = {one: values[devices.index(one)].device == device for one in set(devices)}
    return None if all(right.values()) else list(map(right.__getitem__, devices))


class _Found(NamedTuple):
    indices: Sequence[int]
    keys: list[Any]
    values: list[Any]

    def only(self, mask: Sequence[bool]) -> "_Found":
        return _Found(*(list(itertools.compress(column, mask)) for column in self))


def _aligned(listing: Listing, items: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    """Returns the key of each tensor of the session, and the value of `items` for it."""
    names, = _of_tensors(listing, listing.columns.names)
    if listing.repeated:
        # The name alone does not tell boxes apart.
        names = [None if name in listing.repeated else name for name in names]
    try:
        keys, values = names, list(map(items.__getitem__, names))
    except KeyError:
        keys, values = _by_boxes(listing, names, items)
    if list in set(map(type, values)):
        values = [value[0] if type(value) is list and len(value) == 1 else value
                  for value in values]
    return keys, values


def _by_boxes(listing: Listing, names: list[Any],
              items: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    """As _aligned, where not every name is a key."""
    keys, values = names, list(map(items.get, names))
    if any(type(key) is not str for key in items):
        keys = list(names)
        offsets, shapes = _of_tensors(listing, listing.offsets, listing.columns.shapes)
        for at, box in enumerate(zip(names, offsets, shapes)):
            for key in (box, (box[0], (), ())):
                # A plain tuple hashes and compares equal to its Box.
                if values[at] is None and key in items:
                    keys[at], values[at] = key, items[key]
    return keys, values


def _of_tensors(listing: Listing, *columns: Any) -> list[Any]:
    """Returns the columns without the entries of files, which are few."""
    if not listing.files:
        return list(columns)
    found = [column[:] for column in columns]
    for column in found:
        for index in reversed(listing.files):
            del column[index]
    return found


def _plain_dtype(name: str) -> Any:
    """Returns the torch dtype. None: torch lacks it or packs its elements, which others report."""
    try:
        return dtypes.torch_dtype(name) if dtypes.itemsize(name) else None
    except InvalidError:
        return None


def _first_of_each(addresses: list[int]) -> list[bool]:
    first = dict(zip(reversed(addresses), range(len(addresses) - 1, -1, -1)))
    return [first[address] == at for at, address in enumerate(addresses)]

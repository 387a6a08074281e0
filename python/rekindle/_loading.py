"""`Session.load_into`: finds the target of each tensor, and copies in one of two ways.

On a device, rk_load_into gets all targets that take a tensor's bytes unchanged. `_plain` finds them
all at once, before anything is written. Meanwhile `_prefetch` takes buckets, so that the device's
link does not idle. If the other targets need at most MOST_BUFFERED bytes, each gets a buffer on the
device, which is copied to it afterwards. If they need more, or in host memory, tensors are taken
one by one, as by iteration.
"""
from __future__ import annotations

import array
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _abi, dtypes
from ._device import Device
from ._listing import Listing
from ._native import SLICE_S, milliseconds, run_interruptibly
from ._optional import module, no_collections
from ._plain import NOTHING, Plain, plain_targets
from ._prefetch import Prefetch
from ._targets import Destination, check_key, copying, items_of, key_text, tensors_of
from .errors import InvalidError, NotFoundError, TimeoutError

if TYPE_CHECKING:
    from .session import Session

MOST_BUFFERED = 256 << 20  # bytes


class LoadResult(NamedTuple):
    """Names without a counterpart. Both lists are empty after a strict load."""

    # Targets for which the session has no tensor.
    missing: list[str]
    # Tensors of the session without a target.
    unexpected: list[str]


def load_into(session: "Session", target: Any, strict: bool, timeout: float | None) -> LoadResult:
    milliseconds(timeout)
    batches = _unfinished.get(session)
    at_once = session._device if not session._begun or batches is not None else None
    with Prefetch(session._native, session._count() if at_once else 0):
        found = _prepare(session, target, strict, batches, at_once)
    if found.batches is None:
        _load_one_by_one(session, found.listing, found.aims.places, timeout)
    else:
        found.batches.load(session, timeout)
    return found.result


class _Prepared(NamedTuple):
    listing: Listing
    aims: "_Aims"
    batches: "_Batches | None"  # None: tensors are taken one by one
    result: LoadResult


def _prepare(session: "Session", target: Any, strict: bool, batches: "_Batches | None",
             at_once: Device | None) -> _Prepared:
    """Finds and checks all targets before anything is written. `batches`: of a load that timed
    out."""
    listing = session._catalog()
    with no_collections():
        plain, items = NOTHING, items_of(target)
        rest = items
        if at_once:
            plain, rest = plain_targets(listing, items, at_once.torch_name)
        aims = _find(listing, plain, rest)
        result = LoadResult(aims.missing, _unused(listing, aims))
        if strict:
            _refuse(session, result)
        aims.check(listing)
        buffered = _to_buffer(listing, aims.places, at_once.torch_name) if at_once else None
        if batches is not None and batches.memory != aims.memory():
            raise InvalidError("load_into has begun with other targets: go on with the same ones")
        if batches is None and at_once and buffered is not None:
            batches = _Batches(at_once, listing, aims, buffered)
        elif batches is None and plain.indices:
            aims = _find(listing, NOTHING, items)
    return _Prepared(listing, aims, batches, result)


class _Aims(NamedTuple):
    plain: Plain
    # Maps the index of another entry to its destinations.
    places: dict[int, list[Destination]]
    missing: list[str]

    def check(self, listing: Listing) -> None:
        for index, destinations in self.places.items():
            for destination in destinations:
                destination.check(listing.infos[index])

    def memory(self) -> Any:
        """Returns a value that is equal for targets with the same memory."""
        return self.plain.indices, self.plain.addresses, {
            index: [one.identity for one in destinations]
            for index, destinations in self.places.items()}


def _find(listing: Listing, plain: Plain, items: dict[Any, Any]) -> _Aims:
    """Finds the entries for `items`. Tied targets are written once. A name without a tensor is not
    missing if another name of the same memory has one."""
    places: dict[int, list[Destination]] = {}
    missing: list[tuple[str, list[Destination]]] = []
    written = _Written(plain if items else NOTHING)
    for key, value in items.items():
        check_key(key)
        found = listing.find(key)
        destinations = [Destination(key_text(key), tensor) for tensor in tensors_of(value)]
        if not found:
            missing.append((key_text(key), destinations))
            continue
        entry = places.setdefault(found[0], [])
        entry += [one for one in destinations if one not in written]
        written.add(destinations)
        for twin in found[1:]:
            places.setdefault(twin, [])
    plain = _give_up(listing, plain, places)
    return _Aims(plain, places, [name for name, destinations in missing
                                 if not all(one in written for one in destinations)])


class _Written:
    """The memory of targets that will get a tensor."""

    def __init__(self, plain: Plain) -> None:
        self._plain, self._places = plain, plain.by_address()
        self._identities: set[Any] = set()

    def add(self, destinations: list[Destination]) -> None:
        self._identities.update(one.identity for one in destinations if one.identity is not None)

    def __contains__(self, one: Destination) -> bool:
        if one.identity is None:
            return False
        at = self._places.get(one.address)
        return one.identity in self._identities or (
            at is not None and Destination("", self._plain.tensors[at]).identity == one.identity)


def _give_up(listing: Listing, plain: Plain, places: dict[int, list[Destination]]) -> Plain:
    """Moves entries of `plain` that have other destinations, too, to `places`."""
    both = places.keys() & set(plain.indices) if places else set()
    if not both:
        return plain
    for index, tensor in zip(plain.indices, plain.tensors):
        if index in both:
            name = key_text(listing.infos[index].name)
            places[index].insert(0, Destination(name, tensor))
    return plain.without(both)


def _unused(listing: Listing, aims: _Aims) -> list[str]:
    if len(aims.plain.indices) + len(aims.places) == len(listing.tensors):
        return []
    used = aims.places.keys() | set(aims.plain.indices)
    return [key_text(listing.infos[index].box if listing.infos[index].shape !=
                     listing.infos[index].full_shape else listing.infos[index].name)
            for index in listing.tensors if index not in used]


def _refuse(session: "Session", result: LoadResult) -> None:
    where = f"{session.model}@{session.version}"
    if result.missing:
        raise NotFoundError(f"{where} as this session has it is without {_named(result.missing)} "
                            "of the targets; strict=False leaves them as they are")
    if result.unexpected:
        raise NotFoundError(f"{_named(result.unexpected)} of {where} has no target; strict=False "
                            "passes over that")


def _named(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _to_buffer(listing: Listing, places: dict[int, list[Destination]],
               device_name: str) -> set[int] | None:
    """Returns the entries that need a buffer. None: the buffers are too large, or there is no
    torch."""
    torch = module("torch")
    if torch is None:
        return None
    if not places:
        # Making the infos of thousands of tensors takes time, so it is left out here.
        return set()
    device, infos = torch.device(device_name), listing.infos
    found = {index for index, destinations in places.items()
             if destinations and not destinations[0].takes_bytes(infos[index].dtype, device)}
    return found if sum(infos[index].nbytes for index in found) <= MOST_BUFFERED else None


class _Batches:
    """A load by rk_load_into. Targets that it cannot take are copied afterwards."""

    def __init__(self, device: Device, listing: Listing, aims: _Aims, buffered: set[int]) -> None:
        import torch
        self.memory = aims.memory()
        self._device, self._aims = device, aims
        indices, addresses = list(aims.plain.indices), list(aims.plain.addresses)
        self._afterwards: list[tuple[Any, list[Destination]]] = []
        for index in sorted(aims.places):
            info, others = listing.infos[index], aims.places[index]
            if not others or not info.nbytes:
                continue
            if index in buffered:
                with device.on_stream():
                    tensor = torch.empty(info.shape, dtype=dtypes.torch_dtype(info.dtype),
                                         device=device.torch_name)
            else:
                tensor, others = others[0].tensor, others[1:]
            if others:
                self._afterwards.append((tensor, others))
            indices.append(index)
            addresses.append(tensor.data_ptr())
        self._targets = _targets(listing, indices, addresses)
        self._count = len(indices)

    def load(self, session: "Session", timeout: float | None) -> None:
        """Loads. After a TimeoutError, another call continues."""
        session._begun = True
        _unfinished.pop(session, None)
        try:
            go_on(session, timeout, lambda ms: session._native.call(
                "rk_load_into", self._targets.buffer_info()[0], self._count, ms))
        except TimeoutError:
            _unfinished[session] = self
            raise
        with copying(self._device):
            for tensor, others in self._afterwards:
                for other in others:
                    other.copy(tensor)


# Sessions whose load ran out of time and can continue.
_unfinished: "weakref.WeakKeyDictionary[Session, _Batches]" = weakref.WeakKeyDictionary()


def _targets(listing: Listing, indices: list[int], addresses: list[int]) -> "array.array[int]":
    """Returns an array of rk_targets, filled a column at a time."""
    columns, words = listing.columns, _abi.TARGET.size // 8
    everything = len(indices) == columns.count and indices == list(range(columns.count))
    targets = array.array("Q", [0]) * (words * len(indices))
    for word, column in ((0, columns.name_pointers), (1, columns.offset_pointers),
                         (3, columns.nbytes)):
        targets[word::words] = column if everything else array.array(
            "Q", map(column.__getitem__, indices))
    targets[2::words] = array.array("Q", addresses)
    return targets


def go_on(session: "Session", timeout: float | None, call: Callable[[int], None]) -> None:
    """Repeats `call(ms)` until it succeeds, or until `timeout` seconds pass without a bucket."""
    idle = 0.0

    def step() -> bool:
        nonlocal idle
        begun = time.monotonic()
        left = SLICE_S if timeout is None else min(SLICE_S, max(timeout - idle, 0.0))
        try:
            call(milliseconds(left))
            return True
        except TimeoutError:
            # A call that took longer first got a bucket, then waited `left` seconds for another.
            took = time.monotonic() - begun
            idle = left if took > 1.5 * left + 0.1 else idle + left
            if timeout is not None and idle >= timeout:
                raise
            return False

    def all_steps() -> None:
        while not step():
            pass

    def stop() -> None:
        # The call writes to the caller's memory, so it must have ended when this function raises.
        session._native.cut()
        session._native.end()

    run_interruptibly(all_steps, stop)


def _load_one_by_one(session: "Session", listing: Listing,
                     places: dict[int, list[Destination]], timeout: float | None) -> None:
    waiting = {listing.infos[index]: destinations for index, destinations in places.items()
               if destinations}
    with copying(session._device):
        for info, tensor in session.entries(timeout):
            for destination in waiting.pop(info, ()):
                destination.copy(tensor)
    if waiting:
        names = [destinations[0].name for destinations in waiting.values()]
        raise InvalidError(f"{_named(names)} was taken from the session before: give load_into "
                           "what nobody has iterated over")

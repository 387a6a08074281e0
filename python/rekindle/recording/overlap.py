"""Which tensors a plan may move by itself, in any order, and which the loader has to be given.

Moves are executed as bytes arrive, after constants and before the loader's own run with the opaque
tensors. That gives what the loader gave if nothing is written twice. Where something is, its
tensors become opaque, and so do tensors that are written together with an opaque one: the loader
is given them in the catalog's order, so that the later one wins.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from .events import Event, Fill, Write
from .geometry import Ints, lattice
from .targets import span, storage_key

# Events that may overlap pairwise are compared one by one, up to this many.
_MOST_COMPARED = 256


def demoted(events: Sequence[Event], targets: Mapping[str, torch.Tensor],
            opaque: Iterable[str], everything: Iterable[str]) -> set[str]:
    """Names of all tensors that must be opaque, given those that are."""
    result = set(opaque)
    if any(not event.parameter for event in events):
        return set(everything)
    pairs = list(_clashes(events, targets))
    unfollowed = [event for event in events if isinstance(event, Write) and event.flows is None]
    while True:
        before = len(result)
        for write in unfollowed:
            result |= write.sources
        for event in events if result else ():
            if isinstance(event, Write) and not result.isdisjoint(event.sources):
                result |= event.sources
        for first, second in pairs:
            result |= _blamed(first, second, bool(result))
        if len(result) == before:
            return result


def _blamed(first: Event, second: Event, loader_runs: bool) -> frozenset[str]:
    if isinstance(first, Fill) and isinstance(second, Fill):
        return frozenset()
    if isinstance(first, Fill) and isinstance(second, Write):
        # A constant below: right in this order, unless the loader's later run writes it once more.
        return second.sources if loader_runs or first.value is None else frozenset()
    names: frozenset[str] = frozenset()
    for event in (first, second):
        if isinstance(event, Write):
            names |= event.sources
    return names


class _Placed(NamedTuple):
    order: int
    event: Event
    target: torch.Tensor
    span: tuple[int, int]  # bytes of the storage
    # The box in coordinates that all events of its group share.
    box: tuple[Ints, Ints] | None = None


def _clashes(events: Sequence[Event],
             targets: Mapping[str, torch.Tensor]) -> Iterator[tuple[Event, Event]]:
    """Pairs (earlier, later) of events that may write the same elements; a loader that writes the
    same to them twice (a tied parameter by both of its names) is harmless.
    """
    written = dict.fromkeys([event.parameter for event in events])
    storages = {name: storage_key(targets[name]) for name in written}
    by_storage: dict[int, list[tuple[int, Event]]] = {}
    for order, event in enumerate(events):
        by_storage.setdefault(storages[event.parameter], []).append((order, event))
    for together in by_storage.values():
        if len(together) == 1:
            continue
        placed = [_placed(order, event, targets[event.parameter]) for order, event in together]
        for group in _runs(placed, lambda one: one.span):
            boxed = _boxed(group)
            for cluster in [group] if boxed is None else _clusters(boxed):
                yield from _pairs(cluster)


def _placed(order: int, event: Event, target: torch.Tensor) -> _Placed:
    width = target.element_size()
    first, end = span(int(target.storage_offset()) + event.offset, event.size, event.stride)
    return _Placed(order, event, target, (first * width, end * width))


def _runs(placed: Sequence[_Placed],
          interval: Callable[[_Placed], tuple[int, int]]) -> Iterator[list[_Placed]]:
    """Those of at least two whose intervals hang together."""
    run: list[_Placed] = []
    reach = 0
    for one in sorted(placed, key=interval):
        begin, end = interval(one)
        if run and begin >= reach:
            if len(run) > 1:
                yield run
            run = []
        reach = max(reach, end) if run else end
        run.append(one)
    if len(run) > 1:
        yield run


def _clusters(boxed: Sequence[_Placed]) -> Iterator[Sequence[_Placed]]:
    """Parted along one dimension after the other, until none parts them any more."""
    for k in range(len(_box(boxed[0])[0])):
        def interval(one: _Placed, k: int = k) -> tuple[int, int]:
            start, extent = _box(one)
            return start[k], start[k] + extent[k]
        runs = list(_runs(boxed, interval))
        if [len(run) for run in runs] != [len(boxed)]:
            for run in runs:
                yield from _clusters(run)
            return
    yield boxed


def _box(one: _Placed) -> tuple[Ints, Ints]:
    assert one.box is not None
    return one.box


def _pairs(cluster: Sequence[_Placed]) -> Iterator[tuple[Event, Event]]:
    placed = _without_repeats(cluster)
    fills = [one for one in placed if isinstance(one.event, Fill)]
    writes = [one for one in placed if isinstance(one.event, Write)]
    if len(placed) <= _MOST_COMPARED:
        for index, second in enumerate(placed):
            for first in placed[:index]:
                if _intersect(first, second):
                    yield first.event, second.event
    elif fills:
        yield from _with_constants(fills, writes)
        for part in _clusters(writes) if writes and writes[0].box else [writes]:
            yield from _pairs(part)
    else:
        # There are too many events to compare all pairs, so each one counts as overlapping with all
        # of them.
        yield from ((one.event, other.event) for one, other in zip(writes, writes[1:]))


def _without_repeats(cluster: Sequence[_Placed]) -> list[_Placed]:
    """In order; of equal ones the first, and of equal constants the last, too, for what was written
    between them.
    """
    in_order = sorted(cluster, key=lambda one: one.order)
    first = {one.event: one for one in reversed(in_order)}
    last = {one.event: one for one in in_order}
    return [one for one in in_order if first[one.event] is one
            or (isinstance(one.event, Fill) and last[one.event] is one)]


def _with_constants(fills: Sequence[_Placed],
                    writes: Sequence[_Placed]) -> Iterator[tuple[Event, Event]]:
    """A tensor with the last constant after it, or with the first before it, and before that one
    that is none.
    """
    unknown = next((fill for fill in fills
                    if fill.event.value is None), fills[0])  # type: ignore[union-attr]
    for write in writes:
        for first, second in ((write, fills[-1]), (fills[0], write), (unknown, write)):
            if first.order < second.order:
                yield first.event, second.event


def _intersect(one: _Placed, other: _Placed) -> bool:
    """Whether both may write an element; True where we cannot say."""
    if one.span[1] <= other.span[0] or other.span[1] <= one.span[0]:
        return False
    if one.box is None or other.box is None:
        return True
    return all(x < y + m and y < x + n for x, n, y, m in zip(*one.box, *other.box))


def _boxed(group: Sequence[_Placed]) -> list[_Placed] | None:
    """With boxes in coordinates that the strides of the first one's target give; None where they do
    not.
    """
    target, width = group[0].target, group[0].target.element_size()
    strides = sorted({s for n, s in zip(target.size(), target.stride()) if n > 1 and s > 1},
                     reverse=True)
    steps = [*strides, 1]
    if any(wide % narrow for wide, narrow in zip(steps, steps[1:])):
        return None
    base = int(target.storage_offset()) % steps[0]
    shape = [max(one.span[1] for one in group) // width // steps[0] + 2,
             *(wide // narrow for wide, narrow in zip(steps, steps[1:]))]
    boxed = []
    for one in group:
        first, uneven = divmod(one.span[0], width)
        if uneven or one.target.element_size() != width:
            return None
        found = lattice(shape, first - base + steps[0], one.event.size, one.event.stride)
        if found is None:
            return None
        boxed.append(one._replace(box=(found.start, found.extent(len(shape)))))
    return boxed

"""Decides which tensors a plan may move in any order, and which it must give to the loader.

Moves run as bytes arrive, after constants and before the loader's own run with the opaque tensors.
The result is that of the loader if nothing is written twice. Tensors that write the same elements
become opaque, and so do tensors that are written together with an opaque one. The loader gets them
in the catalog's order, so that the later one wins.
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
    """Returns the names of all tensors that must be opaque. `opaque`: those that already are."""
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
        # A constant before a tensor is right, unless the loader's later run writes it once more.
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
    """Yields pairs (earlier, later) of events that may write the same elements. Equal writes are
    harmless, and left out (a tied parameter by both of its names).
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
    """Yields groups of at least two whose intervals overlap."""
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
    """Splits a group along one dimension after another, until none separates it."""
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
    """Returns events in order without repeats: the first of equal ones. Of equal constants the last
    stays, too, because of writes between them.
    """
    in_order = sorted(cluster, key=lambda one: one.order)
    first = {one.event: one for one in reversed(in_order)}
    last = {one.event: one for one in in_order}
    return [one for one in in_order if first[one.event] is one
            or (isinstance(one.event, Fill) and last[one.event] is one)]


def _with_constants(fills: Sequence[_Placed],
                    writes: Sequence[_Placed]) -> Iterator[tuple[Event, Event]]:
    """Pairs each write with the last constant after it, the first constant before it, and the first
    fill before it that is no constant.
    """
    unknown = next((fill for fill in fills
                    if fill.event.value is None), fills[0])  # type: ignore[union-attr]
    for write in writes:
        for first, second in ((write, fills[-1]), (fills[0], write), (unknown, write)):
            if first.order < second.order:
                yield first.event, second.event


def _intersect(one: _Placed, other: _Placed) -> bool:
    """Whether both may write the same element. True where this is unknown."""
    if one.span[1] <= other.span[0] or other.span[1] <= one.span[0]:
        return False
    if one.box is None or other.box is None:
        return True
    return all(x < y + m and y < x + n for x, n, y, m in zip(*one.box, *other.box))


def _boxed(group: Sequence[_Placed]) -> list[_Placed] | None:
    """Returns the group with boxes, in coordinates of the strides of the first event's target.
    None: these strides give no boxes.
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

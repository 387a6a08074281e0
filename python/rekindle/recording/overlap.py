"""Which tensors a plan may move by itself, in any order, and which the loader has to be given.

Moves are executed as bytes arrive, after constants and before the loader's own run with the opaque
tensors. That gives what the loader gave if nothing is written twice. Where something is, its
tensors become opaque, and so do tensors that are written together with an opaque one.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from .geometry import Ints, lattice
from .targets import span
from .tracer import Fill, Write

Event = Write | Fill


def demoted(events: Sequence[Event], targets: Mapping[str, torch.Tensor],
            opaque: Iterable[str], everything: Iterable[str]) -> set[str]:
    """Names of all tensors that must be opaque, given those that are."""
    result = set(opaque)
    if any(not event.parameter for event in events):
        return set(everything)
    clashes = list(_clashes(events, targets))
    if result or any(not isinstance(e, Write) for pair in clashes for e in pair):
        pairs = clashes
    else:
        pairs = [p for p in clashes if not _same_flows(*p)]
    while True:
        before = len(result)
        for event in events:
            if isinstance(event, Write) and (event.flows is None or result & event.sources):
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


def _same_flows(first: Event, second: Event) -> bool:
    """The loader writes the same elements twice (a tied parameter by both of its names): harmless.
    """
    return isinstance(first, Write) and isinstance(second, Write) and first == second


def _clashes(events: Sequence[Event],
             targets: Mapping[str, torch.Tensor]) -> Iterable[tuple[Event, Event]]:
    """Pairs (earlier, later) of events that may write the same elements."""
    by_parameter: dict[str, list[tuple[int, int, int, Event]]] = {}
    for order, event in enumerate(events):
        first, end = span(event.offset, event.size, event.stride)
        by_parameter.setdefault(event.parameter, []).append((first, end, order, event))
    for name, placed in by_parameter.items():
        placed.sort(key=lambda p: p[:3])
        yield from _sweep(placed, targets[name])


def _sweep(placed: Sequence[tuple[int, int, int, Event]],
           target: torch.Tensor) -> Iterable[tuple[Event, Event]]:
    active: list[tuple[int, int, int, Event]] = []
    for entry in placed:
        active = [other for other in active if other[1] > entry[0]]
        for other in active:
            if _intersect(other[3], entry[3], target):
                pair = sorted((other, entry), key=lambda p: p[2])
                yield pair[0][3], pair[1][3]
        active.append(entry)


def _intersect(one: Event, other: Event, target: torch.Tensor) -> bool:
    """Whether both may write an element; True where we cannot say."""
    a, b = _box(one, target), _box(other, target)
    if a is None or b is None:
        return True
    return all(x < y + m and y < x + n for x, n, y, m in zip(a[0], a[1], b[0], b[1]))


def _box(event: Event, target: torch.Tensor) -> tuple[Ints, Ints] | None:
    order = sorted(range(target.dim()), key=lambda d: -target.stride(d))
    shape = [target.size(d) for d in order]
    step = 1
    for d in reversed(order):
        if target.size(d) > 1 and target.stride(d) != step:
            return None
        step *= target.size(d)
    found = lattice(shape, event.offset, event.size, event.stride)
    return None if found is None else (found.start, found.extent(len(shape)))

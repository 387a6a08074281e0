"""Counts the elements of a tensor that lie in regions of its memory, which may overlap.

The count is exact, and cheap for separate regions. Contiguous regions are merged as intervals.
Other regions are told apart by the boxes around them. Where boxes overlap, elements are marked one
by one.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from math import gcd, prod
from typing import NamedTuple, TypeVar

import torch

from .._optional import no_collections
from ..boxes import row_major
from ..recording.geometry import Ints, lattice

# (offset from a tensor's first element, size, stride), as torch.as_strided has them.
Region = tuple[int, Ints, Ints]
# Elements that are marked at once, one byte each.
_BLOCK = 1 << 26
# Up to this many boxes that no plane separates are compared in pairs.
_MOST_COMPARED = 64

T = TypeVar("T")


def in_bytes(region: Region, width: int) -> Region:
    """Returns a region in bytes for one in elements of `width` bytes."""
    offset, size, stride = region
    return offset * width, (*size, width), (*[step * width for step in stride], 1)


class _Run(NamedTuple):
    """A region in canonical form. Dimensions (step, count) go from wide steps to narrow ones. None
    repeats elements, and none continues in the next."""

    offset: int
    end: int  # one past the last element
    dims: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        """The number of elements. An element that occurs twice counts twice."""
        return prod([count for _, count in self.dims])

    @property
    def flat(self) -> bool:
        """Whether the region is contiguous."""
        return not self.dims or (len(self.dims) == 1 and self.dims[0][0] == 1)

    @property
    def may_repeat(self) -> bool:
        """Whether an element may occur twice."""
        reach = 1
        for step, count in reversed(self.dims):
            if step < reach:
                return True
            reach += (count - 1) * step
        return False


class _Side(NamedTuple):
    """One dimension of a box: every `step`th element from `begin` to `end`. Step 0: one element."""

    begin: int
    end: int
    step: int


_Box = tuple[_Side, ...]
_Boxed = tuple[_Box, _Run]


def covered(size: Sequence[int], stride: Sequence[int], regions: Iterable[Region]) -> int:
    """Returns how many elements of a tensor of this layout are in at least one region. Elements of
    a region outside of the tensor do not count."""
    with no_collections():
        return _covered(size, stride, regions)


def _covered(size: Sequence[int], stride: Sequence[int], regions: Iterable[Region]) -> int:
    own = _run(0, size, stride)
    if own is None:
        return 0
    runs = {run for run in (_run(*region) for region in regions)
            if run is not None and run.offset < own.end and run.end > 0}
    if own in runs:
        return prod(size)
    repeats = prod([count for count, step in zip(size, stride) if step == 0])
    if not own.flat:
        return repeats * _marked(runs, own)
    inside = [run for run in runs if run.offset >= 0 and run.end <= own.end]
    for run in runs if len(inside) < len(runs) else ():
        if run.offset < 0 or run.end > own.end:
            inside += _clipped(run, 0, own.end)
    wide_first = sorted(zip(stride, size), reverse=True)
    return repeats * _union(inside, [count for step, count in wide_first if step and count > 1])


def _run(offset: int, size: Sequence[int], stride: Sequence[int]) -> _Run | None:
    """Returns a region in canonical form; None when it is empty."""
    if len(size) == 1 and stride[0] == 1 and size[0] > 1:
        return _Run(offset, offset + size[0], ((1, size[0]),))
    dims: list[tuple[int, int]] = []
    end = offset + 1
    for step, count in sorted(zip(stride, size), reverse=True):
        if count == 0:
            return None
        if count == 1 or step == 0:
            continue
        end += (count - 1) * step
        if dims and dims[-1][0] == count * step:
            count *= dims.pop()[1]
        dims.append((step, count))
    return _Run(offset, end, tuple(dims))


def _interval(begin: int, end: int) -> _Run:
    return _Run(begin, end, ((1, end - begin),) if end - begin > 1 else ())


def _union(runs: Iterable[_Run], shape: Sequence[int]) -> int:
    """Returns how many elements are in at least one run, within contiguous memory of this shape."""
    contiguous: list[_Run] = []
    strided: list[_Run] = []
    for run in runs:
        (contiguous if run.flat else strided).append(run)
    flat = _merged(contiguous)
    begins = [begin for begin, _ in flat]
    strided = [run for run in strided if not _within(run, flat, begins)]
    if not strided:
        return sum(end - begin for begin, end in flat)
    total = 0
    for group in _groups([*(_interval(*one) for one in flat), *strided], _span):
        for part in _parted(group, shape):
            single = len(part) == 1 and not part[0].may_repeat
            total += part[0].elements if single else _marked(part, _interval(*_reach(part)))
    return total


def _merged(contiguous: Sequence[_Run]) -> list[tuple[int, int]]:
    """Returns intervals that do not overlap, from left to right."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted([run[:2] for run in contiguous]):
        if merged and begin <= merged[-1][1]:
            begin, last = merged.pop()
            end = max(end, last)
        merged.append((begin, end))
    return merged


def _reach(runs: Sequence[_Run]) -> tuple[int, int]:
    return min(run.offset for run in runs), max(run.end for run in runs)


def _span(run: _Run) -> tuple[int, int]:
    return run.offset, run.end


def _within(run: _Run, flat: Sequence[tuple[int, int]], begins: Sequence[int]) -> bool:
    at = bisect_right(begins, run.offset) - 1
    return at >= 0 and run.end <= flat[at][1]


def _groups(items: Iterable[T], interval: Callable[[T], tuple[int, int]]) -> Iterator[list[T]]:
    """Yields groups of items whose intervals overlap, from left to right, also within a group."""
    group: list[T] = []
    reach = 0
    for item in sorted(items, key=interval):
        begin, end = interval(item)
        if group and begin >= reach:
            yield group
            group = []
        reach = max(reach, end) if group else end
        group.append(item)
    if group:
        yield group


def _parted(runs: list[_Run], shape: Sequence[int]) -> Iterator[list[_Run]]:
    """Splits a group into parts that share no element, as far as their boxes show it."""
    if len(runs) == 1:
        yield runs
        return
    rows = row_major(shape)
    boxed = [(box, run) for run in runs for box in [_box(run, shape, rows)] if box is not None]
    if len(boxed) < len(runs):
        yield runs
        return
    left = [boxed]
    while left:
        group = left.pop()
        parts = _cut(group, len(shape)) if len(group) > 1 else []
        left += parts
        if not parts and len(group) <= _MOST_COMPARED and all(
                _disjoint(one, other) for (one, _), (other, _) in combinations(group, 2)):
            yield from ([run] for _, run in group)
        elif not parts:
            yield [run for _, run in group]


def _cut(group: list[_Boxed], dims: int) -> list[list[_Boxed]]:
    """Splits a group along the first dimension that separates it. Returns [] when none does."""
    for k in range(dims):
        def interval(one: _Boxed, k: int = k) -> tuple[int, int]:
            return one[0][k].begin, one[0][k].end
        parts = list(_groups(group, interval))
        if len(parts) > 1:
            return parts
    return []


def _box(run: _Run, shape: Sequence[int], rows: Sequence[int]) -> _Box | None:
    """Returns the box of a run in coordinates of `shape` (strides: `rows`); None if it has none."""
    sides, counts, rest = [], dict(run.dims), run.offset
    plain = len(counts) == len(run.dims)
    for extent, step in zip(shape, rows):
        begin, rest = divmod(rest, step)
        count = counts.pop(step, 1)
        if begin + count > extent:
            break
        sides.append(_Side(begin, begin + count, int(count > 1)))
    if plain and len(sides) == len(shape) and not counts:
        return tuple(sides)
    return _lattice_box(run, shape)


def _lattice_box(run: _Run, shape: Sequence[int]) -> _Box | None:
    """As _box, for a run with wider steps, or one that runs through several dimensions."""
    found = lattice(shape, run.offset, [count for _, count in run.dims],
                    [step for step, _ in run.dims])
    if found is None:
        return None
    steps = [0] * len(shape)
    for atom in found.atoms:
        steps[atom.dim] = gcd(steps[atom.dim], atom.step)
    return tuple(_Side(begin, begin + extent, step) for begin, extent, step in zip(
        found.start, found.extent(len(shape)), steps))


def _disjoint(one: _Box, other: _Box) -> bool:
    """Whether two boxes share no element: in one dimension, they are side by side or in each
    other's gaps."""
    for a, b in zip(one, other):
        if a.end <= b.begin or b.end <= a.begin:
            return True
        common = gcd(a.step, b.step)
        if common and (a.begin - b.begin) % common:
            return True
    return False


def _marked(runs: Iterable[_Run], own: _Run) -> int:
    """Returns how many elements of `own` are in at least one of the runs."""
    runs, total = list(runs), 0
    for begin in range(own.offset, own.end, _BLOCK):
        end = min(begin + _BLOCK, own.end)
        # An engine's loader may run with another default device.
        mask = torch.zeros(end - begin, dtype=torch.bool, device="cpu")
        for run in runs:
            for piece in _clipped(run, begin, end):
                _view(mask, piece, begin).fill_(True)
        for piece in _clipped(own, begin, end):
            total += int(_view(mask, piece, begin).count_nonzero())
    return total


def _view(mask: torch.Tensor, run: _Run, begin: int) -> torch.Tensor:
    return mask.as_strided([count for _, count in run.dims], [step for step, _ in run.dims],
                           run.offset - begin)


def _clipped(run: _Run, begin: int, end: int) -> Iterator[_Run]:
    """Yields the parts of a run that lie in an interval."""
    if run.offset >= end or run.end <= begin:
        return
    if run.offset >= begin and run.end <= end:
        yield run
        return
    (step, count), inner = run.dims[0], run.dims[1:]
    size, stride = [count for _, count in inner], [step for step, _ in inner]
    reach = run.end - run.offset - (count - 1) * step
    # Only outer elements that lie inside as a whole.
    first = max(0, -((run.offset - begin) // step))
    last = min(count - 1, (end - reach - run.offset) // step)
    if first <= last:
        whole = _run(run.offset + first * step, [last - first + 1, *size], [step, *stride])
        assert whole is not None
        yield whole
    touched = range(max(0, (begin - reach - run.offset) // step + 1),
                    min(count - 1, (end - 1 - run.offset) // step) + 1)
    for index in touched:
        if not first <= index <= last:
            at = run.offset + index * step
            yield from _clipped(_Run(at, at + reach, inner), begin, end)

"""Joins the parts of one tensor that are neighbours into larger boxes.

A rule for names may cut a tensor into many ranges that lie side by side in the target. Fewer boxes
make a shorter declaration, and a conversion by blocks needs whole blocks.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from .._parts import Part
from ..errors import InvalidError


class Item(NamedTuple):
    """A part, and the name of the trainer's tensor that it is made of."""

    source: str
    part: Part


def joined(items: Iterable[Item]) -> list[Part]:
    """Returns the parts, joined where they are neighbours, without empty ones. InvalidError: two
    sources disagree about a tensor, or overlap in it."""
    by_name: dict[str, list[Item]] = {}
    for item in items:
        by_name.setdefault(item.part.name, []).append(item)
    found: list[Part] = []
    for group in by_name.values():
        _check_agreement(group)
        group = [item for item in group if not item.part.is_empty]
        _check_overlaps(group)
        parts = [item.part for item in group]
        for dim in reversed(range(len(parts[0].shape) if len(parts) > 1 else 0)):
            parts = list(_joined_along(dim, parts))
        found += parts
    return found


def _check_agreement(group: list[Item]) -> None:
    first = group[0]
    for item in group[1:]:
        for what in ("dtype", "shape"):
            one, other = getattr(first.part, what), getattr(item.part, what)
            if one != other:
                raise InvalidError(f"'{item.part.name}' has {what} {one} from '{first.source}' and "
                                   f"{other} from '{item.source}': map them to two names")


def _check_overlaps(group: list[Item]) -> None:
    if len(group) < 2:
        return
    before: list[Item] = []
    for item in sorted(group, key=lambda one: one.part.offset):
        start = item.part.offset[:1]
        before = [one for one in before if _end(one.part) > start]
        for one in before:
            if _overlap(one.part, item.part):
                raise InvalidError(f"'{one.source}' and '{item.source}' both give "
                                   f"{item.part.described()}: map them to two names")
        before.append(item)


def _end(part: Part) -> tuple[int, ...]:
    # A scalar ends after everything: two of one name always overlap.
    return (part.offset[0] + part.extent[0],) if part.shape else (0,)


def _overlap(one: Part, other: Part) -> bool:
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(
        one.offset, one.extent, other.offset, other.extent))


def _joined_along(dim: int, parts: list[Part]) -> Iterator[Part]:
    """Joins parts that differ in one dimension only and are neighbours in it."""
    rows: dict[Any, list[Part]] = {}
    for part in parts:
        key = tuple((start, count) for at, (start, count) in enumerate(
            zip(part.offset, part.extent)) if at != dim)
        rows.setdefault(key, []).append(part)
    for row in rows.values():
        row.sort(key=lambda part: part.offset[dim])
        run = [row[0]]
        for part in row[1:]:
            if run[-1].offset[dim] + run[-1].extent[dim] != part.offset[dim]:
                yield _one(dim, run)
                run = []
            run.append(part)
        yield _one(dim, run)


def _one(dim: int, run: list[Part]) -> Part:
    if len(run) == 1:
        return run[0]
    extent = list(run[0].extent)
    extent[dim] = sum(part.extent[dim] for part in run)
    return run[0]._replace(extent=tuple(extent), read=_Concatenation(dim, run))


class _Concatenation:
    def __init__(self, dim: int, parts: list[Part]) -> None:
        self._dim, self._parts = dim, parts

    def __call__(self) -> torch.Tensor:
        return torch.cat([part.read() for part in self._parts], self._dim)

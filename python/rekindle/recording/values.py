"""The origin of tensors in a recording: tensors of the checkpoint, and what loaders make of them.

A loader that stacks experts, or copies a tensor before it cuts it, makes a `Composite`. It has
pieces: boxes of it, each with the elements of a view of something else. `resolve` takes a composite
apart, down to views of the checkpoint's tensors.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, TypeAlias

import torch

from ..boxes import row_major
from .geometry import Dim, Ints, Lattice, lattice, split

# These conversions lose no value. So a second conversion gives the same as a direct one.
_WIDENS = {
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64), (torch.float16, torch.float64),
    (torch.float32, torch.float64)}


@dataclass(eq=False, slots=True)
class Source:
    """A tensor of the checkpoint."""
    name: str
    shape: Ints
    dtype: torch.dtype


@dataclass(eq=False, slots=True)
class Composite:
    """Memory that the loader has allocated, row-major in `shape`. Pieces do not overlap."""
    shape: Ints
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)
    # True: an operation that we do not follow wrote to the tensor.
    unknown: bool = False


@dataclass(eq=False, slots=True)
class Unknown:
    """The result of an operation that is not followed."""
    sources: frozenset[str]


Base: TypeAlias = "Source | Composite | Unknown"


class View(NamedTuple):
    """Elements of a base, as in torch.as_strided. `dtype`: the type as which their bits are read.
    """
    base: Base
    dtype: torch.dtype
    offset: int
    size: Ints
    stride: Ints


class Piece(NamedTuple):
    """The box at `start` of a composite has the elements of `view`, dimension by dimension."""
    start: Ints
    view: View


class Flow(NamedTuple):
    """Elements of a checkpoint's tensor (`offset`, dims[i][1]) for a parameter (`to`, dims[i][2]).
    """
    source: Source
    dtype: torch.dtype
    offset: int
    to: int
    dims: tuple[Dim, ...]


def frozen(view: View) -> View:
    """Returns the view of a copy of its base, because a composite may be written to later."""
    base = view.base
    if not isinstance(base, Composite):
        return view
    now = Composite(base.shape, base.dtype, list(base.pieces), base.unknown)
    return View(now, view.dtype, view.offset, view.size, view.stride)


class Untraceable(Exception):
    """A value that is not made only of the checkpoint's elements, or not in a way that we follow.
    """


def sources(base: Base) -> Iterator[str]:
    """Yields the names of the checkpoint's tensors that a value depends on."""
    if isinstance(base, Source):
        yield base.name
    elif isinstance(base, Unknown):
        yield from base.sources
    else:
        for piece in base.pieces:
            yield from sources(piece.view.base)


def write_piece(into: View, view: View) -> None:
    """Notes a copy into a composite. Untraceable: it is not a box of it, or overlaps an earlier
    piece in part.
    """
    base = into.base
    assert isinstance(base, Composite)
    start, order = _box_of(base, into)
    size = tuple(into.size[d] if d >= 0 else 1 for d in order)
    stride = tuple(view.stride[d] if d >= 0 else 0 for d in order)
    view = frozen(view)
    new = Piece(start, View(view.base, view.dtype, view.offset, size, stride))
    kept = []
    for piece in base.pieces:
        if not _overlap(piece, new):
            kept.append(piece)
        elif not _covers(new, piece):
            raise Untraceable
    base.pieces = [*kept, new]


def _box_of(base: Composite, view: View) -> tuple[Ints, list[int]]:
    """Returns the start of the view's box, and for each dimension of the base the view's dimension
    along it (-1: none).
    """
    found = lattice(base.shape, view.offset, view.size, view.stride)
    if found is None or view.dtype != base.dtype:
        raise Untraceable
    order = [-1] * len(base.shape)
    for atom in found.atoms:
        whole = view.size[atom.view_dim] == atom.size
        if atom.dim < 0 or atom.step != 1 or order[atom.dim] >= 0 or not whole:
            raise Untraceable
        order[atom.dim] = atom.view_dim
    return found.start, order


def _overlap(one: Piece, other: Piece) -> bool:
    return all(a < b + n and b < a + m for a, m, b, n in
               zip(one.start, one.view.size, other.start, other.view.size))


def _covers(one: Piece, other: Piece) -> bool:
    return all(a <= b and b + n <= a + m for a, m, b, n in
               zip(one.start, one.view.size, other.start, other.view.size))


def resolve(view: View, to: int, strides: Sequence[int], final: torch.dtype) -> list[Flow]:
    """Returns the origin of the elements of `view` in a copy to (`to`, `strides`) of a parameter of
    dtype `final`.

    Untraceable: not all of them come unchanged from the checkpoint, except for one conversion.
    """
    dims = tuple(zip(view.size, view.stride, strides))
    if isinstance(view.base, Source):
        return [Flow(view.base, view.dtype, view.offset, to, dims)]
    flows = list(_resolve(view.base, (view.dtype,), view.offset, to, dims))
    for _, types in flows:
        _check_conversions((*reversed(types), final))
    return [flow for flow, _ in flows]


def _resolve(base: Base, types: tuple[torch.dtype, ...], offset: int, to: int,
             dims: Sequence[Dim]) -> Iterator[tuple[Flow, tuple[torch.dtype, ...]]]:
    if isinstance(base, Source):
        yield Flow(base, types[-1], offset, to, tuple(dims)), types
        return
    if isinstance(base, Unknown) or base.unknown or types[-1] != base.dtype:
        raise Untraceable
    found = lattice(base.shape, offset, [d[0] for d in dims], [d[1] for d in dims])
    if found is None:
        raise Untraceable
    atoms = split(dims, found)
    whole = _in_one_piece(base, found)
    if whole is not None:
        piece, inner = whole
        yield from _resolve(piece.view.base, (*types, piece.view.dtype), inner, to, [
            (n, atom.step * piece.view.stride[atom.dim] if atom.dim >= 0 else 0, other)
            for atom, (n, _, other) in zip(found.atoms, atoms)])
        return
    if any(atom.step != 1 for atom in found.atoms):
        raise Untraceable
    along = [-1] * len(base.shape)
    for index, atom in enumerate(found.atoms):
        if along[atom.dim] >= 0:
            raise Untraceable
        along[atom.dim] = index
    missing = prod(d[0] for d in atoms)
    for piece in base.pieces:
        part = _part(piece, found.start, along, atoms, to)
        if part is not None:
            missing -= prod(d[0] for d in part[2])
            yield from _resolve(piece.view.base, (*types, piece.view.dtype), *part)
    if missing:
        raise Untraceable


def _in_one_piece(base: Composite, found: Lattice) -> tuple[Piece, int] | None:
    """Returns the piece with all elements of a view, and their start in the piece's base; None: no
    piece has them all.
    """
    extent = found.extent(len(base.shape))
    for piece in base.pieces:
        view = piece.view
        if all(a <= b and b + n <= a + m for a, m, b, n in
               zip(piece.start, view.size, found.start, extent)):
            return piece, view.offset + sum(
                (b - a) * s for a, b, s in zip(piece.start, found.start, view.stride))
    return None


def _part(piece: Piece, start: Ints, along: list[int], atoms: list[Dim],
          to: int) -> tuple[int, int, list[Dim]] | None:
    """Returns the part of the atoms' box in the piece: (offset in its view's base, offset in the
    parameter, dimensions); None: no element.
    """
    view = piece.view
    offset, dims = view.offset, list(atoms)
    for k, index in enumerate(along):
        count = atoms[index][0] if index >= 0 else 1
        low = max(start[k], piece.start[k])
        high = min(start[k] + count, piece.start[k] + view.size[k])
        if low >= high:
            return None
        offset += (low - piece.start[k]) * view.stride[k]
        if index >= 0:
            to += (low - start[k]) * atoms[index][2]
            dims[index] = (high - low, view.stride[k], atoms[index][2])
    return offset, to, dims


def _check_conversions(types: Sequence[torch.dtype]) -> None:
    """Raises Untraceable unless converting step by step is the same as converting at once."""
    if len(types) == 2:
        return
    steps = [t for i, t in enumerate(types) if i == 0 or types[i - 1] != t]
    for first, second in zip(steps, steps[1:]):
        if second != steps[-1] and (first, second) not in _WIDENS:
            raise Untraceable


def copied(view: View, dtype: torch.dtype, stride: Sequence[int]) -> Composite:
    """Returns a copy of the view in new memory, which torch has laid out with `stride`."""
    order = sorted(range(len(view.size)), key=lambda d: -stride[d])
    size = tuple(view.size[d] for d in order)
    if tuple(stride[d] for d in order if view.size[d] > 1) != tuple(
            s for s, n in zip(row_major(size), size) if n > 1):
        raise Untraceable
    base = Composite(size, dtype)
    view = frozen(view)
    moved = View(view.base, view.dtype, view.offset, size, tuple(view.stride[d] for d in order))
    base.pieces.append(Piece((0,) * len(size), moved))
    return base


def joined(views: Sequence[View], dim: int, shape: Ints, dtype: torch.dtype) -> Composite:
    """Returns torch.cat of the views along `dim`."""
    base, at = Composite(shape, dtype), 0
    for view in views:
        start = tuple(at if k == dim else 0 for k in range(len(shape)))
        base.pieces.append(Piece(start, frozen(view)))
        at += view.size[dim]
    return base

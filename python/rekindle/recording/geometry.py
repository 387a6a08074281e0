"""Sets of elements that a tensor view touches: strided sets, and the boxes around them.

A view is (offset, size, stride) in elements of a row-major tensor, as in torch.as_strided. It
determines exactly which elements are read in which order, for any chain of narrow, transpose,
reshape … that made it.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ..boxes import row_major

Ints = tuple[int, ...]
# The size, the stride in one view, and the stride in the other view.
Dim = tuple[int, int, int]


class Atom(NamedTuple):
    """`size` elements of view dimension `view_dim`, `step` apart, along dimension `dim` of the
    tensor.
    """
    view_dim: int
    size: int
    dim: int
    step: int


class Lattice(NamedTuple):
    """A view in coordinates of the tensor: its start and its steps. The atoms of a dimension go
    from large to small.
    """
    start: Ints
    atoms: tuple[Atom, ...]

    def extent(self, dims: int) -> Ints:
        """Returns the size of the smallest box around it."""
        extent = [1] * dims
        for atom in self.atoms:
            if atom.dim >= 0:
                extent[atom.dim] += (atom.size - 1) * atom.step
        return tuple(extent)


def lattice(shape: Sequence[int], offset: int, size: Sequence[int],
            stride: Sequence[int]) -> Lattice | None:
    """Returns the view in coordinates of a row-major tensor. None: a step crosses rows unevenly.

    An atom of dimension -1 repeats one element (expand). The view must not be empty.
    """
    rows = row_major(shape)
    start, rest = [], offset
    for step in rows:
        start.append(rest // step)
        rest %= step
    if tuple(stride) == rows and all(a + n <= m for a, n, m in zip(start, size, shape)):
        return Lattice(tuple(start), tuple([Atom(k, n, k, 1) for k, n in enumerate(size) if n > 1]))
    used = list(start)
    atoms: list[Atom] = []
    for view_dim, (count, step) in enumerate(zip(size, stride)):
        parts = _atoms(shape, rows, start, used, view_dim, count, step)
        if parts is None:
            return None
        atoms.extend(parts)
    return Lattice(tuple(start), tuple(atoms))


def _atoms(shape: Sequence[int], rows: Ints, start: list[int], used: list[int], view_dim: int,
           count: int, stride: int) -> list[Atom] | None:
    """Returns the atoms of one view dimension, several if it spans several dimensions (flatten)."""
    parts: list[Atom] = []
    while count > 1:
        if stride == 0:
            parts.append(Atom(view_dim, count, -1, 0))
            break
        dim = next((k for k, step in enumerate(rows) if step <= stride and shape[k] > 1), None)
        if dim is None or stride % rows[dim]:
            return None
        step = stride // rows[dim]
        last = used[dim] + (count - 1) * step
        if last < shape[dim]:
            used[dim] = last
            parts.append(Atom(view_dim, count, dim, step))
            break
        inner, uneven = divmod(shape[dim], step)
        if uneven or used[dim] != start[dim] or start[dim] >= step or count % inner or inner == 1:
            return None
        used[dim] += (inner - 1) * step
        parts.append(Atom(view_dim, inner, dim, step))
        count, stride = count // inner, rows[dim] * shape[dim]
    parts.reverse()
    return parts


def rows_around(shape: Sequence[int], offset: int, size: Sequence[int],
                stride: Sequence[int]) -> tuple[Ints, Ints]:
    """Returns (offset, extent) of a box around a view that is no lattice and not empty."""
    low, high = offset, offset + sum((n - 1) * s for n, s in zip(size, stride))
    start, extent, differs = [], [], False
    for count, step in zip(shape, row_major(shape)):
        start.append(0 if differs else low // step)
        extent.append(count if differs else high // step - low // step + 1)
        differs = differs or low // step != high // step
        low, high = low % step, high % step
    return tuple(start), tuple(extent)


def inside(shape: Sequence[int], box: tuple[Ints, Ints], offset: int, size: Sequence[int],
           stride: Sequence[int]) -> tuple[int, Ints] | None:
    """Returns (offset, stride) of the view in the row-major memory of a box around it.

    None when a view dimension runs through several dimensions of a box that is narrower than the
    tensor.
    """
    start, extent = box
    first_wide = next((k for k, n in enumerate(extent) if n > 1), len(shape))
    if tuple(extent[first_wide + 1:]) == tuple(shape[first_wide + 1:]):
        return offset - sum(a * b for a, b in zip(start, row_major(shape))), tuple(stride)
    found = lattice(shape, offset, size, stride)
    if found is None or len({atom.view_dim for atom in found.atoms}) != len(found.atoms):
        return None
    rows, inner = row_major(extent), [0] * len(size)
    for atom in found.atoms:
        inner[atom.view_dim] = atom.step * rows[atom.dim] if atom.dim >= 0 else 0
    return sum((a - b) * r for a, b, r in zip(found.start, start, rows)), tuple(inner)


def split(dims: Sequence[Dim], found: Lattice) -> list[Dim]:
    """Splits the dimensions of two views, so that each is one atom of the first view's lattice."""
    if len({atom.view_dim for atom in found.atoms}) == len(found.atoms):
        return [dims[atom.view_dim] for atom in found.atoms]
    parts: list[Dim] = []
    for index, atom in enumerate(found.atoms):
        _, one, other = dims[atom.view_dim]
        below = prod(a.size for a in found.atoms[index + 1:] if a.view_dim == atom.view_dim)
        parts.append((atom.size, one * below, other * below))
    return parts


def coalesce(dims: Sequence[Dim]) -> list[Dim]:
    """Merges dimensions (size, one stride, another stride) that are contiguous in both views, and
    drops those of size 1.
    """
    merged: list[Dim] = []
    for count, one, other in dims:
        if count == 1:
            continue
        if merged:
            outer, outer_one, outer_other = merged[-1]
            if outer_one == count * one and outer_other == count * other:
                merged[-1] = (outer * count, one, other)
                continue
        merged.append((count, one, other))
    return merged


def contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the view is row-major without gaps."""
    step = 1
    for count, s in zip(reversed(size), reversed(stride)):
        if count != 1 and s != step:
            return False
        step *= count
    return True

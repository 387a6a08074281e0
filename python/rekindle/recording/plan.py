"""Plans: what to fetch, and where it goes. As rows of integers, 100,000 are read in milliseconds.
"""
from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from ..errors import CorruptError
from .geometry import Ints

_MAGIC = b"rekindle plan 2\n"
_DIGEST = 16  # bytes


class Move(NamedTuple):
    """Elements of a box of a checkpoint's tensor that go to a parameter.

    All numbers are in elements. `source_offset` and `source_stride` select elements of the box,
    which is row-major. `offset` (from the parameter's first element) and `stride` select elements
    of the parameter. `size` has the dimensions of both.
    """
    name: str
    box_offset: Ints
    box_extent: Ints
    source_offset: int
    source_stride: Ints
    parameter: str
    offset: int
    size: Ints
    stride: Ints
    # torch's name of the dtype as which the box is read. The value is then converted to the
    # parameter's dtype.
    dtype: str

    @property
    def direct(self) -> bool:
        """Whether the whole box goes unchanged to contiguous memory."""
        return (self.source_offset == 0 and len(self.size) <= 1
                and (not self.size or (self.source_stride == (1,) and self.stride == (1,)))
                and _count(self.size) == _count(self.box_extent))


class Constant(NamedTuple):
    """A value that the loader writes to elements of a parameter, before any move."""
    parameter: str
    offset: int
    size: Ints
    stride: Ints
    value: float | int | bool


class Entry(NamedTuple):
    """A tensor that the plan reads, as the catalog had it."""
    name: str
    shape: Ints
    dtype: str  # a name of torch's


def _count(size: Sequence[int]) -> int:
    count = 1
    for n in size:
        count *= n
    return count


@dataclass(frozen=True)
class Plan:
    """What one rank reads, as integers and a table of names. `moves()` and others return objects.
    """
    names: tuple[str, ...]
    rows: array[int]
    starts: array[int]  # of moves in `rows`
    entry_rows: array[int]
    opaque_rows: array[int]
    loaded_rows: array[int] | None
    constants: tuple[Constant, ...]
    # False: the plan does not repeat everything that the loader did, so it must not be cached.
    replayable: bool

    def __len__(self) -> int:
        """Number of moves."""
        return len(self.starts)

    @property
    def opaque(self) -> tuple[str, ...]:
        """Tensors to fetch whole and give to the engine's loader, in this order."""
        return tuple(self.names[i] for i in self.opaque_rows)

    @property
    def loaded(self) -> frozenset[str] | None:
        """The parameters that the loader reported as loaded; None: it reports none."""
        if self.loaded_rows is None:
            return None
        return frozenset(self.names[i] for i in self.loaded_rows)

    @property
    def entries(self) -> list[Entry]:
        """The tensors that the plan reads, each once."""
        found, at, rows = [], 0, self.entry_rows
        while at < len(rows):
            end = at + 3 + rows[at + 2]
            name, dtype = self.names[rows[at]], self.names[rows[at + 1]]
            found.append(Entry(name, tuple(rows[at + 3:end]), dtype))
            at = end
        return found

    def moves(self) -> Iterator[Move]:
        """Yields every move, in the order of the recording."""
        for start in self.starts:
            yield self._move(start)

    def _move(self, at: int) -> Move:
        rows, names = self.rows, self.names
        name, parameter, dtype, dims, inner, source_offset, offset = rows[at:at + 7]
        at += 7
        cuts = [at]
        for length in (dims, dims, inner, inner, inner):
            cuts.append(cuts[-1] + length)
        parts = [tuple(rows[a:b]) for a, b in zip(cuts, cuts[1:])]
        return Move(names[name], parts[0], parts[1], source_offset, parts[3], names[parameter],
                    offset, parts[2], parts[4], names[dtype])


def pack(moves: Iterable[Move], entries: Iterable[Entry], opaque: Iterable[str],
         constants: Iterable[Constant] = (), loaded: Iterable[str] | None = None,
         replayable: bool = True) -> Plan:
    """Returns a plan of these moves."""
    names: dict[str, int] = {}

    def index(name: str) -> int:
        return names.setdefault(name, len(names))
    rows, starts, entry_rows = array("q"), array("q"), array("q")
    for m in moves:
        starts.append(len(rows))
        rows.extend((index(m.name), index(m.parameter), index(m.dtype), len(m.box_offset),
                     len(m.size), m.source_offset, m.offset, *m.box_offset, *m.box_extent, *m.size,
                     *m.source_stride, *m.stride))
    for entry in entries:
        entry_rows.extend((index(entry.name), index(entry.dtype), len(entry.shape), *entry.shape))
    opaque_rows = array("q", map(index, opaque))
    loaded_rows = None if loaded is None else array("q", map(index, sorted(loaded)))
    return Plan(tuple(names), rows, starts, entry_rows, opaque_rows, loaded_rows,
                tuple(constants), replayable)


def _digest(body: bytes | memoryview) -> bytes:
    """Returns a SHA-256, for which CPUs have instructions. It is most of the time to read a plan.
    """
    return sha256(body).digest()[:_DIGEST]


def _narrowed(section: array[int]) -> array[int]:
    """Returns a section with half of the bytes, if its numbers fit."""
    try:
        return array("i", section)
    except OverflowError:
        return section


def to_bytes(plan: Plan, fingerprint: str) -> bytes:
    """Returns the plan as a file: magic, digest, a line of lengths, names, integers, in this
    machine's byte order. ValueError for a name with a NUL.
    """
    text = "\0".join(plan.names).encode()
    if text.count(b"\0") != max(len(plan.names) - 1, 0):
        raise ValueError("a name has a NUL character inside")
    loaded = plan.loaded_rows
    sections = [_narrowed(section) for section in (
        plan.rows, plan.starts, plan.entry_rows, plan.opaque_rows, loaded or array("q"))]
    head = json.dumps({
        "fingerprint": fingerprint, "constants": plan.constants, "replayable": plan.replayable,
        "says_loaded": loaded is not None, "text": len(text),
        "sections": [(section.typecode, len(section)) for section in sections]}).encode()
    body = b"".join((head, b"\n", text, *(section.tobytes() for section in sections)))
    return b"".join((_MAGIC, _digest(body), body))


def from_bytes(data: bytes, fingerprint: str) -> Plan:
    """Reads a plan of `to_bytes`. CorruptError: it is damaged, or has another fingerprint."""
    start = len(_MAGIC) + _DIGEST
    body = memoryview(data)[start:]
    if not data.startswith(_MAGIC) or _digest(body) != data[len(_MAGIC):start]:
        raise CorruptError("a cached plan is damaged, or of another version")
    at = data.index(b"\n", start) + 1
    head = json.loads(data[start:at])
    if head["fingerprint"] != fingerprint:
        raise CorruptError("a cached plan has another fingerprint")
    names = data[at:at + head["text"]].decode().split("\0")
    at += head["text"]
    sections = []
    for kind, count in head["sections"]:
        section = array(kind)
        section.frombytes(memoryview(data)[at:at + section.itemsize * count])
        sections.append(section)
        at += section.itemsize * count
    rows, starts, entry_rows, opaque_rows, loaded_rows = sections
    constants = tuple(Constant(p, o, tuple(n), tuple(s), v) for p, o, n, s, v in head["constants"])
    return Plan(tuple(names), rows, starts, entry_rows, opaque_rows,
                loaded_rows if head["says_loaded"] else None, constants, head["replayable"])

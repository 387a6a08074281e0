"""Reads a session's list of tensors from the library's arrays, and finds tensors by name or box.

A session may have tens of thousands of tensors, and a load begins only when all names and shapes
are known. So they are read a column at a time. Columns that load_into does not need are read at
their first use.
"""
from __future__ import annotations

import array
import ctypes
import functools
import struct
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from . import _abi
from .boxes import Box, TensorInfo
from .errors import InvalidError, StaleError

if TYPE_CHECKING:
    from ._native import Native

_WORDS = _abi.TENSOR.size // 8
Dims = tuple[int, ...]


class Columns:
    """The columns of `count` rk_tensors at an address. A property reads the library's memory at its
    first use, so that memory must still exist then."""

    def __init__(self, first: int, count: int, dtypes: dict[int, str]) -> None:
        """`dtypes`: maps addresses to the dtype names known so far. New names are added to it."""
        self.first, self.count = first, count
        words = array.array("Q")
        words.frombytes((ctypes.c_char * (count * _abi.TENSOR.size)).from_address(first))
        self.name_pointers = words[0::_WORDS]
        self._dtype_pointers = words[1::_WORDS]
        self.ranks = array.array("I", words[2::_WORDS].tobytes())[0::2]  # without padding
        self._shape_pointers = words[3::_WORDS]
        self.offset_pointers = words[4::_WORDS]
        self._full_pointers = words[5::_WORDS]
        self.data = words[6::_WORDS]
        self.nbytes = words[7::_WORDS]
        self._dtypes = dtypes

    @functools.cached_property
    def _text(self) -> str:
        """All names, with a NUL before each."""
        pointers = (ctypes.c_char_p * self.count).from_buffer(self.name_pointers)
        names = cast("list[bytes]", pointers[:])  # none is null
        return b"\0".join([b"", *names]).decode()

    @functools.cached_property
    def names(self) -> list[str]:
        return self._text.split("\0")[1:]

    def beginning_with(self, prefix: str) -> list[int]:
        """Returns the indexes of names with a prefix. Searches all names at once, as few match."""
        found, prefix, text, last = [], f"\0{prefix}", self._text, 0
        index, at = 0, text.find(prefix)
        while at >= 0:
            index += text.count("\0", last, at)
            found.append(index)
            last, at = at, text.find(prefix, at + 1)
        return found

    @functools.cached_property
    def dtypes(self) -> list[str]:
        different = set(self._dtype_pointers)
        for pointer in different - self._dtypes.keys():
            self._dtypes[pointer] = ctypes.string_at(pointer).decode()
        if len(different) == 1:
            return [self._dtypes[different.pop()]] * self.count
        return list(map(self._dtypes.__getitem__, self._dtype_pointers))

    @functools.cached_property
    def shapes(self) -> list[Dims]:
        return self._dims(self._shape_pointers)

    @functools.cached_property
    def offsets(self) -> list[Dims]:
        return self._dims(self.offset_pointers)

    @functools.cached_property
    def full_shapes(self) -> list[Dims]:
        return self._dims(self._full_pointers)

    def infos(self) -> Iterator[TensorInfo]:
        return map(TensorInfo, self.names, self.dtypes, self.shapes, self.offsets,
                   self.full_shapes, self.nbytes)

    def _dims(self, pointers: "array.array[int]") -> list[Dims]:
        """Returns the list at each pointer. Equal lists mostly share an address: it is read
        once."""
        known = {one: struct.unpack(f"@{one[1]}Q", ctypes.string_at(one[0], 8 * one[1]))
                 for one in set(zip(pointers, self.ranks))}
        by_pointer = {one[0]: dims for one, dims in known.items()}
        if len(by_pointer) == len(known):
            return list(map(by_pointer.__getitem__, pointers))
        return list(map(known.__getitem__, zip(pointers, self.ranks)))


class Listing:
    """The rk_tensors of a session, by index. `files` and `tensors` are the indexes of each kind."""

    def __init__(self, columns: Columns, native: "Native") -> None:
        """The caller is within native.using(). Reads names, dtypes and shapes. Other columns are
        read at the first use of `infos` or `offsets`."""
        self.columns, self.first = columns, columns.first
        self._native = weakref.ref(native)
        columns.dtypes, columns.shapes
        self.files = columns.beginning_with(_abi.FILE_PREFIX)
        self.tensors: Sequence[int] = range(columns.count)
        if self.files:
            files = set(self.files)
            self.tensors = [index for index in self.tensors if index not in files]

    @functools.cached_property
    def infos(self) -> list[TensorInfo]:
        """All entries. StaleError: the session has ended before the first use."""
        with self._using():
            return list(self.columns.infos())

    @functools.cached_property
    def offsets(self) -> list[Dims]:
        """All offsets. StaleError as for `infos`."""
        with self._using():
            return self.columns.offsets

    def _using(self) -> Any:
        native = self._native()
        if native is None:
            raise StaleError("the session was closed")
        return native.using()

    @functools.cached_property
    def repeated(self) -> set[str]:
        """Names of tensors with several boxes."""
        if len(set(self.columns.names)) == self.columns.count:
            return set()
        return {name for name, indices in self._by_name.items() if len(indices) > 1}

    def find(self, key: str | Box) -> list[int]:
        """Returns the entries for a key of load_into: one, none, or several for a box that was
        requested repeatedly. InvalidError: the key has only a name, and the tensor has several
        boxes."""
        box = key if isinstance(key, Box) else Box(key)
        if box.offset or box.extent:
            return self._by_box.get((box.tensor, tuple(box.offset), tuple(box.extent)), [])
        named = self._by_name.get(box.tensor, [])
        if len(named) > 1:
            raise InvalidError(f"the session has {len(named)} boxes of '{box.tensor}': use a Box "
                               "for each as the key")
        return named

    @functools.cached_property
    def _by_box(self) -> dict[tuple[str, Dims, Dims], list[int]]:
        found: dict[tuple[str, Dims, Dims], list[int]] = {}
        columns, offsets = self.columns, self.offsets
        for index in self.tensors:
            key = (columns.names[index], offsets[index], columns.shapes[index])
            found.setdefault(key, []).append(index)
        return found

    @functools.cached_property
    def _by_name(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index in self.tensors:
            found.setdefault(self.columns.names[index], []).append(index)
        return found


class InfoReader:
    """Reads rk_tensor arrays of one session. Their strings do not move while the session lives."""

    def __init__(self) -> None:
        self._dtypes: dict[int, str] = {}

    def columns(self, pointer: int, count: int) -> Columns:
        return Columns(pointer, count, self._dtypes)

    def read(self, pointer: int, count: int) -> Iterator[tuple[TensorInfo, int, int, int]]:
        """Returns (info, data, pointer to the name, pointer to the offset) of each tensor."""
        columns = self.columns(pointer, count)
        return zip(columns.infos(), columns.data, columns.name_pointers, columns.offset_pointers)

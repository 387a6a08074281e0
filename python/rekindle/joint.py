"""Publishes one version from many ranks, on any hosts: each rank gives its boxes of the tensors."""
from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any

from . import _abi
from ._host_copies import HostCopies
from ._native import milliseconds
from ._parts import Part
from ._publishing import JointPublication, Place
from .errors import InvalidError, StaleError
from .publication import CONNECT_S, PathLike, Published, _Source, check_tensor_name


def publisher(model_version: str, *, rank: int, world: int,
              agent: PathLike | None = None) -> "Publisher":
    """Returns this rank's side of the joint publication of "qwen3@42" by `world` ranks.

        with rekindle.publisher("qwen3@42", rank=3, world=8) as p:
            p.add("layer.weight", shard, shape=(4096, 4096), offset=(1536, 0))
            p.commit()

    `agent`: the store of this host's agent; defaults to $REKINDLE_STORE. All ranks of a host use
    the same agent, and the agents of all hosts have the same coordinator."""
    return Publisher(model_version, rank, world, agent)


class Publisher:
    """One rank of a joint publication. For one thread."""

    def __init__(self, model_version: str, rank: int, world: int, agent: PathLike | None) -> None:
        model, _, version = model_version.rpartition("@")
        if not model or not version.isdecimal():
            raise InvalidError(f"publish {model_version!r}? Give a model and a version, as "
                               "\"qwen3@42\"")
        if not 0 <= rank < world:
            raise InvalidError(f"publish {model_version}: rank {rank} is not in a world of {world}")
        self.model_version, self.rank, self.world = model_version, rank, world
        self._agent = agent
        self._parts: list[Part] = []
        self._over = False

    def add(self, name: str, tensor: Any, *, shape: tuple[int, ...] | None = None,
            offset: tuple[int, ...] | None = None) -> None:
        """Adds a tensor of torch, on any device, or a numpy array: this rank's box of tensor
        `name`.

        `shape`: of the whole tensor; `offset`: of the box in it, in elements. Without both, the
        rank has the whole tensor. Do not change the tensor before commit() returns. Ranks may have
        the same elements; their bytes must be equal. Raises InvalidError."""
        check_tensor_name(name)
        source = _Source(name, tensor)
        if (shape is None) != (offset is None):
            raise InvalidError(f"'{name}': give shape and offset, or neither")
        whole = source.shape if shape is None else tuple(shape)
        at = (0,) * len(whole) if offset is None else tuple(offset)
        if not len(whole) == len(at) == len(source.shape):
            raise InvalidError(f"'{name}': shape {whole} and offset {at} do not have the dimensions "
                               f"of the tensor {source.shape}")
        self.add_part(Part(name, source.dtype, whole, at, source.shape, lambda: tensor))

    def add_part(self, part: Part) -> None:
        """Adds a box whose tensor is made when it is written."""
        self._check_open()
        self._parts.append(part)

    def file(self, name: str, data: bytes) -> None:
        """Adds a small file beside the tensors: "config.json". One rank is enough."""
        self._check_open()
        source = _Source(_abi.FILE_PREFIX + name, memoryview(data).cast("B"))
        self._parts.append(Part(source.name, source.dtype, source.shape, (0,) * len(source.shape),
                                source.shape, lambda: memoryview(data).cast("B")))

    def commit(self, timeout: float | None = 600.0) -> Published:
        """Declares everything that was added, waits for the other ranks, writes, and waits until
        the version is ready. Returns the tensors and bytes that this rank had.

        `timeout`: seconds for each of the two waits. A rank that died may start again and commit
        the same boxes while the others wait. Raises InvalidError (ranks disagree about a tensor,
        leave elements out, or have different bytes of the same elements), TimeoutError (naming the
        missing ranks), DeniedError (the version exists with other bytes, or another process has
        this rank), PeerLostError (a host of the publication is gone: publish again on all
        ranks)."""
        self._check_open()
        milliseconds(timeout)
        self._over = True
        publication = JointPublication(self.model_version, self.rank, self.world, self._parts,
                                       self._agent, CONNECT_S, timeout)
        try:
            places = [publication.places(index) for index in range(len(self._parts))]
            with HostCopies(publication.open_copies) as copies:
                # In the order of the segments, so that the agent gets one after the other.
                for index in sorted(range(len(places)), key=lambda i: _first_address(places[i])):
                    _write(self._parts[index], places[index], copies)
                copies.finish()
            publication.commit(timeout)
        finally:
            publication.end()
        model, _, version = self.model_version.rpartition("@")
        tensors = {part.name for part in self._parts if not part.name.startswith(_abi.FILE_PREFIX)}
        return Published(model, int(version), len(tensors), self._nbytes())

    def _nbytes(self) -> int:
        from math import prod

        from .dtypes import itemsize
        return sum(prod(part.extent) * itemsize(part.dtype) for part in self._parts
                   if not part.name.startswith(_abi.FILE_PREFIX))

    def _check_open(self) -> None:
        if self._over:
            raise StaleError(f"the publication of {self.model_version} is over: make another one")

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._over = True


def _first_address(places: list[Place]) -> int:
    return min((ctypes.addressof(place.memory) for place in places), default=0)


def _write(part: Part, places: list[Place], copies: HostCopies) -> None:
    if not places:
        return
    tensor = part.read()
    if tuple(tensor.shape) != part.extent:
        raise InvalidError(f"{part.described()} came with shape {tuple(tensor.shape)}")
    for place in places:
        box = tuple(slice(at - start, at - start + count) for at, start, count
                    in zip(place.offset, part.offset, place.extent))
        copies.add(tensor if place.extent == part.extent else tensor[box], place.memory)

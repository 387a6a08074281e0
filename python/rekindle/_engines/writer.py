"""Publishes tensors that come one by one: writes them into segments once all are announced."""
from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import torch

from .. import dtypes
from .._publishing import Announced, Publication
from ..errors import InvalidError

CONNECT_S = 10.0


class Spec(NamedTuple):
    """The announcement of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Writer:
    """Writes every tensor in `specs` of a version once, and then commits it.

    A context manager. It abandons a version that is not committed, and leaves nothing behind."""

    def __init__(self, model_version: str, specs: Sequence[Spec], agent: str | None = None) -> None:
        self._index = {spec.name: index for index, spec in enumerate(specs)}
        if len(self._index) != len(specs):
            raise InvalidError(f"publish {model_version}: a name comes twice")
        self._specs = list(specs)
        self._missing = set(self._index)
        announced = [Announced(name, dtypes.dtype_name(dtype), shape)
                     for name, dtype, shape in specs]
        self._publication = Publication(model_version, announced, agent, CONNECT_S)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a tensor from any device. InvalidError: it is not as announced."""
        index = self._index.get(name)
        if index is None or name not in self._missing:
            raise InvalidError(f"'{name}' was not announced" if index is None else
                               f"'{name}' comes twice")
        spec = self._specs[index]
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise InvalidError(f"'{name}' is {tensor.dtype} {tuple(tensor.shape)}, announced were "
                               f"{spec.dtype} {spec.shape}")
        if spec.shape.count(0) == 0:
            self._place(index).copy_(tensor.detach())
        self._missing.discard(name)

    def written(self, name: str) -> torch.Tensor:
        """Returns a copy of a written tensor, in host memory."""
        spec = self._specs[self._index[name]]
        if 0 in spec.shape:
            return torch.empty(spec.shape, dtype=spec.dtype)
        return self._place(self._index[name]).clone()

    def _place(self, index: int) -> torch.Tensor:
        spec = self._specs[index]
        place = torch.frombuffer(self._publication.place(index), dtype=torch.uint8)
        return place.view(spec.dtype).view(spec.shape)

    def commit(self, timeout: float = 600.0) -> None:
        """Makes the version ready. InvalidError names a tensor that was not written. DeniedError:
        the version exists with other bytes."""
        if self._missing:
            raise InvalidError(f"'{min(self._missing)}' was announced and did not come "
                               f"({len(self._missing)} in all)")
        self._publication.commit(timeout)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._publication.end()

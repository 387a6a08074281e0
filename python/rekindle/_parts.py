"""The data type between a rank's tensors and a joint publication."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Part(NamedTuple):
    """One rank's box of a tensor of the version."""

    name: str  # in the checkpoint
    dtype: str  # as in safetensors: "BF16"
    shape: tuple[int, ...]  # of the whole tensor
    # The rank's box, in elements of the whole tensor.
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    # Returns a tensor of exactly `extent`, on any device, perhaps not contiguous. The publication
    # calls it once, when it writes the part. Conversions therefore run one by one, and each result
    # is freed before the next.
    read: Callable[[], Any]

    @property
    def is_empty(self) -> bool:
        """Whether the rank has nothing of the tensor. A tensor without elements is not empty in
        this sense: it is published, too."""
        return 0 in self.extent and 0 not in self.shape

    def described(self) -> str:
        """Returns text for a message: "'w' [0:4, 8:16]"."""
        ranges = ", ".join(f"{start}:{start + count}"
                           for start, count in zip(self.offset, self.extent))
        return f"'{self.name}' [{ranges}]"


def nothing_of(name: str, dtype: str, shape: tuple[int, ...]) -> Part:
    """Returns a part without elements. It tells the rules for names that the tensor exists, on a
    rank that has nothing of it. It is never published."""
    none = (0,) * len(shape)
    return Part(name, dtype, shape, none, none, _never)


def _never() -> Any:
    raise AssertionError("an empty part is never read")

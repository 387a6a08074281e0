"""From the tensors of a rank to its parts of the whole tensors, without communication.

- A DTensor knows its mesh and its placements: its parts are the boxes that the rank has.
- A parameter of FSDP1 is a range of a flat tensor: its parts are the boxes of the range.
- A plain tensor is a part of what `layout` says, otherwise it is whole: a replica on each rank.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional, Union

import torch

from .. import _dense
from .._parts import Part, nothing_of
from .._targets import items_of
from ..errors import InvalidError
from . import flat
from .placements import local_boxes

Source = Union[torch.nn.Module, Mapping[str, Any], Sequence[Part]]
# The shape of the whole tensor, and the offset of the rank's tensor in it. None: it is whole.
Place = Optional["tuple[tuple[int, ...], tuple[int, ...]]"]
Layout = Union[Callable[[str, torch.Tensor], Place], Mapping[str, Place]]


def named_parts(source: Source, layout: Layout | None = None) -> list[Part]:
    """Returns this rank's parts of a module's parameters and persistent buffers, or of a mapping
    of names to tensors, or parts as they are. A tensor of which the rank has nothing gives one
    empty part.

    `layout`: for plain tensors, a function of name and tensor, or a mapping of names: returns the
    shape of the whole tensor and the offset of the rank's tensor in it; None: the tensor is whole.
    InvalidError names the tensor that cannot be published and says what to do."""
    parts, tensors = _contents(source)
    place = _by_name(layout, tensors) if isinstance(layout, Mapping) else layout
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidError(f"'{name}' is a {type(tensor).__name__}, not a torch tensor: remove "
                               "it from the mapping")
        parts += _tensor_parts(name, tensor, place)
    return parts


def _contents(source: Any) -> tuple[list[Part], dict[str, Any]]:
    """Returns parts that are known, and tensors by name."""
    if flat.has_flat_shards(source):
        return flat.module_parts(source)
    if isinstance(source, Mapping):
        return [], dict(source)
    if isinstance(source, torch.nn.Module):
        return [], items_of(source)
    if isinstance(source, Sequence) and all(isinstance(one, Part) for one in source):
        return list(source), {}
    raise InvalidError(f"publish a {type(source).__name__}? Give a module, a mapping of names to "
                       "tensors, or parts")


def _by_name(layout: Mapping[str, Place],
             tensors: Mapping[str, Any]) -> Callable[[str, torch.Tensor], Place]:
    for name in layout.keys() - tensors.keys():
        raise InvalidError(f"layout has '{name}', which the model has not")
    return lambda name, _: layout.get(name)


def _tensor_parts(name: str, tensor: torch.Tensor,
                  layout: Callable[[str, torch.Tensor], Place] | None) -> list[Part]:
    if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
        return list(_distributed(name, tensor)) or [
            nothing_of(name, _dense.dtype_name(name, tensor.dtype), tuple(tensor.shape))]
    _dense.check(name, tensor)
    dtype, extent = _dense.dtype_name(name, tensor.dtype), tuple(tensor.shape)
    place = layout(name, tensor) if layout is not None else None
    if place is None:
        return [Part(name, dtype, extent, (0,) * len(extent), extent, tensor.detach)]
    shape, offset = (tuple(map(int, one)) for one in place)
    if not (len(shape) == len(offset) == len(extent)) or any(
            start < 0 or start + count > size for start, count, size in zip(offset, extent, shape)):
        raise InvalidError(f"layout puts '{name}', of shape {list(extent)}, at {list(offset)} of "
                           f"{list(shape)}, where it does not fit")
    if 0 in extent and 0 not in shape:
        return [nothing_of(name, dtype, shape)]
    return [Part(name, dtype, shape, offset, extent, tensor.detach)]


def _distributed(name: str, tensor: Any) -> Iterator[Part]:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        # The rank is not in this tensor's mesh.
        return
    shape, local = tuple(tensor.shape), _local(tensor)
    _dense.check(name, local)
    dtype = _dense.dtype_name(name, tensor.dtype)
    if 0 in shape:
        yield Part(name, dtype, shape, (0,) * len(shape), shape, lambda: local.new_empty(shape))
        return
    for box in local_boxes(name, shape, local.shape, tuple(mesh.shape), coordinate,
                           tensor.placements):
        yield Part(name, dtype, shape, box.offset, box.extent, _Local(tensor, box.at, box.extent))


class _Local:
    """Reads a box of a DTensor's local tensor."""

    def __init__(self, tensor: Any, at: tuple[int, ...], extent: tuple[int, ...]) -> None:
        self._tensor, self._at, self._extent = tensor, at, extent

    def __call__(self) -> torch.Tensor:
        ranges = tuple(slice(start, start + count) for start, count in zip(self._at, self._extent))
        return _local(self._tensor)[ranges]


def _local(tensor: Any) -> torch.Tensor:
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local.detach()

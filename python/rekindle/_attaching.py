"""Converts the arguments of `attach` to rk_attach_options."""
from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Union

from . import _abi
from ._device import Device
from ._native import Native, milliseconds, text
from .boxes import Box
from .errors import InvalidError

# The longest time of one try when the caller gives no deadline.
ATTACH_PATIENCE_S = 10.0
Shard = Union[None, str, Iterable[Union[Box, str]]]
Spec = Union[None, Mapping[str, Any], str, "os.PathLike[str]"]


class Request(NamedTuple):
    """What to attach to. None stands for the default of the C ABI."""

    model: str
    shard: str | None = None
    boxes: tuple[Box, ...] = ()
    spec: str | None = None
    instance: str | None = None
    generation: int = 0
    rank: int = 0
    world: int = 1
    group: str | None = None
    fallback_dir: str | os.PathLike[str] | None = None
    device: Device | None = None
    bucket_bytes: int = 0
    staged: bool = False
    resident_key: str | None = None
    resident_shared: bool = False


def model_version(model: str, version: str | int | None = "latest") -> str:
    """Returns "qwen3@41" for ("qwen3", 41), and the name alone for version "latest" or None."""
    if version in (None, "latest"):
        return model
    if "@" in model:
        raise InvalidError(f"'{model}' has a version already, and {version} is another argument")
    return f"{model}@{version}"


def split_shard(shard: Shard) -> tuple[str | None, tuple[Box, ...]]:
    """Returns the text of a shard, or its boxes. A name among boxes means the whole tensor."""
    if shard is None or isinstance(shard, str):
        return shard or None, ()
    boxes = tuple(Box(box) if isinstance(box, str) else Box(*box) for box in shard)
    if not boxes:
        raise InvalidError("no boxes: shard=None is everything")
    for box in boxes:
        if len(box.offset) != len(box.extent):
            raise InvalidError(f"box of '{box.tensor}': {len(box.offset)} offsets, "
                               f"{len(box.extent)} extents")
    return None, boxes


def spec_json(spec: Spec) -> str | None:
    """Returns a shard spec as JSON text, from a dict, JSON text that begins with `{`, or a path."""
    if spec is None:
        return None
    if isinstance(spec, Mapping):
        import json
        return json.dumps(spec)
    if isinstance(spec, str) and spec.lstrip().startswith("{"):
        return spec
    try:
        with open(spec, encoding="utf-8") as file:
            return file.read()
    except OSError as why:
        raise InvalidError(f"shard spec {spec}: {why.strerror}") from None


def environment(name: str) -> str | None:
    """Returns $REKINDLE_<name>, which `rekindle run` sets for its worker; None: unset or empty."""
    return os.environ.get(f"REKINDLE_{name}") or None


def number(given: int | None, name: str, otherwise: int) -> int:
    """Returns `given`, else the number in the environment, else `otherwise`."""
    if given is None:
        said = environment(name)
        try:
            given = otherwise if said is None else int(said)
        except ValueError:
            raise InvalidError(f"REKINDLE_{name}={said} is not a number") from None
    if given < 0:
        raise InvalidError(f"{name.lower()} {given} is negative")
    return given


class _Boxes:
    """The boxes as an array of rk_box, with the memory that it points to."""

    def __init__(self, boxes: tuple[Box, ...]) -> None:
        self.names = [text(box.tensor) for box in boxes]
        try:
            numbers = [value for box in boxes for value in (*box.offset, *box.extent)]
            self.numbers = (ctypes.c_uint64 * len(numbers))(*numbers)
        except TypeError:
            raise InvalidError("offsets and extents of boxes are integers") from None
        if any(value < 0 for value in numbers):
            raise InvalidError("offsets and extents of boxes are not negative")
        self.array = bytearray(_abi.BOX.size * len(boxes))
        at = ctypes.addressof(self.numbers)
        for index, box in enumerate(boxes):
            size = 8 * len(box.offset)
            _abi.BOX.pack_into(self.array, index * _abi.BOX.size, _address(self.names[index]),
                               len(box.offset), at, at + size)
            at += 2 * size
        self.view = (ctypes.c_char * len(self.array)).from_buffer(self.array)

    @property
    def address(self) -> int | None:
        return ctypes.addressof(self.view) if self.array else None


def _address(data: bytes | None) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def attach_native(native: Native, request: Request, timeout: float | None) -> None:
    """Calls rk_attach on `native`."""
    boxes = _Boxes(request.boxes)
    device = request.device
    options = _abi.AttachOptions(
        size=ctypes.sizeof(_abi.AttachOptions), model=text(request.model),
        shard=text(request.shard), spec_json=text(request.spec), boxes=boxes.address,
        box_count=len(request.boxes), instance=text(request.instance),
        generation=request.generation, rank=request.rank, world=request.world,
        fallback_dir=text(request.fallback_dir), group=text(request.group),
        device=text(device.name) if device else None, stream=device.stream if device else None,
        bucket_bytes=request.bucket_bytes, staged=request.staged,
        traceparent=text(os.environ.get("TRACEPARENT")), resident_key=text(request.resident_key),
        resident_shared=request.resident_shared,
        timeout_ms=max(1, milliseconds(timeout, milliseconds(ATTACH_PATIENCE_S))))
    native.open("rk_attach", "rk_detach", ctypes.byref(options))

"""Parameters of a module in memory that outlives this process.

place() moves parameters and buffers to blocks of their device, and seal() gives the blocks to the
agent's keeper. In a successor, take() maps them again and adopts them: nothing is loaded.
"""
from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from .. import _resident
from .. import session as sessions
from .._device import resolve
from ..boxes import Box, row_major
from ..errors import (
    ExhaustedError, InvalidError, NotFoundError, TimeoutError, UnavailableError)
from ..recording.tracer import TensorMeta
from . import conversion, memory

# Of a tensor in a block: enough for every kernel.
ALIGN = 256
_SMALLEST_BLOCK = 64 << 20
# A copy has at most 64 blocks. Two neighbours together are larger than a share.
_SHARES = 30
# Changes whenever descriptions, or the meaning of a key, do.
_FORMAT = 1
# Options of attach() that say which bytes come, and not where this worker belongs.
BYTE_OPTIONS = ("shard", "spec", "bucket_bytes", "fallback_dir", "staged")


# Tensors with their names, by their ids.
Tensors = Mapping[int, "tuple[torch.Tensor, list[Any]]"]
# Whether the model itself writes to a tensor with these names while it serves.
Changing = Callable[[Sequence[Any]], bool]


class Kept(NamedTuple):
    """The blocks of a module."""

    key: str
    description: bytes
    blocks: list[_resident.Block]
    # Other workers may read them at the same time.
    shared: bool = False


_kept: WeakKeyDictionary[torch.nn.Module, Kept] = WeakKeyDictionary()


def is_kept(model: torch.nn.Module) -> bool:
    """Whether the module's parameters lie in blocks."""
    return model in _kept


def key_of(model: torch.nn.Module, extra: str, options: Mapping[str, Any]) -> str:
    """Returns a text that differs whenever the bytes of this module's parameters may mean something
    else: its classes, its tensors, which of them are tied or saved, the settings of a transformers
    model, its shard, torch, the kind of device, and `extra`."""
    device = memory.torch_device(options.get("device"))
    kind = torch.cuda.get_device_properties(device).name if device.type == "cuda" else "cpu"
    shard = options.get("shard")
    saved = model.state_dict(keep_vars=True).keys()
    means = {
        "format": _FORMAT, "torch": torch.__version__, "cuda": torch.version.cuda, "device": kind,
        "classes": [f"{type(module).__module__}.{type(module).__qualname__}"
                    for module in model.modules()],
        "tensors": [(name, str(value.dtype), list(value.shape), isinstance(value, torch.nn.Parameter),
                     name in saved) for name, value in named_tensors(model)],
        "ties": [names for _, names in tensors_by_id(model).values() if len(names) > 1],
        "shard": shard if shard is None or isinstance(shard, str) else repr(list(shard)),
        "spec": repr(options.get("spec")), "extra": extra, "transformers": _settings(model),
    }
    return hashlib.sha256(json.dumps(means, sort_keys=True).encode()).hexdigest()


def _settings(model: torch.nn.Module) -> list[Any] | None:
    """Returns the release of transformers and the configs of its modules. None: the module has none
    of these."""
    configs: dict[int, Any] = {id(module.config): module.config for module in model.modules()
                               if conversion.is_pretrained(module)}
    if not configs:
        return None
    import transformers
    found = [json.loads(config.to_json_string(use_diff=False)) for config in configs.values()]
    for config in found:
        # It says from where the config was read, and nothing of the model.
        config.pop("_name_or_path", None)
    return [transformers.__version__, *found]


def take(model: torch.nn.Module, name: str | None, version: str | int | None, key: str,
         options: Mapping[str, Any], shared: bool = False) -> sessions.Session | None:
    """Returns a session whose resident copy the module has adopted. None: there is none for this
    worker, and nothing has changed."""
    if is_kept(model) and not (shared and _kept[model].shared):
        return None
    where = {option: value for option, value in options.items() if option not in BYTE_OPTIONS}
    try:
        session = sessions.attach(name, version, resident_key=key, resident_shared=shared, **where)
    except (NotFoundError, UnavailableError, TimeoutError):
        return None
    try:
        assert session._device is not None
        description, blocks = _resident.open_copy(session._native, session._device)
        _adopt(model, description, blocks)
    except (InvalidError, UnavailableError, ExhaustedError) as why:
        session.close()
        warnings.warn(f"the resident copy cannot be mapped: {why}", stacklevel=3)
        return None
    except BaseException:
        session.close()
        raise
    _kept[model] = Kept(key, description, blocks, shared)
    session._resident = True
    return session


def leave(model: torch.nn.Module, session: sessions.Session) -> None:
    """Gives the parameters other memory if other workers may read theirs. ExhaustedError."""
    kept = _kept.get(model)
    if kept is None or not kept.shared:
        return
    if session._device is not None:
        changing = {name for entry in json.loads(kept.description)["tensors"]
                    if entry.get("changes") for name in entry["names"]}
        _kept[model] = _moved_to_blocks(model, session, kept.key, True,
                                        lambda names: not changing.isdisjoint(names))
        return
    # The session loads from host memory. Nothing is kept then.
    del _kept[model]
    for members in _storages(tensors_by_id(model)).values():
        storage = members[0][0].untyped_storage().clone()
        for value, _ in members:
            value.data = torch.empty(0, dtype=value.dtype, device=value.device).set_(
                storage, value.storage_offset(), value.shape, value.stride())


def place(model: torch.nn.Module, session: sessions.Session, key: str, shared: bool = False,
          changes: Sequence[str] = ()) -> None:
    """Moves the module's parameters and buffers to blocks, at addresses that stay. A warning says why that is not possible;
    the module then works as before."""
    if is_kept(model):
        return
    try:
        _kept[model] = _moved_to_blocks(model, session, key, shared, _changing(changes))
    except (InvalidError, UnavailableError, ExhaustedError) as why:
        warnings.warn(f"the parameters of {session.model}@{session.version} are not resident: {why}",
                      stacklevel=3)


def seal(model: torch.nn.Module, session: sessions.Session,
         catalog: Mapping[str, TensorMeta]) -> None:
    """Gives the module's blocks to the agent's keeper. `catalog`: the tensors of the version. A
    warning says why that is not possible."""
    kept = _kept.get(model)
    if kept is None:
        return
    moved = _moved(model, kept)
    if moved is not None:
        # The blocks have bytes of another version than the module.
        del _kept[model]
        warnings.warn(f"the parameters of {session.model}@{session.version} are not resident: {moved} "
                      "has other memory than at its load", stacklevel=2)
        return
    if session._device is not None:
        session._device.synchronize()
    try:
        for block in kept.blocks if kept.shared else ():
            block.set_read_only(True)
        _resident.seal(session._native, kept.key, kept.description, kept.blocks,
                       parts_of(json.loads(kept.description)["tensors"], catalog))
        session._resident = True
    except Exception as why:
        warnings.warn(f"the parameters of {session.model}@{session.version} are not resident: {why}",
                      stacklevel=2)


# --- parameters and blocks

def _changing(patterns: Sequence[str]) -> Changing:
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda names: any(pattern.fullmatch(name) for pattern in compiled for name in names)


def parts_of(described: Sequence[Mapping[str, Any]],
             catalog: Mapping[str, TensorMeta]) -> list[_resident.Part]:
    """Names the tensors of a copy for the agent. `catalog`: the tensors of the version."""
    return [_part(entry, catalog) for entry in described]


def _part(entry: Mapping[str, Any], catalog: Mapping[str, TensorMeta]) -> _resident.Part:
    """Where a tensor lies, and where its bytes come from. That may be a guess: nothing is written
    without the digest of the seal."""
    dtype: torch.dtype = getattr(torch, str(entry["dtype"]).removeprefix("torch."))
    shape, stride = tuple(entry["shape"]), tuple(entry["stride"])
    source = None
    for name in entry["names"]:
        meta = catalog.get(name)
        if (meta is not None and tuple(meta.shape) == shape and meta.dtype == dtype
                and stride == row_major(shape)):
            source = Box(name)
    return _resident.Part(entry["names"][0], entry["block"], entry["at"],
                          _elements(shape, stride) * dtype.itemsize, entry.get("changes", False),
                          source)


def _elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """From the first element in memory to the last one."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))


def _moved(model: torch.nn.Module, kept: Kept) -> str | None:
    """Returns the name of a tensor that no longer lies in its block; None: all of them do."""
    entries = {name: entry for entry in json.loads(kept.description)["tensors"]
               for name in entry["names"]}
    names = dict(named_tensors(model))
    for name in sorted(names.keys() | entries.keys()):
        value, entry = names.get(name), entries.get(name)
        if value is None or entry is None:
            return name
        same = (str(value.dtype) == entry["dtype"] and list(value.shape) == entry["shape"]
                and list(value.stride()) == entry["stride"])
        at = kept.blocks[entry["block"]].address + entry["at"]
        if not same or (value.numel() and value.data_ptr() != at):
            return name
    return None


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every name of every parameter and buffer, ties included, in the module's order."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def tensors_by_id(model: torch.nn.Module) -> Tensors:
    """Each tensor once, with its names, by its id."""
    found: dict[int, tuple[torch.Tensor, list[Any]]] = {}
    for name, value in named_tensors(model):
        found.setdefault(id(value), (value, []))[1].append(name)
    return found


def _storages(tensors: Tensors) -> dict[int, list[tuple[torch.Tensor, list[Any]]]]:
    """The tensors of each storage, by its address."""
    storages: dict[int, list[tuple[torch.Tensor, list[Any]]]] = {}
    for value, names in tensors.values():
        storages.setdefault(value.untyped_storage().data_ptr(), []).append((value, names))
    return storages


def _moved_to_blocks(model: torch.nn.Module, session: sessions.Session, key: str, shared: bool,
                     changing: Changing) -> Kept:
    described, blocks = move(tensors_by_id(model), session, changing)
    return Kept(key, json.dumps({"format": _FORMAT, "tensors": described}).encode(), blocks, shared)


def move(tensors: Tensors, session: sessions.Session,
         changing: Changing) -> tuple[list[dict[str, Any]], list[_resident.Block]]:
    """Moves tensors to blocks of the session's device. Returns where each one lies, and the blocks.
    InvalidError: one is elsewhere. ExhaustedError, UnavailableError."""
    device = session._device
    if device is None:
        raise InvalidError("they are in host memory; load them with device=")
    place_of = torch.empty(0, device=device.torch_name).device
    for value, names in tensors.values():
        if value.device != place_of or value.layout != torch.strided:
            raise InvalidError(f"{names[0]} is {value.layout} on {value.device}, and not a plain "
                               f"tensor on {place_of}")
    # Tensors that change lie in blocks of their own: a MiB with bytes of them is not compared.
    groups = sorted(_storages(tensors).values(),
                    key=lambda group: any(changing(names) for _, names in group))
    apart = sum(not any(changing(names) for _, names in group) for group in groups)
    sizes = [aligned(group[0][0].untyped_storage().nbytes()) for group in groups]
    described: list[dict[str, Any]] = []
    blocks: list[_resident.Block] = []
    with device.on_stream():
        for members in _shares(sizes, apart):
            if place_of.type == "cuda":
                # What the block before has freed.
                torch.cuda.empty_cache()
            block = _resident.allocate(session._native, device,
                                       max(ALIGN, sum(sizes[index] for index in members)))
            at = 0
            for index in members:
                described += _fill(block, len(blocks), at, groups[index])
                # The old storage goes with the last tensor that had it.
                groups[index] = []
                at += sizes[index]
            blocks.append(block)
            device.synchronize()
    for entry in described:
        entry["changes"] = changing(entry["names"])
    return described, blocks


def _shares(sizes: list[int], apart: int) -> Iterator[list[int]]:
    """Groups storages, in order, to blocks of about the same size. That of number `apart` begins a
    block."""
    share = max(_SMALLEST_BLOCK, -(-sum(sizes) // _SHARES))
    members: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        if members and (filled + size > share or index == apart):
            yield members
            members, filled = [], 0
        members.append(index)
        filled += size
    if members:
        yield members


def _fill(block: _resident.Block, number: int, at: int,
          group: list[tuple[torch.Tensor, list[Any]]]) -> list[dict[str, Any]]:
    """Copies a storage to a place in a block, and binds its tensors to that place."""
    storage = group[0][0].untyped_storage()
    raw = block.bytes
    size = storage.nbytes()
    old = torch.empty(0, dtype=torch.uint8, device=group[0][0].device).set_(storage)
    raw[at:at + size].copy_(old)
    described = []
    for value, names in group:
        entry = {"names": names, "dtype": str(value.dtype), "shape": list(value.shape),
                 "stride": list(value.stride()), "block": number,
                 "at": at + value.storage_offset() * value.element_size()}
        described.append(entry)
        value.data = view(block, entry)
    return described


def view(block: _resident.Block, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, str(entry["dtype"]).removeprefix("torch."))
    shape, stride, at = entry["shape"], entry["stride"], int(entry["at"])
    elements = _elements(shape, stride)
    size = elements * dtype.itemsize
    if at < 0 or at + size > block.size or at % max(1, dtype.itemsize):
        raise InvalidError(f"{entry['names'][0]} does not lie in its block")
    if not elements:
        return torch.empty_strided(shape, stride, dtype=dtype, device=block.bytes.device)
    typed: torch.Tensor = block.bytes[at:at + size].view(dtype)
    return typed.as_strided(shape, stride)


def _adopt(model: torch.nn.Module, description: bytes, blocks: list[_resident.Block]) -> None:
    try:
        entries = json.loads(description)["tensors"]
        views = {name: found for entry in entries
                 for found in [view(blocks[entry["block"]], entry)] for name in entry["names"]}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as why:
        raise InvalidError(f"its description is malformed: {why}") from None
    names = dict(named_tensors(model))
    if names.keys() != views.keys():
        raise InvalidError("it has other tensors than the model")
    for name, value in names.items():
        if value.shape != views[name].shape or value.dtype != views[name].dtype:
            raise InvalidError(f"{name} is another tensor than in the model")
        if not value.is_meta and value.device != views[name].device:
            raise InvalidError(f"{name} is on {value.device}, and the copy on {views[name].device}")
    name_of = {id(value): name for name, value in names.items()}
    for name, value in names.items():
        if not value.is_meta:
            value.data = views[name]
    memory.replace(model, lambda value: value.is_meta and id(value) in name_of,
                   lambda value: views[name_of[id(value)]])


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN

"""An engine's model in memory that outlives it, in the format in which the engine computes.

`begin` notes a model before its load. After load and post-processing, `keep` moves its tensors to
blocks and seals them. A successor makes its model by `making`, which takes no memory for weights,
and `adopt` gives it the tensors. `note` and `seal_again` stand around an update of a model.
"""
from __future__ import annotations

import base64
import gc
import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import _optional, _resident
from ..boxes import Box
from ..errors import Error, InvalidError
from ..session import Session, attach
from ..torch.resident import move, parts_of, view
from . import postprocessing
from .loading import Held, Place, Wanted, held, hold, read_contents
from .on_meta import OnMeta
from .options import Options
from .postprocessing import NotResident
from .ranks import Ranks

logger = logging.getLogger("rekindle")
# Changes whenever descriptions, or the meaning of a key, do.
FORMAT = 2
# Small tensors that are no parameters travel in the description: engines change some of them
# while they serve (scales of a cache, maps of experts), and a digest would then not match.
_SMALL_BYTES = 4096
_MOST_SMALL_BYTES = 1 << 20
_MARK = "_rekindle_slot"

# Where a model has a tensor: kind ("parameter", "buffer" or "attribute"), module, and name.
Slot = tuple[str, str, str]


@dataclass(frozen=True)
class Before:
    """A model before its load or an update."""

    noted: postprocessing.Noted
    slots: frozenset[Slot]
    # Tensors that are attributes, and their versions.
    attributes: dict[Slot, tuple[weakref.ref[torch.Tensor], int]]
    # The attributes of each parameter, before a load.
    parameters: dict[Slot, tuple[type, dict[str, Any]]]


@dataclass
class Kept:
    """A model in blocks."""

    model: weakref.ref[torch.nn.Module]
    key: str
    blocks: list[_resident.Block]
    # What the description has besides values that change.
    about: dict[str, Any]
    # The model before an update. While it serves, an engine may change what it likes.
    noted: Before | None = None


@dataclass
class Taken:
    """A resident copy of this worker."""

    key: str
    session: Session
    about: dict[str, Any]
    blocks: list[_resident.Block]

    @property
    def size_bytes(self) -> int:
        return sum(block.size for block in self.blocks)

    def close(self) -> None:
        """Gives the copy up. Its memory is free when no tensor uses it."""
        self.session.close()
        self.blocks.clear()


# By role, as in loading.
_kept: dict[str, Kept] = {}


def device_of(options: Options) -> str | None:
    """Returns the device whose memory the model has; None: none."""
    if options.device is not None:
        return options.device
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else None


def key_of(device: str, packages: Iterable[str], means: Mapping[str, Any]) -> str:
    """Returns a text that differs whenever post-processed weights may differ. `packages`: those
    whose versions decide the format; `means`: everything else that an engine knows."""
    cuda = torch.device(device) if device.startswith("cuda") else None
    known = {"format": FORMAT, "torch": torch.__version__, "cuda": torch.version.cuda,
             "device": torch.cuda.get_device_properties(cuda).name if cuda is not None else "cpu",
             "packages": {name: _optional.version(name) for name in packages}, **means}
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def release_memory() -> None:
    """Gives memory of the device back that no tensor has any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- the first worker

def begin(model: torch.nn.Module) -> Before:
    """Notes a model before its load."""
    parameters = {}
    for slot, tensor in _slots(model):
        if slot[0] == "parameter":
            parameters[slot] = type(tensor), dict(vars(tensor))
            setattr(tensor, _MARK, slot)
    return _before(model, parameters)


def _before(model: torch.nn.Module,
            parameters: dict[Slot, tuple[type, dict[str, Any]]]) -> Before:
    slots = dict(_slots(model))
    # Tensors of inference mode have no version. They count as changed.
    attributes = {slot: (weakref.ref(tensor), tensor._version) for slot, tensor in slots.items()
                  if slot[0] == "attribute" and not tensor.is_inference()}
    return Before(postprocessing.noted(model), frozenset(slots), attributes, parameters)


def keep(model: torch.nn.Module, before: Before, role: str, key: str, ranks: Ranks,
         rebuilds: bool = False) -> str | None:
    """Moves the tensors of a loaded model to blocks, and seals them. None: done, on all ranks; else
    why the model is not resident. The model works in either case. `rebuilds`: a successor can let
    the engine make the objects that its post-processing makes."""
    now = held(role)
    found: dict[str, Any] = {}

    def check() -> str | None:
        if now is None:
            return "its weights have not come through Rekindle"
        try:
            found.update(_described(model, before, now, rebuilds))
        except NotResident as why:
            return str(why)
        except Exception as why:
            # The other ranks wait for this rank's answer.
            return f"{type(why).__name__}: {why}"
        return None

    reasons = ranks.gather(check())
    why = next((f"rank {rank} of {ranks.size}: {reason}" if ranks.size > 1 else reason
                for rank, reason in enumerate(reasons) if reason is not None), None)
    if why is not None or now is None:
        return why
    try:
        entries, blocks = move(found.pop("move"), now.session, lambda names: False)
    except (Error, RuntimeError) as error:
        return str(error)
    how = found.pop("how")
    for entry in entries:
        entry["how"] = [how.get(slot) for slot in entry["names"]]
        _own(model, entry)
    found["tensors"] = entries
    _kept[role] = Kept(weakref.ref(model), key, blocks, found)
    return _seal(role)


def note(role: str) -> None:
    """Notes a kept model before the first write of an update, once."""
    kept = _kept.get(role)
    model = kept.model() if kept is not None else None
    if kept is not None and model is not None and kept.noted is None:
        kept.noted = _before(model, {})


def note_nothing(role: str) -> None:
    """For an update that has failed. A model that may have been written keeps its first note: the
    next update adds to these changes."""
    kept, now = _kept.get(role), held(role)
    if kept is not None and (now is None or now.torn is None):
        kept.noted = None


def _seal(role: str) -> str | None:
    """Gives a kept model to the agent's keeper, after its load or an update. Returns why that is
    not possible; None: done, or nothing was kept."""
    kept, now = _kept.get(role), held(role)
    model = kept.model() if kept is not None else None
    if kept is None or model is None or now is None:
        _kept.pop(role, None)
        return None
    if now.torn is not None:
        del _kept[role]
        return f"it may have weights of two versions, as an update has failed: {now.torn}"
    session = now.session
    try:
        if kept.noted is not None:
            _note_update(model, kept, kept.noted)
            kept.noted = None
        kept.about["small"] = _small(model, kept.about["small"])
        about = {**kept.about, "held": _of(now)}
        if session._device is not None:
            session._device.synchronize()
        named = [{**entry, "names": [_shown(slot) for slot in entry["names"]]}
                 for entry in about["tensors"]]
        _resident.seal(session._native, kept.key, json.dumps(about).encode(), kept.blocks,
                       parts_of(named, now.contents.tensors))
    except (NotResident, Error, AttributeError, KeyError, RuntimeError) as why:
        del _kept[role]
        return str(why)
    session._resident = True
    return None


def seal_again(role: str) -> None:
    """Keeps a model with its new version. A warning says why that is not possible."""
    now = held(role)
    if role not in _kept or now is None:
        return
    why = _seal(role)
    if why is not None:
        warn(f"{now.session.model}@{now.session.version}", why)


def forget(role: str) -> None:
    """For a model that changes in a way that cannot be noted: it is not kept again."""
    _kept.pop(role, None)


def warn(what: str, why: str) -> None:
    logger.warning("rekindle: %s is not resident, and a successor loads it: %s", what, why)


# --- the successor

def take(options: Options, place: Place, device: str, key: str) -> Taken | None:
    """Returns the resident copy of this worker, on `device`. None: there is none, and a log line
    says why."""
    try:
        session = attach(options.name, options.version, instance=place.instance,
                         generation=place.generation, rank=place.rank, world=place.world,
                         group=options.group, device=device, agent=options.agent,
                         resident_key=key, timeout=options.attach_timeout)
    except Error as why:
        logger.info("rekindle: no resident copy: %s", why)
        return None
    try:
        assert session._device is not None
        description, blocks = _resident.open_copy(session._native, session._device)
        about = json.loads(description)
        if about.get("format") != FORMAT:
            raise InvalidError("its description is of another release")
        return Taken(key, session, about, blocks)
    except (Error, ValueError, AttributeError) as why:
        session.close()
        logger.warning("rekindle: the resident copy cannot be mapped: %s", why)
        return None
    except BaseException:
        session.close()
        raise


def take_together(options: Options, place: Place, device: str, key: str,
                  ranks: Ranks) -> Taken | None:
    """Returns this worker's copy as `take`, if every rank has one."""
    taken = take(options, place, device, key)
    if all(ranks.gather(taken is not None)):
        return taken
    if taken is not None:
        logger.warning("rekindle: another rank has no resident copy: all ranks load")
        taken.close()
    return None


def come_back(taken: Taken, options: Options, place: Place, device: str, role: str, ranks: Ranks,
              make: Callable[[], torch.nn.Module]) -> torch.nn.Module | None:
    """Returns the model that `make` makes with the tensors of the copy, after its commit. None:
    they do not fit, on one rank or more, and the copy is given up."""
    model, wanted, why = None, None, None
    try:
        wanted = Wanted(options, place, device, *boxes_of(taken), read_contents(options))
        model = make()
    except Exception as error:
        why = str(error) or type(error).__name__
    reasons = [reason for reason in ranks.gather(why) if reason is not None]
    if reasons:
        logger.warning("rekindle: the resident copy is of no use, and the model is loaded: %s",
                       reasons[0])
        model = None
        taken.close()
        release_memory()
        return None
    assert model is not None and wanted is not None
    session = taken.session
    try:
        ranks.together(lambda: session.commit(options.commit_timeout))
    except BaseException:
        session.close()
        raise
    hold(role, Held(wanted, session))
    adopted(model, taken, role)
    release_memory()
    return model


def making(device: torch.device) -> OnMeta:
    """A context in which a successor makes its model."""
    return OnMeta(device)


def adopt(model: torch.nn.Module, taken: Taken, made: OnMeta,
          rebuild: Callable[[], None] | None = None) -> None:
    """Gives the model of a successor the tensors of a resident copy. InvalidError: they do not fit,
    and the model is of no use. `rebuild`: makes the objects that post-processing makes, and leaves
    the tensors as they are."""
    try:
        _bind(model, taken)
        postprocessing.make(model, taken.about["changes"])
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError) as why:
        raise InvalidError(f"it does not fit this model: {type(why).__name__}: {why}") from why
    if taken.about["rebuild"]:
        if rebuild is None:
            raise InvalidError("this engine does not make the objects of its post-processing alone")
        rebuild()
        for entry in taken.about["tensors"]:
            for slot in map(tuple, entry["names"]):
                if _lies(_get(model, slot), taken.blocks, entry):
                    continue
                if slot[0] != "attribute":
                    raise InvalidError(f"{_shown(slot)} was moved by its post-processing")
                _set(model, slot, view(taken.blocks[entry["block"]], entry))
    lost = [_shown(slot) for slot, tensor in _slots(model) if tensor.is_meta]
    if lost:
        raise InvalidError(f"it has no {lost[0]}")
    gc.collect()
    if made.leftover():
        raise InvalidError("the model uses memory that is no tensor of a module")


def adopted(model: torch.nn.Module, taken: Taken, role: str) -> None:
    """Remembers the model of a successor, for its updates."""
    about = {name: value for name, value in taken.about.items() if name != "held"}
    _kept[role] = Kept(weakref.ref(model), taken.key, taken.blocks, about)
    taken.session._resident = True


def boxes_of(taken: Taken) -> tuple[list[Box] | None, frozenset[str]]:
    """Returns boxes and names of the first worker's load."""
    of = taken.about["held"]
    boxes = of["boxes"]
    return (boxes if boxes is None else [Box(name, tuple(offset), tuple(extent))
                                         for name, offset, extent in boxes],
            frozenset(of["names"]))


# --- descriptions

def _of(now: Held) -> dict[str, Any]:
    boxes = now.boxes
    return {"names": sorted(now.names), "boxes": boxes if boxes is None else [
        [box.tensor, list(box.offset), list(box.extent)] for box in boxes]}


def _described(model: torch.nn.Module, before: Before, now: Held,
               rebuilds: bool) -> dict[str, Any]:
    """Returns what a successor needs besides the bytes: "move" are the tensors for blocks, and "how"
    says how a successor gets the tensor of each slot."""
    gc.collect()
    device = now.session._device
    if device is None:
        raise NotResident("it is in host memory: \"device\" names the device")
    here = torch.empty(0, device=device.torch_name).device
    changes, objects = postprocessing.changes(before.noted, postprocessing.noted(model))
    if objects is not None and not rebuilds:
        raise NotResident(f"after its load, {objects}")
    tensors: dict[int, tuple[torch.Tensor, list[Any]]] = {}
    elsewhere: dict[int, tuple[torch.Tensor, list[Any]]] = {}
    for slot, tensor in _slots(model):
        if tensor.device != here and slot[0] == "attribute":
            # Without a change, the constructor of a successor makes it.
            if not _is_same(slot, tensor, before):
                elsewhere.setdefault(id(tensor), (tensor, []))[1].append(slot)
            continue
        if tensor.device != here or tensor.layout != torch.strided:
            raise NotResident(f"{_shown(slot)} is {tensor.layout} on {tensor.device}, and not a "
                              f"plain tensor on {here}")
        tensors.setdefault(id(tensor), (tensor, []))[1].append(slot)
    how = {slot: _how(tensor, slot, before)
           for tensor, slots in (*tensors.values(), *elsewhere.values()) for slot in slots}
    small = _choose_small(tensors)
    for key in small:
        del tensors[key]
    _check_alone(tensors)
    on_host = _choose_small(elsewhere)
    for key, (tensor, slots) in elsewhere.items():
        if key not in on_host or tensor.device.type != "cpu":
            raise _changed(slots[0], tensor, "load")
        small[key] = {**on_host[key], "host": True}
    return {"format": FORMAT, "changes": changes, "rebuild": objects is not None, "how": how, "move": tensors,
            "small": [{**entry, "how": [how[slot] for slot in entry["names"]]}
                      for entry in small.values()],
            "none": list(_absent(model)),
            "gone": sorted(before.slots - {slot for slot, _ in _slots(model)})}


def _is_same(slot: Slot, tensor: torch.Tensor, before: Before) -> bool:
    """Whether an attribute is neither new nor has changed. Writes through `.data` are not seen."""
    old, version = before.attributes.get(slot, (None, None))
    return old is not None and old() is tensor and tensor._version == version


def _changed(slot: Slot, tensor: torch.Tensor, since: str) -> NotResident:
    return NotResident(f"{_shown(slot)} on {tensor.device} is new, or has changed, since its "
                       f"{since} began")


def _how(tensor: torch.Tensor, slot: Slot, before: Before) -> dict[str, Any]:
    if slot[0] != "parameter":
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise NotResident(f"{_shown(slot)} is a {type(tensor).__qualname__}")
        return {}
    kind, own = before.parameters.get(slot, (torch.nn.Parameter, {}))
    attributes = {name: value for name, value in vars(tensor).items() if name != _MARK}
    said = postprocessing.attributes(own, attributes, _shown(slot))
    mark = vars(tensor).get(_MARK)
    if mark is not None and type(tensor) is kind:
        return {**said, "own": True}
    if type(tensor) not in (torch.nn.Parameter, kind):
        raise NotResident(f"{_shown(slot)} has become a {type(tensor).__qualname__}")
    return {**said, "own": type(tensor) is kind and kind is not torch.nn.Parameter}


def _choose_small(tensors: dict[int, tuple[torch.Tensor, list[Any]]]) -> dict[int, dict[str, Any]]:
    """Returns the tensors that travel in the description. Each has its storage alone."""
    found: dict[int, dict[str, Any]] = {}
    users: dict[int, int] = {}
    for tensor, _ in tensors.values():
        users[_storage(tensor)] = users.get(_storage(tensor), 0) + 1
    total = 0
    for key, (tensor, slots) in tensors.items():
        if (any(slot[0] == "parameter" for slot in slots) or tensor.nbytes > _SMALL_BYTES
                or users[_storage(tensor)] > 1 or total + tensor.nbytes > _MOST_SMALL_BYTES):
            continue
        total += tensor.nbytes
        found[key] = {"names": slots, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
    return found


def _check_alone(tensors: dict[int, tuple[torch.Tensor, list[Any]]]) -> None:
    """Raises NotResident where a tensor that is in no module shares memory with one that is. It
    would keep its old memory."""
    groups: dict[int, list[tuple[torch.Tensor, Slot]]] = {}
    for tensor, slots in tensors.values():
        groups.setdefault(_storage(tensor), []).append((tensor, slots[0]))
    for group in groups.values():
        known = {id(tensor) for tensor, _ in group}
        # The tensor of which a view was made lives as long as the view.
        bases = {id(tensor._base): tensor._base for tensor, slot in group
                 if tensor._base is not None and slot[0] == "attribute"}
        storage = group[0][0].untyped_storage()
        others = torch._C._storage_Use_Count(storage._cdata) - 1 - len(known | bases.keys())
        if others > 0 and group[0][0].numel():
            raise NotResident(f"memory of {_shown(group[0][1])} is shared with a tensor that is in "
                              "no module")


def _own(model: torch.nn.Module, entry: dict[str, Any]) -> None:
    """Makes views that are attributes tensors of their own: a view keeps the memory of which it was
    made."""
    for slot in entry["names"]:
        tensor = _get(model, slot)
        if slot[0] == "attribute" and tensor is not None and tensor._base is not None:
            _set(model, slot, torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
                tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()))


def _small(model: torch.nn.Module, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for entry in entries:
        tensor = _get(model, entry["names"][0])
        if tensor is None or str(tensor.dtype) != entry["dtype"] or list(
                tensor.shape) != entry["shape"]:
            # The engine has bound another one since its load, such as a cache.
            if "bytes" not in entry:
                raise NotResident(f"{_shown(entry['names'][0])} has changed since it was noted")
            found.append(entry)
            continue
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found.append({**entry, "bytes": base64.b64encode(data).decode()})
    return found


def _note_update(model: torch.nn.Module, kept: Kept, before: Before) -> None:
    """Puts what an update has changed into the description. Moves tensors that it has made anew to
    their places in the blocks. NotResident: a successor would lack something."""
    changed, objects = postprocessing.changes(before.noted, postprocessing.noted(model))
    if objects is not None:
        raise NotResident(f"after its update, {objects}")
    known = [change["at"] for change in kept.about["changes"]]
    kept.about["changes"] += [change for change in changed if change["at"] not in known]
    kept.about["changes"] = postprocessing.now(model, kept.about["changes"])
    _put_back(model, kept, before)


def _put_back(model: torch.nn.Module, kept: Kept, before: Before) -> None:
    known = {tuple(slot) for part in ("tensors", "small") for entry in kept.about[part]
             for slot in entry["names"]}
    for slot, tensor in _slots(model):
        if slot not in known | before.slots:
            raise NotResident(f"{_shown(slot)} has come with the update")
        if (slot[0] == "attribute" and slot not in known and kept.blocks
                and tensor.device != kept.blocks[0].bytes.device
                and not _is_same(slot, tensor, before)):
            raise _changed(slot, tensor, "update")
    for entry in kept.about["tensors"]:
        slots = entry["names"]
        if all(_lies(_get(model, slot), kept.blocks, entry) for slot in slots):
            continue
        new, place = _get(model, slots[0]), view(kept.blocks[entry["block"]], entry)
        other = next((slot for slot in slots if _get(model, slot) is not new), None)
        if other is not None:
            raise NotResident(f"{_shown(slots[0])} and {_shown(other)} have become two tensors")
        if (new is None or new.dtype != place.dtype or new.shape != place.shape
                or new.device != place.device):
            raise NotResident(f"{_shown(slots[0])} is another tensor than at its load")
        place.copy_(new.detach())
        if any(slot[0] == "parameter" for slot in slots):
            new.data = place
            continue
        for slot in slots:
            _set(model, slot, place)


# --- binding

def _bind(model: torch.nn.Module, taken: Taken) -> None:
    about = taken.about
    for entry in about["tensors"]:
        _bind_one(model, entry, view(taken.blocks[entry["block"]], entry))
    for entry in about["small"]:
        dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
        data = bytearray(base64.b64decode(entry["bytes"]))
        value = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(
            0, dtype=torch.uint8, device="cpu")
        device = torch.device("cpu") if entry.get("host") else taken.blocks[0].bytes.device
        _bind_one(model, entry, value.view(dtype).view(entry["shape"]).clone(), small=True,
                  device=device)
    for slot in about["gone"]:
        _dict(model, slot).pop(slot[2], None)
    for slot in about["none"]:
        _set(model, tuple(slot), None)
    _check_bound(model, taken)
    known = {tuple(slot) for part in ("tensors", "small") for entry in about[part]
             for slot in entry["names"]}
    for slot, _ in _slots(model):
        if slot not in known and slot[0] != "attribute":
            raise InvalidError(f"it has no {_shown(slot)}")


def _check_bound(model: torch.nn.Module, taken: Taken) -> None:
    """Raises InvalidError where the constructor shares a tensor that post-processing has made two:
    the second value is in place of the first."""
    for entry in taken.about["tensors"]:
        for slot in entry["names"]:
            if not _lies(_get(model, slot), taken.blocks, entry):
                raise InvalidError(f"{_shown(slot)} shares its tensor with another name")
    storages: set[int] = set()
    for entry in taken.about["small"]:
        tensor = _get(model, entry["names"][0])
        if tensor is None or _storage(tensor) in storages:
            raise InvalidError(f"{_shown(entry['names'][0])} shares its memory with another name")
        storages.add(_storage(tensor))


def _bind_one(model: torch.nn.Module, entry: dict[str, Any], value: torch.Tensor, *,
              small: bool = False, device: torch.device | None = None) -> None:
    bound: torch.Tensor | None = None
    for slot, how in zip(map(tuple, entry["names"]), entry["how"], strict=True):
        old = _get(model, slot)
        if bound is not None:
            if old is not bound:
                _set(model, slot, bound)
            continue
        if small:
            if (old is not None and old.shape == value.shape and old.dtype == value.dtype
                    and old.device == device):
                with torch.no_grad():
                    old.copy_(value)
                bound = old
            else:
                bound = value.to(device)
                _set(model, slot, bound)
        else:
            bound = _place(model, slot, how, old, value)


def _place(model: torch.nn.Module, slot: Slot, how: dict[str, Any], old: torch.Tensor | None,
           value: torch.Tensor) -> torch.Tensor:
    """Puts a tensor of the copy where the model has `old`. Others may refer to `old`, so it stays
    the same object where it can."""
    fits = old is not None and old.shape == value.shape and old.dtype == value.dtype
    if slot[0] != "parameter":
        if old is not None and fits and not old.is_meta:
            old.data = value
            return old
        _set(model, slot, value)
        return value
    attributes = vars(old) if old is not None else {}
    kept = {name: attributes[name] for name in how["same"]}
    kept.update(postprocessing.decoded(how["set"]))
    if how["own"] and old is None:
        raise InvalidError(f"the model has no {_shown(slot)}")
    if old is not None and fits and not old.is_meta and how["own"]:
        old.data = value
        vars(old).clear()
        vars(old).update(kept)
        return old
    new = torch.nn.Parameter(value, requires_grad=old.requires_grad if old is not None else False)
    if how["own"] and old is not None:
        new.__class__ = type(old)  # type: ignore[assignment]  # a kind of Parameter
    vars(new).update(kept)
    if old is not None and fits and how["own"]:
        torch.utils.swap_tensors(old, new)
        return old
    _set(model, slot, new)
    return new


def _slots(model: torch.nn.Module) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Yields every tensor of the modules, as often as they have it."""
    for path, module in model.named_modules():
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield (kind, path, name), tensor
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                yield ("attribute", path, name), value


def _absent(model: torch.nn.Module) -> Iterator[Slot]:
    for path, module in model.named_modules():
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is None:
                    yield kind, path, name


def _dict(model: torch.nn.Module, slot: Slot) -> dict[str, Any]:
    module = model.get_submodule(slot[1])
    kinds: dict[str, Any] = {"parameter": module._parameters, "buffer": module._buffers,
                             "attribute": vars(module)}
    found: dict[str, Any] = kinds[slot[0]]
    return found


def _get(model: torch.nn.Module, slot: Any) -> torch.Tensor | None:
    return _dict(model, slot).get(slot[2])


def _set(model: torch.nn.Module, slot: Slot, value: torch.Tensor | None) -> None:
    module = model.get_submodule(slot[1])
    # A name has one kind, and post-processing may have changed it.
    for tensors in (module._parameters, module._buffers, vars(module)):
        if tensors is not _dict(model, slot):
            tensors.pop(slot[2], None)
    _dict(model, slot)[slot[2]] = value


def _lies(tensor: torch.Tensor | None, blocks: list[_resident.Block],
          entry: dict[str, Any]) -> bool:
    """Whether a tensor is at its place in the blocks."""
    return (tensor is not None and str(tensor.dtype) == entry["dtype"]
            and list(tensor.shape) == entry["shape"] and list(tensor.stride()) == entry["stride"]
            and (not tensor.numel()
                 or tensor.data_ptr() == blocks[entry["block"]].address + entry["at"]))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _shown(slot: Any) -> str:
    return f"{slot[1]}.{slot[2]}" if slot[1] else str(slot[2])

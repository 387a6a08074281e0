"""Several models that take turns in the memory of one device.

All modules lie in one arena, as large as the largest of them. So a switch allocates and frees
nothing on the device, and modules of equal shapes have equal addresses. Whatever a load needs to
know is prepared before: the switch itself attaches, copies and commits.
"""
from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Union

import torch

from .. import _attaching, _resident
from .. import session as sessions
from ..boxes import Box
from ..errors import (
    Error, ExhaustedError, InvalidError, NotFoundError, PeerLostError, StaleError, TimeoutError,
    UnavailableError)
from ..orders import Order
from . import memory
from . import resident as residents
from .modules import _Declared, _declare, _meta_buffers, catalog_for, tensors_of

Built = Union[torch.nn.Module, Callable[[], torch.nn.Module]]
# For an agent that restarts while a worker has no model.
_AGENT_AWAY_S = 60.0
_ASK_AGAIN_S = 0.1
# Options of attach() that say where the agent is.
_WHERE = ("agent", "timeout")


class _Serving(NamedTuple):
    name: str
    version: int
    session: sessions.Session


class _Place(NamedTuple):
    """Where a tensor of a module lies in the arena."""

    names: list[str]
    value: torch.Tensor
    at: int


class Models:
    """One of several models in the memory of one device at a time. For one thread.

        models = rekindle.torch.Models({"a": build_a, "b": build_b}, device="cuda", instance="gpu-0")
        models.switch("a")
        while True:
            serve(models.model)             # one step, by the model that serves
            models.follow()                 # obeys `rekindle switch`

    Only the module that serves may be used: the others share its memory."""

    def __init__(self, models: Mapping[str, Built], *, resident: bool | str = False,
                 convert: bool = False, load_timeout: float | None = 60.0,
                 commit_timeout: float | None = 60.0, **options: Any) -> None:
        """`models`: the module of each model of Rekindle, or a function that builds it: on the meta
        device, so that only the arena takes memory. `resident`: the parameters of the model that
        serves outlive this process, as in `load`. `commit_timeout`: seconds for the other ranks.
        Other arguments are those of `load`, without `strict`: each model needs a tensor for every
        parameter, as the memory may have bytes of another model. `generation` counts up with each
        switch of an instance of several ranks, so give all ranks of a start the same one, higher
        than those before.

        ExhaustedError: the device has no room for the largest model."""
        if not models:
            raise InvalidError("Models needs at least one model")
        if not options.pop("strict", True):
            raise InvalidError("Models takes no strict=False: a parameter without a tensor would have "
                               "the bytes of another model; give each model all of its tensors")
        self._modules = {name: _built(built) for name, built in models.items()}
        self._resident, self._convert = resident, convert
        self._load_timeout, self._commit_timeout = load_timeout, commit_timeout
        self._world = _attaching.number(options.pop("world", None), "WORLD", 1)
        self._generation = _attaching.number(options.pop("generation", None), "GENERATION", 0)
        self._options = {**options, "world": self._world}
        self._device = memory.torch_device(options.get("device"))
        self._bytes = max(_end(_places(module)) for module in self._modules.values())
        self._places: dict[str, list[_Place]] = {}
        self._arena = torch.empty(0, dtype=torch.uint8)
        # Of a resident arena, and the session with which it was sealed last.
        self._block: _resident.Block | None = None
        self._sealed: sessions.Session | None = None
        self._plans: dict[tuple[str, int], _Declared] = {}
        self._serving: _Serving | None = None
        # Sessions that have no use any more, but may still have to answer an order.
        self._ended: list[sessions.Session] = []
        self._phases: dict[str, float] = {}
        if not resident:
            self._bind(_allocate(self._bytes, self._device))

    @property
    def name(self) -> str | None:
        """Of the model that serves; None: none does."""
        return self._serving.name if self._serving else None

    @property
    def model(self) -> torch.nn.Module:
        """The module that serves. InvalidError: none does."""
        return self._modules[self._require().name]

    @property
    def session(self) -> sessions.Session:
        """Of the model that serves. InvalidError: none does."""
        return self._require().session

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each step of the last switch: "drain", "free", "load", "ready"."""
        return dict(self._phases)

    def prepare(self, name: str, version: str | int | None = "latest") -> None:
        """Finds out everything that a later switch to this version needs, apart from its bytes.
        InvalidError, NotFoundError: it does not fit the module, or does not exist."""
        if self._places:
            self._declared(name, version)

    def switch(self, name: str, version: str | int | None = "latest") -> torch.nn.Module:
        """Loads a model in place of the one that serves, and commits it. Returns its module.

        If it cannot be loaded, the earlier model is loaded again before the error is raised, and
        goes on to serve. Raises what `load` and `Session.commit` raise."""
        self._phases = {}
        try:
            self._change(name, version)
        finally:
            self._settle()
        return self.model

    def follow(self, timeout: float | None = 0.0, drain: Callable[[], Any] | None = None) -> bool:
        """Waits up to `timeout` seconds for an order of the agent, such as that of `rekindle
        switch`, and carries it out. Call it between two steps. `drain` is called before, to end the
        requests of the model that serves. Returns whether a model was loaded: requests then begin
        anew, also if it is the same model.

        A failure is told to the agent, and the earlier model goes on. Raises only if that model
        cannot be loaded again. If the agent has restarted, the model that serves is loaded again."""
        serving = self._require()
        # What a switch leaves to do waits until here: the first token comes before.
        self._settle()
        try:
            order = serving.session.next_order(timeout)
            if order is None:
                return False
            self._phases = {}
            self._obey(order, drain)
        except (PeerLostError, StaleError) as why:
            # Of the session that serves. The memory has the right bytes, but nobody knows that.
            if self._serving is not serving:
                raise
            warnings.warn(f"{serving.name}@{serving.version} is loaded again: {why}", stacklevel=2)
            self._phases = {}
            self._go_back(serving, self._next_generation(1))
        return self._serving is not serving

    def close(self) -> None:
        """Detaches. The modules keep their values."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._ended.append(serving.session)
        self._settle()

    def __enter__(self) -> "Models":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one switch

    def _obey(self, order: Order, drain: Callable[[], Any] | None) -> None:
        try:
            if order.kind == "mend":
                # An error means that the parameters stay wrong: nothing may compute with them.
                return self._mend(order)
            if order.kind != "serve" or order.model is None:
                raise UnavailableError(f"this worker knows no order of the kind '{order.kind}'")
            name, _, version = order.model.partition("@")
            self._change(name, int(version) if version else "latest", drain or _nothing_to_drain)
        except Exception as why:
            with contextlib.suppress(Error):
                order.fail(why)
            if self._serving is None or order.kind == "mend":
                raise
            return
        # The agent may have gone meanwhile. The model serves nevertheless.
        with contextlib.suppress(Error):
            order.done(self._phases)

    def _mend(self, order: Order) -> None:
        session = self._require().session
        if session._device is not None:
            session._device.synchronize()
        session.mend()
        with contextlib.suppress(Error):
            order.done({})

    def _change(self, name: str, version: str | int | None,
                drain: Callable[[], Any] | None = None) -> None:
        """Calls `drain` first. All ranks of an instance end in the same generation: the next one if
        all of them have the new model, else the one after that."""
        before = self._serving
        forward, back = self._next_generation(1), self._next_generation(2)
        try:
            if drain is not None:
                with self._measure("drain"):
                    drain()
            if before is None and self._resident and self._take(name, version):
                return
            declared = self._declared(name, version)
            self._check_places(name)
            with self._measure("free"):
                self._give_up(before)
            self._serving = None
            self._serve(name, declared, forward)
        except Exception:
            untouched = self._serving is before
            if before is None or (untouched and self._world == 1):
                raise
            self._serving = None
            self._go_back(before, back)
            raise
        if before is not None:
            self._ended.append(before.session)

    def _serve(self, name: str, declared: _Declared, generation: int) -> None:
        with self._measure("load"):
            session = declared.attach(False, generation=generation)
            try:
                declared.fill(session)
            except BaseException:
                session.close()
                raise
        try:
            with self._measure("ready"):
                session.commit(self._commit_timeout)
        except BaseException:
            session.close()
            raise
        self._generation = generation
        self._serving = _Serving(name, session.version, session)

    def _go_back(self, before: _Serving, generation: int) -> None:
        """Loads the earlier model again. An agent that is away has some time to come back."""
        self._serving = None
        self._ended.append(before.session)
        give_up = time.monotonic() + _AGENT_AWAY_S
        while self._serving is None:
            try:
                self._serve(before.name, self._declared(before.name, before.version), generation)
            except (NotFoundError, PeerLostError, UnavailableError):
                # A new agent may not have found its copies yet.
                if time.monotonic() >= give_up:
                    raise
                time.sleep(_ASK_AGAIN_S)

    def _give_up(self, before: _Serving | None) -> None:
        """Has the agent drop the copy of these parameters before they are written to."""
        if before is not None and self._resident:
            # A session that has ended has no copy.
            with contextlib.suppress(PeerLostError, StaleError):
                before.session.begin_switch()

    def _settle(self) -> None:
        """After the answer to an order: what nobody waits for."""
        while self._ended:
            self._ended.pop().close()
        if self._serving is not None and self._resident:
            self._seal(self._serving)

    def _next_generation(self, step: int) -> int:
        return self._generation + (step if self._world > 1 and self._serving else 0)

    def _require(self) -> _Serving:
        if self._serving is None:
            raise InvalidError("no model serves: call switch(name) first")
        return self._serving

    @contextlib.contextmanager
    def _measure(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - begun

    def _declared(self, name: str, version: str | int | None) -> _Declared:
        module = self._module(name)
        if not self._places:
            self._bind(self._resident_arena(name, version))
        if not isinstance(version, int):
            version = int(catalog_for(name, version, self._options).version)
        if (name, version) not in self._plans:
            self._plans[name, version] = _declare(module, name, version, True, self._convert,
                                                  self._load_timeout, dict(self._options))
        return self._plans[name, version]

    def _module(self, name: str) -> torch.nn.Module:
        if name not in self._modules:
            raise NotFoundError(f"this worker has no model {name}: it has "
                                f"{', '.join(sorted(self._modules))}")
        return self._modules[name]

    # --- the arena

    def _bind(self, arena: torch.Tensor) -> None:
        for name, module in self._modules.items():
            places = _places(module)
            at = {id(place.value): place.at for place in places}
            memory.replace(module, lambda value: id(value) in at,
                           lambda value: _view(arena, at[id(value)], value))
            # Buffers that are not saved have values of their own.
            memory.replace(module, lambda value: not value.is_meta and value.device != self._device,
                           lambda value: value.to(self._device))
            now = dict(residents.named_tensors(module))
            self._places[name] = [place._replace(value=now[place.names[0]]) for place in places]
        self._arena = arena

    def _check_places(self, name: str) -> None:
        """InvalidError: a parameter of the module has got other memory since it was bound."""
        now = dict(residents.named_tensors(self._modules[name]))
        for place in self._places[name]:
            at = self._arena.data_ptr() + place.at
            for key in place.names:
                if place.value.numel() and (key not in now or now[key].data_ptr() != at):
                    raise InvalidError(f"{key} of {name} has other memory than Models gave it; only "
                                       "Models may write to its modules")

    # --- resident copies

    def _key(self, name: str) -> str:
        extra = "" if self._resident is True else self._resident
        return residents.key_of(
            self._modules[name], f"{extra} in turns, {self._bytes} bytes, "
            f"convert={self._convert}", self._options)

    def _take(self, name: str, version: str | int | None) -> bool:
        """Takes over what a predecessor has left. False: there is nothing for this worker."""
        self._module(name)
        # A version fills no buffers that are not saved. A load finds their values, or says why not.
        if self._places or _meta_buffers(self._modules[name]):
            return False
        where = {key: value for key, value in self._options.items() if key not in residents.BYTE_OPTIONS}
        with self._measure("load"):
            try:
                session = sessions.attach(name, version, resident_key=self._key(name),
                                          generation=self._generation, **where)
            except (NotFoundError, UnavailableError, TimeoutError):
                return False
            try:
                assert session._device is not None
                description, blocks = _resident.open_copy(session._native, session._device)
                if len(blocks) != 1 or blocks[0].size < self._bytes:
                    raise InvalidError("it is no arena for these models")
                if description != _described(_places(self._modules[name])):
                    raise InvalidError(f"the tensors of {name} lie elsewhere in it")
                self._block = blocks[0]
                self._bind(blocks[0].bytes)
            except (InvalidError, UnavailableError, ExhaustedError) as why:
                session.close()
                warnings.warn(f"the resident copy cannot be mapped: {why}", stacklevel=4)
                return False
        try:
            with self._measure("ready"):
                session.commit(self._commit_timeout)
        except BaseException:
            session.close()
            raise
        self._serving = _Serving(name, session.version, session)
        self._sealed = session
        return True

    def _resident_arena(self, name: str, version: str | int | None) -> torch.Tensor:
        where = {key: self._options[key] for key in _WHERE if key in self._options}
        # The smallest tensor: the session is there for its device.
        with sessions.attach(name, version, shard=[Box("")], device=self._options.get("device"),
                             **where) as session:
            if session._device is None:
                raise InvalidError("resident parameters need a device: give device=")
            self._block = _resident.allocate(session._native, session._device, self._bytes)
        arena: torch.Tensor = self._block.bytes
        return arena

    def _seal(self, serving: _Serving) -> None:
        session = serving.session
        if self._sealed is session or self._block is None:
            return
        self._sealed = session
        if session._device is not None:
            session._device.synchronize()
        places = self._places[serving.name]
        parts = residents.parts_of(
            [{"names": place.names, "at": place.at, "block": 0, "dtype": str(place.value.dtype),
              "shape": list(place.value.shape), "stride": list(place.value.stride())}
             for place in places],
            tensors_of(self._modules[serving.name]))
        try:
            _resident.seal(session._native, self._key(serving.name),
                           _described(places), [self._block], parts)
        except Error as why:
            warnings.warn(f"the parameters of {serving.name}@{serving.version} are not resident: "
                          f"{why}", stacklevel=3)


def _nothing_to_drain() -> None:
    """Of a worker whose requests end with each step."""


def _built(built: Built) -> torch.nn.Module:
    return built if isinstance(built, torch.nn.Module) else built()


def _places(module: torch.nn.Module) -> list[_Place]:
    """Places one after the other for everything that a version fills, in the module's order."""
    saved = module.state_dict(keep_vars=True).keys()
    places: list[_Place] = []
    at = 0
    for value, names in residents.tensors_by_id(module).values():
        if any(name in saved for name in names):
            places.append(_Place(names, value, at))
            at += residents.aligned(value.numel() * value.element_size())
    return places


def _described(places: list[_Place]) -> bytes:
    """The description of a resident copy with these places."""
    return json.dumps({"tensors": [{"names": place.names, "at": place.at}
                                   for place in places]}).encode()


def _end(places: list[_Place]) -> int:
    if not places:
        return residents.ALIGN
    last = places[-1]
    return max(residents.ALIGN,
               last.at + residents.aligned(last.value.numel() * last.value.element_size()))


def _view(arena: torch.Tensor, at: int, value: torch.Tensor) -> torch.Tensor:
    size = value.numel() * value.element_size()
    return arena[at:at + size].view(value.dtype).view(value.shape)


def _allocate(size: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError) as why:
        raise ExhaustedError(f"{device} has no {size} bytes for the largest of the models: "
                             f"{str(why).splitlines()[0]}") from why

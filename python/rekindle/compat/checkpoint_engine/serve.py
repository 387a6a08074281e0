"""Feeds all workers of an engine on this host."""
from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ... import catalog
from ..._engines.fitting import Contents, difference
from ..._engines.loading import contents_of
from ...errors import InvalidError
from .broadcast import Broadcast
from .buffers import DEFAULT_BYTES, is_cuda
from .channel import private_directory
from .engines import REQUEST_TIMEOUT, Request, engine_request
from .sender import ANSWER_TIMEOUT, sizes
from .update import Rank, Source, Update, deliver


# The contents that this process has given to engines, by URL and name of the model.
_given: dict[tuple[str, str], Contents] = {}
ANY = "any"


@dataclass(frozen=True)
class Served:
    """The result of serve_to: `nbytes` to all devices together, in `elapsed` seconds since the
    request. `passes`: how often each device took the weights; more than once with a draft model.
    """

    model: str
    version: int
    devices: int
    passes: int
    nbytes: int
    elapsed: float


def serve_to(target: str | Request, model: str, version: str | int = "latest", *,
             devices: Sequence[str | torch.device] | None = None, engine: str = "sglang",
             agent: str | os.PathLike[str] | None = None, buffer_bytes: int = DEFAULT_BYTES,
             timeout: float = ANSWER_TIMEOUT, request_timeout: float = REQUEST_TIMEOUT,
             attach_timeout: float = 10.0, directory: str | os.PathLike[str] | None = None,
             headers: Mapping[str, str] | None = None, uds: str | None = None,
             before: str | int | None = None) -> Served:
    """Gives an engine on this host all weights of a version, by checkpoint-engine's protocol.

    target: the engine's URL; or a function of [(device key, address), …], one for each of
        `devices`, that makes the engine's workers receive there, and returns when they have.
    devices: all GPUs of the engine, "cuda:0"…; None: all that this process sees.
    engine: "sglang", "lmdeploy" or "vllm", which decides the request to a URL.
    buffer_bytes: of the buffer on each device; see docs/guides/checkpoint-engine.md.
    timeout: seconds for a worker to connect, for each of its answers, and for a bucket to come.
        request_timeout: for the whole request. attach_timeout: until the version and its sources
        are known.
    directory: where to make a private directory for the sockets. The engine must see it under the
        same path. None: the system's directory for temporary files.
    headers: of the request. uds: a Unix socket to connect to.
    before: the version of the same model that the engine has. None: the version that this process
        last gave to this URL, if any. "any": no check. InvalidError: names, shapes, dtypes or
        quantization settings differ, so the engine's loader could go wrong unnoticed.

    The engine is asked only when every device has found the version (NotFoundError, …).
    ReceiverError: a worker reports an error or died. UnavailableError: the engine refuses or fails.
    TimeoutError: one of the timeouts. All other workers are then told to give up. The engine's
    weights may be of two versions: repeat the call before the engine serves.
    """
    names = _devices(devices)
    store = None if agent is None else os.fspath(agent)
    found = catalog(model, version, agent=agent, timeout=attach_timeout)
    contents, key = contents_of(found), (str(target), found.model)
    _check_same(contents, before, _given.get(key), agent, attach_timeout)
    pinned, update = f"{found.model}@{found.version}", Update()
    # One device alone needs none.
    broadcast = None if len(names) == 1 else Broadcast(
        pinned, uuid.uuid4().hex, len(names), update, agent=store, timeout=attach_timeout)
    with contextlib.ExitStack() as stack:
        sockets = stack.enter_context(private_directory(directory))
        ranks = []
        for index, device in enumerate(names):
            source = Source(pinned, device, sizes(found.tensors), agent=store,
                            attach_timeout=attach_timeout, timeout=timeout, stop=update.failure)
            stack.callback(source.close)
            source.prepare(broadcast, index)
            ranks.append(Rank(source, f"{sockets}/{index}.sock", update, buffer_bytes=buffer_bytes,
                              timeout=timeout))
            stack.callback(ranks[-1].close)
        request = target if callable(target) else engine_request(
            engine, target, str(found.version), timeout=request_timeout, headers=headers, uds=uds)
        started = time.monotonic()
        deliver(ranks, lambda: request([rank.handle for rank in ranks]), update, timeout)
        if not callable(target):
            _given[key] = contents
        return Served(found.model, found.version, len(ranks), ranks[0].passes,
                      sum(rank.nbytes for rank in ranks), time.monotonic() - started)


def _check_same(new: Contents, before: str | int | None, given: Contents | None,
                agent: str | os.PathLike[str] | None, timeout: float) -> None:
    if before == ANY:
        return
    has = given if before is None else contents_of(
        catalog(new.model, before, agent=agent, timeout=timeout))
    found = difference(has, new) if has is not None else ""
    if found:
        raise InvalidError(f"{new} does not fit the engine, which has {has}: {found}; publish the "
                           "same tensors, or start the engine again with the configuration of "
                           f"{new} and say before=\"any\"")


def _devices(devices: Sequence[str | torch.device] | None) -> list[str | torch.device]:
    if devices is None:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    names = [f"cuda:{torch.cuda.current_device()}" if str(device) == "cuda" else device
             for device in devices]
    if not names:
        raise InvalidError("no GPU is visible: name the engine's devices")
    if len({str(name) for name in names}) != len(names):
        raise InvalidError("a device is named twice: each worker of the engine has its own")
    if any(not is_cuda(name) and not str(name).startswith("double:") for name in names):
        raise InvalidError(f"devices are \"cuda:N\", not {', '.join(map(str, names))}")
    return names

"""A rank's registered part of a checkpoint, which is a separate version in Rekindle."""
from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch

from ... import publish, status
from ...command import run
from ...errors import Error, InvalidError, NotFoundError
from .buffers import aligned


class PartMeta(TypedDict):
    """A rank's part: "NAME.part-3@VERSION"; aligned bytes of its largest tensor, and of all."""

    model: str
    tensors: int
    largest: int
    total: int


def register(name: str, rank: int, files: Sequence[str], named: Mapping[str, torch.Tensor],
             agent: str | None, timeout: float) -> PartMeta | None:
    """Publishes the tensors of `files` and `named`, which wins. Returns None when there are none.

    The version is the time in µs, so that registering again makes a new one. Older versions of the
    name are retired: a process that registered them died before it could do so.
    """
    tensors = {**_of_files(files), **named}
    if not tensors:
        return None
    model = f"{name}.part-{rank}@{time.time_ns() // 1000}"
    publish(tensors, model, agent=agent, timeout=timeout)
    with contextlib.suppress(Error):
        # A part that stays is visible in `rekindle status`.
        _retire_older(model, agent)
    nbytes = [aligned(tensor.nbytes) for tensor in tensors.values()]
    return PartMeta(model=model, tensors=len(tensors), largest=max(nbytes), total=sum(nbytes))


def retire(model: str, agent: str | None) -> None:
    """Retires a version on this host, and with a coordinator on all hosts. Ignores that it is gone.
    """
    store = ["--store", agent] if agent else []
    with contextlib.suppress(NotFoundError):
        # Right after publishing, the coordinator may not know the part yet.
        run("retire", model, *store)
    coordinator = _coordinator(agent)
    if coordinator:
        with contextlib.suppress(NotFoundError):
            run("retire", model, *store, "--coordinator", coordinator, "--everywhere")


def _retire_older(model_version: str, agent: str | None) -> None:
    model, _, version = model_version.rpartition("@")
    older = {entry["version"] for entry in _known(agent)
             if entry["model"] == model and entry["version"] < int(version)}
    for number in older:
        retire(f"{model}@{number}", agent)


def _known(agent: str | None) -> list[dict[str, Any]]:
    """Returns the versions of this host, and with a coordinator those of the fleet."""
    here = status(agent=agent)
    coordinator = _coordinator(agent)
    fleet = status(agent=agent, coordinator=coordinator) if coordinator else {}
    return [*here.get("holdings", []), *here.get("versions", []), *fleet.get("versions", [])]


def _coordinator(agent: str | None) -> str:
    return os.environ.get("REKINDLE_COORDINATOR") or status(agent=agent).get("coordinator", "")


def _of_files(files: Sequence[str]) -> dict[str, Any]:
    from safetensors import safe_open
    tensors: dict[str, Any] = {}
    for path in files:
        if not str(path).endswith(".safetensors"):
            raise InvalidError(f"{path}: only .safetensors files can be registered")
        if not os.path.isfile(path):
            raise InvalidError(f"{path}: no such file")
        with safe_open(path, framework="pt") as opened:  # mapped: nothing is read yet
            tensors |= {key: opened.get_tensor(key) for key in opened.keys()}
    return tensors

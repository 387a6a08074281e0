"""The tensors that one rank has registered, and the version that all ranks publish of theirs."""
from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch

from ... import attach, publisher, status
from ..._host_copies import HostCopies
from ..._views import memory
from ...command import run
from ...errors import Error, InvalidError, NotFoundError
from ...publication import _Source
from .buffers import aligned


class PartMeta(TypedDict):
    """A rank's part of a checkpoint: the version of all parts, "NAME.checkpoint@VERSION"; the
    number of the part's tensors; aligned bytes of the largest of them, and of all."""

    model: str
    tensors: int
    largest: int
    total: int


class Said(TypedDict):
    """What a rank says of its registration. ranks: that have published `model` together."""

    part: PartMeta
    ranks: list[int]
    now: int


class Registration:
    """One rank's part. In this process until it is published, then in the agents."""

    def __init__(self, name: str, files: Sequence[str], named: Mapping[str, torch.Tensor]) -> None:
        """Copies `named`, which wins over `files`. Files are mapped.

        InvalidError: nothing could publish these, or the name is none of a model."""
        if not re.fullmatch(r"[A-Za-z0-9._/+-]+", name):
            raise InvalidError(f"'{name}' is no model name: use A-Z a-z 0-9 . _ / + and -")
        tensors = {**_of_files(files), **named}
        for key, tensor in tensors.items():
            _Source(key, tensor)
        nbytes = [aligned(tensor.nbytes) for tensor in tensors.values()]
        self.name = name
        # Sizes may be read when nothing is registered.
        self.part = PartMeta(model="", tensors=len(tensors), largest=max(nbytes, default=0),
                             total=sum(nbytes))
        self.ranks: list[int] = []
        self._keys = list(tensors)
        self._tensors: Mapping[str, torch.Tensor] = {**tensors, **_copies(named)}

    def said(self) -> Said:
        return Said(part=self.part, ranks=self.ranks, now=time.time_ns() // 1000)

    def publish(self, model: str, rank: int, ranks: list[int], agent: str | None,
                timeout: float) -> None:
        """Publishes it with the other `ranks`, which do the same at the same time."""
        with contextlib.ExitStack() as stack:
            tensors = self._tensors
            if self.part["model"]:
                session = stack.enter_context(attach(
                    self.part["model"], None, shard=list(self._keys), agent=agent, timeout=timeout,
                    rank=0, world=1))
                tensors = dict(session)
            with publisher(model, rank=ranks.index(rank), world=len(ranks), agent=agent) as joint:
                for key, tensor in tensors.items():
                    joint.add(key, tensor)
                joint.commit(timeout)
        self.part["model"], self.ranks = model, ranks
        self._tensors = {}


def agreed(name: str, everyone: Sequence[Said | None]) -> tuple[str, list[int], bool]:
    """Returns the version of all parts, the ranks that have one, and whether they have yet to
    publish it. The version is the time in µs, so that publishing again makes a new one."""
    said = {rank: one for rank, one in enumerate(everyone) if one is not None}
    ranks = list(said)
    models = {one["part"]["model"] for one in said.values()}
    same = all(one["ranks"] == ranks for one in said.values())
    if same and len(models) == 1 and "" not in models:
        return models.pop(), ranks, False
    return f"{name}.checkpoint@{max(one['now'] for one in said.values())}", ranks, True


def retire(model: str, agent: str | None) -> None:
    """Retires a version on this host, and with a coordinator on all hosts. Ignores that it is gone.
    """
    store = ["--store", agent] if agent else []
    with contextlib.suppress(NotFoundError):
        # Right after publishing, the coordinator may not know the version yet.
        run("retire", model, *store)
    coordinator = _coordinator(agent)
    if coordinator:
        with contextlib.suppress(NotFoundError):
            run("retire", model, *store, "--coordinator", coordinator, "--everywhere")


def retire_older(model_version: str, agent: str | None) -> None:
    """Retires versions of the name that processes have published which died before they could
    retire them. One that stays is visible in `rekindle status`."""
    model, _, version = model_version.rpartition("@")
    with contextlib.suppress(Error):
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


def _copies(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns copies in host memory: the caller may change or drop its tensors."""
    copied = {key: torch.empty(tensor.shape, dtype=tensor.dtype) for key, tensor in named.items()}
    with HostCopies(streaming=False) as copies:
        for key, tensor in named.items():
            copies.add(tensor, memory(copied[key].data_ptr(), tensor.nbytes))
        copies.finish()
    return copied


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

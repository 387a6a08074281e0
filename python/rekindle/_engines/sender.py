"""The trainer's side of a checkpoint engine: its ranks publish one version after the other."""
from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import torch

import rekindle
from rekindle import command, dtypes
from rekindle._parts import Part
from rekindle.torch import cast, parts_of

from .sharded_weights import ShardedWeights, gathered, is_distributed, share_of
from .writer import Spec, Writer

logger = logging.getLogger("rekindle")


class SenderOptions(NamedTuple):
    """`agent`: the store of this host's agent. `dtype`: of floating point weights; None: unchanged.
    `in_parts`: "auto", "on", "spread" or "off", as in docs/guides/engines.md. `keep`: how many
    versions of this trainer the fleet keeps; 0: all. `coordinator` retires the others. `hint`: how
    the framework is told to give shards. Times are seconds."""

    model: str
    agent: str | None
    dtype: torch.dtype | None
    in_parts: str | bool
    keep: int
    coordinator: str | None
    timeout: float
    hint: str


class Turn(NamedTuple):
    """One version, and the part that this rank takes in it."""

    version: int
    rank: int  # among the trainers
    world: int
    # The first rank publishes gathered tensors, and retires old versions.
    is_first: bool


class Sender:
    """One trainer rank. For one thread."""

    def __init__(self, options: SenderOptions, is_first: bool) -> None:
        """InvalidError: a bad option. `is_first`: whether this is the trainer's first rank."""
        coordinator = options.coordinator or os.environ.get("REKINDLE_COORDINATOR")
        if is_first and options.keep and not coordinator:
            raise rekindle.InvalidError("old versions leave the fleet through its coordinator: say "
                                        "coordinator, or keep=0 to keep them all")
        # YAML reads a bare on and off as booleans.
        in_parts = options.in_parts
        if isinstance(in_parts, bool):
            in_parts = "on" if in_parts else "off"
        if in_parts not in ("auto", "on", "spread", "off"):
            raise rekindle.InvalidError(
                f"in_parts is {options.in_parts!r}: give auto, on, spread or off")
        self._options = options._replace(in_parts=in_parts, coordinator=coordinator)
        self._turn = Turn(0, 0, 1, is_first)
        self._said_why = False
        self._specs: list[Spec] = []  # of the last version
        self._published: list[int] = []

    @torch.no_grad()
    def send(self, turn: Turn, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        """Publishes the version of `turn`. Every trainer rank calls it. Returns metrics, on the
        first rank.

        If the weights are shards, every rank publishes its own, and the call returns when the
        version is ready. Otherwise the first rank publishes, and the others only run through the
        generator, for its collectives. Laying out segments needs names and shapes of all tensors,
        but the generator gives them one by one. So the first call gathers them in host memory (the
        size of the model, besides the segments). Later calls write them into segments as they come,
        if names, shapes and dtypes are the same."""
        begun = time.perf_counter()
        self._turn = turn
        parts, whole = self._split(weights)
        if parts is not None:
            self._publish_parts(parts)
        elif turn.is_first:
            # The generator may use collectives, so it must run in this thread.
            self._publish(self._converted(whole))
        else:
            for _ in whole:
                pass
        if not turn.is_first:
            return {}
        self._published.append(turn.version)
        return {"rekindle/publish_s": time.perf_counter() - begun,
                "rekindle/version": float(turn.version),
                "rekindle/publishing_ranks": float(1 if parts is None else turn.world)}

    def retire(self) -> None:
        """Retires all but the newest `keep` versions that this rank has published as the first."""
        options = self._options
        while options.keep and len(self._published) > options.keep:
            old = self._published.pop(0)
            with contextlib.suppress(rekindle.NotFoundError):  # already retired
                command.run("retire", f"{options.model}@{old}", "--everywhere", "--coordinator",
                            str(options.coordinator), timeout=options.timeout)

    @property
    def _model_version(self) -> str:
        return f"{self._options.model}@{self._turn.version}"

    def _split(self, weights: Iterable[tuple[str, torch.Tensor]]
               ) -> tuple[list[Part] | None, Iterator[tuple[str, torch.Tensor]]]:
        """Returns the parts of this rank, or None and whole tensors. All ranks get the same kind
        of weights, so they decide alike."""
        if self._options.in_parts == "off":
            return None, gathered(weights)
        if isinstance(weights, ShardedWeights):
            return weights.parts(), iter(())
        tensors = iter(weights)
        # A generator of DTensors gathers nothing. One of whole tensors gathers the first one here.
        first = next(tensors, None)
        if first is not None and is_distributed(first[1]):
            return parts_of(dict(chain([first], tensors))), iter(())
        why = f"the training engine gives gathered tensors. {self._options.hint}"
        if self._options.in_parts == "on":
            raise rekindle.InvalidError(f"in_parts=on, but {why}")
        whole = chain([] if first is None else [first], gathered(tensors))
        if self._options.in_parts == "spread":
            return share_of(self._turn.rank, self._turn.world, self._converted(whole)), iter(())
        if self._turn.is_first and not self._said_why:
            self._said_why = True
            logger.warning("rekindle: the first rank publishes all weights: %s", why)
        return None, whole

    def _publish_parts(self, parts: list[Part]) -> None:
        if self._options.dtype is not None:
            parts = parts_of(parts, convert=cast(dtypes.dtype_name(self._options.dtype)))
        with rekindle.publisher(self._model_version, rank=self._turn.rank, world=self._turn.world,
                                agent=self._options.agent) as publication:
            for part in parts:
                publication.add_part(part)
            publication.commit(self._options.timeout)

    def _converted(self, weights: Iterable[tuple[str, torch.Tensor]]
                   ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            convert = self._options.dtype is not None and tensor.is_floating_point()
            yield name, tensor.to(self._options.dtype) if convert else tensor

    def _publish(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        rest: list[tuple[str, torch.Tensor]] = []
        if self._specs and self._stream(weights, rest):
            return
        held = {name: tensor.to("cpu", copy=True) for name, tensor in chain(rest, weights)}
        self._specs = [_spec(name, tensor) for name, tensor in held.items()]
        rekindle.publish(held, self._model_version, agent=self._options.agent,
                         timeout=self._options.timeout)

    def _stream(self, weights: Iterator[tuple[str, torch.Tensor]],
                rest: list[tuple[str, torch.Tensor]]) -> bool:
        """Publishes tensors as they come. False: they differ from those of the last time; `rest`
        then has the tensors taken so far."""
        with Writer(self._model_version, self._specs, self._options.agent) as writer:
            expected = iter(self._specs)
            written: list[Spec] = []
            for name, tensor in weights:
                if next(expected, None) != _spec(name, tensor):
                    rest.extend((spec.name, writer.written(spec.name)) for spec in written)
                    rest.append((name, tensor))
                    return False
                writer.write(name, tensor)
                written.append(self._specs[len(written)])
            if len(written) == len(self._specs):
                writer.commit(self._options.timeout)
                return True
            rest.extend((spec.name, writer.written(spec.name)) for spec in written)
        return False


def _spec(name: str, tensor: torch.Tensor) -> Spec:
    return Spec(name, tensor.dtype, tuple(tensor.shape))

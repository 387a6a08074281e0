"""verl's CheckpointEngine over Rekindle: trainers publish, rollout workers attach.

There is no process group. If the training engine gives shards (`training`), every trainer rank
publishes its own; if it gives gathered tensors, the first rank publishes them. Rollout workers
attach to the version on the agents of their hosts, which pull it from each other. So a replica that
is added, lost or restarted affects no other replica, and a restarted one has its weights in its
host's memory.
"""
from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache

import rekindle
from rekindle import command, dtypes
from rekindle._engines.writer import Spec, Writer
from rekindle._parts import Part
from rekindle.torch import cast, parts_of

from .sharded import ShardedWeights, is_distributed, share_of

logger = logging.getLogger("rekindle")

@CheckpointEngineRegistry.register("rekindle")
class RekindleCheckpointEngine(CheckpointEngineWithCache):
    """`model`: its name in Rekindle. `agent`: the store of this host's agent. `device`: the device
    of the rollout workers' tensors: "cuda", "cpu" or a double; None: "cuda" where there is one.
    `rollout_dtype`: the dtype in which floating point weights are published; None: unchanged.
    `in_parts`: "auto": every trainer rank publishes its shards if the training engine gives them
    (`rekindle.verl.training`, or DTensors), otherwise the first rank publishes all; "on": an error
    in the second case; "spread": in the second case, every rank publishes some of the gathered
    tensors; "off": the first rank publishes all.
    `keep`: how many of this trainer's versions the fleet keeps; 0: all. `coordinator` (HOST:PORT,
    or REKINDLE_COORDINATOR) retires the others.
    `bucket_size` is verl's, in bytes; Rekindle's buckets are at most 256 MiB. Times are seconds."""

    wire_format = "named_tensors"

    def __init__(self, bucket_size: int, model: str, *, is_master: bool = False,
                 agent: str | None = None, coordinator: str | None = None,
                 device: str | None = None,
                 rollout_dtype: str | torch.dtype | None = torch.bfloat16, keep: int = 2,
                 in_parts: str | bool = "auto", timeout: float = 600.0, **unknown: Any) -> None:
        if unknown:
            raise rekindle.InvalidError(
                f"unknown key '{min(unknown)}' in engine_kwargs of the checkpoint engine rekindle")
        self._coordinator = coordinator or os.environ.get("REKINDLE_COORDINATOR")
        if is_master and keep and not self._coordinator:
            raise rekindle.InvalidError("old versions leave the fleet through its coordinator: say "
                                        "coordinator, or keep=0 to keep them all")
        # YAML reads a bare on and off as booleans.
        self._in_parts = {True: "on", False: "off"}.get(in_parts, in_parts)
        if self._in_parts not in ("auto", "on", "spread", "off"):
            raise rekindle.InvalidError(f"in_parts is {in_parts!r}: give auto, on, spread or off")
        self._model, self._agent, self._timeout, self._keep = model, agent, timeout, keep
        self._bucket_bytes = min(bucket_size, 256 << 20)
        self._device = device if device is not None else (
            "cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = (getattr(torch, rollout_dtype) if isinstance(rollout_dtype, str)
                       else rollout_dtype)
        self._is_master = is_master
        self._version = 0
        self._sender = False
        self._rank, self._world = 0, 1  # among the trainers
        self._said_why = False
        self._specs: list[Spec] = []  # of the last version
        self._published: list[int] = []

    # --- verl's manager calls these on every worker, in this order, at each update

    def prepare(self) -> dict[str, Any]:
        """Returns the next version, on the trainer's first rank. It is the time in milliseconds, so
        it is later than any before, also of a trainer that was restarted and repeats steps."""
        if not self._is_master:
            return {}
        return {"version": max(self._version + 1, time.time_ns() // 1_000_000)}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int,
                       metadata: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tells every worker the version, every trainer its rank among the trainers, and the
        trainer's first rank that it sends what is gathered."""
        version = next((said["version"] for said in metadata[:actor_wg_world_size] if said), None)
        if version is None:
            raise rekindle.InvalidError("no trainer rank was made with is_master=True")
        senders = [bool(said) for said in metadata[:actor_wg_world_size]]
        return ({"version": [version] * actor_wg_world_size, "sender": senders,
                 "rank": list(range(actor_wg_world_size)),
                 "world": [actor_wg_world_size] * actor_wg_world_size},
                {"version": [version] * rollout_world_size,
                 "sender": [False] * rollout_world_size})

    def init_process_group(self, version: int, sender: bool, rank: int = 0,
                           world: int = 1) -> None:
        self._version, self._sender = version, sender
        self._rank, self._world = rank, world

    def finalize(self) -> None:
        """Retires all but the newest `keep` versions that the trainer's first rank has
        published."""
        while self._keep and len(self._published) > self._keep:
            old = self._published.pop(0)
            with contextlib.suppress(rekindle.NotFoundError):  # already retired
                command.run("retire", f"{self._model}@{old}", "--everywhere", "--coordinator",
                            str(self._coordinator), timeout=self._timeout)

    # --- the trainer

    @torch.no_grad()
    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]],
                           global_steps: int | None = None) -> dict[str, float]:
        """Publishes the weights that `get_per_tensor_param()` of the training engine gives. Every
        trainer rank calls it.

        If these are shards, every rank publishes its own, and the call returns when the version is
        ready. Otherwise the first rank publishes, and the others only run through the generator,
        for its collectives. Laying out segments needs names and shapes of all tensors, but the
        generator gives them one by one. So the first call gathers them in host memory (the size of
        the model, besides the segments). Later calls write them into segments as they come, if
        names, shapes and dtypes are the same."""
        begun = time.perf_counter()
        parts, whole = self._split(weights)
        if parts is not None:
            self._publish_parts(parts)
        elif self._sender:
            # The generator may use collectives, so it must run in this thread.
            self._publish(self._converted(whole))
        else:
            for _ in whole:
                pass
        if not self._sender:
            return {}
        self._published.append(self._version)
        return {"rekindle/publish_s": time.perf_counter() - begun,
                "rekindle/version": float(self._version),
                "rekindle/publishing_ranks": float(1 if parts is None else self._world)}

    def _split(self, weights: Iterable[tuple[str, torch.Tensor]]
               ) -> tuple[list[Part] | None, Iterator[tuple[str, torch.Tensor]]]:
        """Returns the parts of this rank, or None and whole tensors. All ranks get the same kind
        of weights, so they decide alike."""
        if self._in_parts == "off":
            return None, _whole(weights)
        if isinstance(weights, ShardedWeights):
            return weights.parts(), iter(())
        tensors = iter(weights)
        # A generator of DTensors gathers nothing. One of whole tensors gathers the first one here.
        first = next(tensors, None)
        if first is not None and is_distributed(first[1]):
            return parts_of(dict(chain([first], tensors))), iter(())
        why = ("the training engine gives gathered tensors. To publish shards, set "
               "model.external_lib=rekindle.verl.training and VERL_ENGINE_VENDOR=rekindle")
        if self._in_parts == "on":
            raise rekindle.InvalidError(f"in_parts=on, but {why}")
        whole = chain([] if first is None else [first], _whole(tensors))
        if self._in_parts == "spread":
            return share_of(self._rank, self._world, self._converted(whole)), iter(())
        if self._sender and not self._said_why:
            self._said_why = True
            logger.warning("rekindle: the first rank publishes all weights: %s", why)
        return None, whole

    def _publish_parts(self, parts: list[Part]) -> None:
        if self._dtype is not None:
            parts = parts_of(parts, convert=cast(dtypes.dtype_name(self._dtype)))
        with rekindle.publisher(f"{self._model}@{self._version}", rank=self._rank,
                                world=self._world, agent=self._agent) as publication:
            for part in parts:
                publication.add_part(part)
            publication.commit(self._timeout)

    def _converted(self, weights: Iterable[tuple[str, torch.Tensor]]
                   ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            convert = self._dtype is not None and tensor.is_floating_point()
            yield name, tensor.to(self._dtype) if convert else tensor

    def _publish(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        model_version = f"{self._model}@{self._version}"
        rest: list[tuple[str, torch.Tensor]] = []
        if self._specs and self._stream(model_version, weights, rest):
            return
        held = {name: tensor.to("cpu", copy=True) for name, tensor in chain(rest, weights)}
        self._specs = [_spec(name, tensor) for name, tensor in held.items()]
        rekindle.publish(held, model_version, agent=self._agent, timeout=self._timeout)

    def _stream(self, model_version: str, weights: Iterator[tuple[str, torch.Tensor]],
                rest: list[tuple[str, torch.Tensor]]) -> bool:
        """Publishes tensors as they come. False: they differ from those of the last time; `rest`
        then has the tensors taken so far."""
        with Writer(model_version, self._specs, self._agent) as writer:
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
                writer.commit(self._timeout)
                return True
            rest.extend((spec.name, writer.written(spec.name)) for spec in written)
        return False

    # --- rollout workers

    async def receive_weights(self, global_steps: int | None = None
                              ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) of the version, as they arrive. The caller reads each tensor before
        it takes the next one, on the stream that is current here.

        TimeoutError: the trainer has not published the version after `timeout` seconds."""
        async for pair in self._read(self._version):
            yield pair

    async def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields the newest ready version, from the memory of this host or another one, for a
        worker that comes back between updates."""
        async for pair in self._read("latest"):
            yield pair

    async def _read(self, version: int | str) -> AsyncIterator[tuple[str, torch.Tensor]]:
        device = None if self._device == "cpu" else self._device
        stream = None
        if device == "cuda":
            # The current device belongs to a thread. Other threads have another one.
            device = f"cuda:{torch.cuda.current_device()}"
        if device and device.startswith("cuda"):
            stream = torch.cuda.current_stream(device)
        session = await asyncio.to_thread(self._attach, version, device, stream)
        try:
            buckets = session.buckets(self._timeout)
            while (bucket := await asyncio.to_thread(next, buckets, None)) is not None:
                for pair in bucket:
                    yield pair
            session.loaded()
        finally:
            session.close()

    def _attach(self, version: int | str, device: str | None, stream: Any) -> rekindle.Session:
        """Attaches. Waits for a version that is still being published."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return rekindle.attach(
                    self._model, version, device=device, stream=stream, agent=self._agent,
                    bucket_bytes=self._bucket_bytes if device else 0,
                    timeout=min(10.0, max(0.0, deadline - time.monotonic())))
            except (rekindle.NotFoundError, rekindle.UnavailableError, TimeoutError) as why:
                if time.monotonic() >= deadline:
                    raise rekindle.TimeoutError(
                        f"{self._model}@{version} has not come in {self._timeout} s: {why}"
                    ) from why
                # Bounds the rate of calls if the agent answers at once.
                time.sleep(0.02)


def _spec(name: str, tensor: torch.Tensor) -> Spec:
    return Spec(name, tensor.dtype, tuple(tensor.shape))


def _whole(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathers DTensors as they come."""
    for name, tensor in weights:
        yield name, tensor.full_tensor() if is_distributed(tensor) else tensor

"""verl's CheckpointEngine over Rekindle: trainers publish, rollout workers attach.

There is no process group. If the training engine gives shards (`training`), every trainer rank
publishes its own; if it gives gathered tensors, the first rank publishes them. Rollout workers
attach to the version on the agents of their hosts, which pull it from each other. So a replica that
is added, lost or restarted affects no other replica, and a restarted one has its weights in its
host's memory.
"""
from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache

import rekindle
from rekindle._engines.receiver import Receiver
from rekindle._engines.sender import Sender, SenderOptions, Turn


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
        self._sender = Sender(SenderOptions(
            model, agent, getattr(torch, rollout_dtype) if isinstance(rollout_dtype, str)
            else rollout_dtype, in_parts, keep, coordinator, timeout,
            "To publish shards, set model.external_lib=rekindle.verl.training and "
            "VERL_ENGINE_VENDOR=rekindle"), is_master)
        self._receiver = Receiver(model, agent, device, bucket_size, timeout)
        self._is_master = is_master
        self._turn = Turn(0, 0, 1, False)

    # --- verl's manager calls these on every worker, in this order, at each update

    def prepare(self) -> dict[str, Any]:
        """Returns the next version, on the trainer's first rank. It is the time in milliseconds, so
        it is later than any before, also of a trainer that was restarted and repeats steps."""
        if not self._is_master:
            return {}
        return {"version": max(self._turn.version + 1, time.time_ns() // 1_000_000)}

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
        self._turn = Turn(version, rank, world, sender)

    def finalize(self) -> None:
        """Retires all but the newest `keep` versions that the trainer's first rank has
        published."""
        self._sender.retire()

    # --- the trainer

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]],
                           global_steps: int | None = None) -> dict[str, float]:
        """Publishes the weights that `get_per_tensor_param()` of the training engine gives
        (`Sender.send`). Every trainer rank calls it."""
        return self._sender.send(self._turn, weights)

    # --- rollout workers

    async def receive_weights(self, global_steps: int | None = None
                              ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) of the version, as they arrive. The caller reads each tensor before
        it takes the next one, on the stream that is current here.

        TimeoutError: the trainer has not published the version after `timeout` seconds."""
        async for bucket in self._receiver.buckets(self._turn.version):
            for pair in bucket:
                yield pair

    async def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields the newest ready version, from the memory of this host or another one, for a
        worker that comes back between updates."""
        async for bucket in self._receiver.buckets("latest"):
            for pair in bucket:
                yield pair

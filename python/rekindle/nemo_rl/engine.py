"""NeMo-RL's CheckpointEngine over Rekindle: policy workers publish, vLLM's workers attach.

NeMo-RL prepares its engines once, and then calls send_weights() and receive_weight_batches() once
on every worker at each refit. So every worker counts the refits, and they agree on a version
without another call: it is the number that the first policy worker gave, plus the count.
"""
from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import torch
from nemo_rl.utils.checkpoint_engines import base

import rekindle
from rekindle._engines.receiver import Receiver
from rekindle._engines.sender import Sender, SenderOptions, Turn


class CheckpointEngine(base.CheckpointEngine):
    """`model`: its name in Rekindle. `agent`: the store of this host's agent. `device`: of the
    tensors that vLLM's workers get: "cuda", "cpu" or a double; None: "cuda" where there is one.
    `dtype`: in which floating point weights are published; None: as NeMo-RL gives them.
    `in_parts`, `keep` and `coordinator`: as those of the checkpoint engine for verl.
    `bucket_size` and `release_after_refit` are NeMo-RL's. Times are seconds."""

    def __init__(self, bucket_size: int, model: str, *, agent: str | None = None,
                 coordinator: str | None = None, device: str | None = None,
                 dtype: str | None = None, in_parts: str | bool = "auto", keep: int = 2,
                 timeout: float = 600.0, release_after_refit: bool = False,
                 **unknown: Any) -> None:
        if unknown:
            raise rekindle.InvalidError(
                f"unknown key '{min(unknown)}' in refit_cfg of the checkpoint engine of Rekindle")
        self._options = SenderOptions(
            model, agent, getattr(torch, dtype) if dtype else None, in_parts, keep, coordinator,
            timeout, "To publish shards, give a worker whose _checkpoint_engine_params() returns "
            "ShardedWeights")
        self._sender: Sender | None = None
        self._receiver = Receiver(model, agent, device, bucket_size, timeout)
        self._turn = Turn(0, 0, 1, False)

    def prepare(self) -> dict[str, Any]:
        """Returns a number that is later than every version before, also of a trainer that was
        restarted: the time in milliseconds. That of the first policy worker counts."""
        return {"version": max(self._turn.version, time.time_ns() // 1_000_000)}

    def init_policy_process_group(self, *, worker_rank: int, train_world_size: int,
                                  rollout_world_size: int, metadata: list[Any]) -> None:
        self._turn = Turn(metadata[0]["version"], worker_rank, train_world_size, worker_rank == 0)
        if self._sender is None:
            self._sender = Sender(self._options, self._turn.is_first)

    def init_rollout_process_group(self, *, rollout_rank: int, train_world_size: int,
                                   rollout_world_size: int, metadata: list[Any]) -> None:
        self._turn = Turn(metadata[0]["version"], 0, 1, False)

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publishes the next version (`Sender.send`), and retires old ones. Every policy worker
        calls it."""
        if self._sender is None:
            raise rekindle.InvalidError("init_policy_process_group() has not been called")
        self._count()
        self._sender.send(self._turn, weights)
        self._sender.retire()

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yields the next version in batches, as they arrive. The caller reads the tensors of a
        batch before it takes the next one, on the stream that is current here.

        TimeoutError: the trainer has not published the version after `timeout` seconds."""
        self._count()
        async for bucket in self._receiver.buckets(self._turn.version):
            yield list(bucket)

    def _count(self) -> None:
        # Also if the refit fails: NeMo-RL has then called every worker, too.
        self._turn = self._turn._replace(version=self._turn.version + 1)

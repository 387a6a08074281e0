"""verl: the checkpoint engine `rekindle`.

    actor_rollout_ref.rollout.checkpoint_engine.backend=rekindle
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=rekindle.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rekindle.model=qwen3

Importing this module registers it, so it needs verl. See docs/guides/engines.md.
"""
from __future__ import annotations

from rekindle._engines.sharded_weights import ShardedWeights

from .engine import RekindleCheckpointEngine
from .sharded import fsdp_parts

__all__ = ["RekindleCheckpointEngine", "ShardedWeights", "fsdp_parts"]

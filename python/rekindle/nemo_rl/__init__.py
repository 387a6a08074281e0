"""NeMo-RL: the checkpoint engine `rekindle.nemo_rl:CheckpointEngine`.

    policy.generation.refit_transport: rekindle.nemo_rl:CheckpointEngine
    policy.generation.refit_cfg: {"rekindle.nemo_rl:CheckpointEngine": {model: qwen3}}

Needs NeMo-RL. See docs/guides/engines.md.
"""
from __future__ import annotations

from rekindle._engines.sharded_weights import ShardedWeights

from .engine import CheckpointEngine

__all__ = ["CheckpointEngine", "ShardedWeights"]

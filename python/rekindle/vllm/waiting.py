"""Where a standby of vLLM waits: before it measures the free memory of its GPU.

Its loader would be too late, because the worker that it replaces still has that memory.
"""
from __future__ import annotations

import gc
from typing import Any

from .. import standby


def wait_in_standby() -> None:
    """Has the workers of a standby wait for their turn in `init_device`. Does nothing elsewhere."""
    if not standby.is_standby():
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase
    init_device = WorkerWrapperBase.init_device
    if getattr(init_device, "waits", False):
        return

    def waits_first(self: Any) -> Any:
        _start_up(self)
        standby.wait()
        return init_device(self)

    waits_first.waits = True  # type: ignore[attr-defined]
    WorkerWrapperBase.init_device = waits_first


def _start_up(wrapper: Any) -> None:
    """Does what takes time and little of the GPU's memory: CUDA, and the imports of the model."""
    import torch
    from vllm.model_executor.model_loader.utils import get_model_architecture
    from vllm.v1.worker import gpu_model_runner  # noqa: F401
    get_model_architecture(wrapper.vllm_config.model_config)
    gpu = _gpu(wrapper.worker.local_rank, wrapper.vllm_config.parallel_config)
    if torch.cuda.is_available() and gpu < torch.cuda.device_count():
        torch.zeros(1, device=f"cuda:{gpu}")
    # vLLM collects garbage several times between the takeover and the first token. These
    # collections need not look at what the imports have made.
    gc.collect()
    gc.freeze()


def _gpu(local_rank: int, parallel: Any) -> int:
    """Returns the GPU that vLLM's `init_device` will choose: replicas of one host have theirs one
    after the other."""
    if (parallel.distributed_executor_backend in ("ray", "external_launcher")
            or getattr(parallel, "data_parallel_backend", "mp") == "ray"
            or getattr(parallel, "nnodes_within_dp", 1) != 1):
        return local_rank
    replica: int | None = parallel.data_parallel_rank_local
    if replica is None:
        replica = getattr(parallel, "data_parallel_index", 0)
    return local_rank + replica * parallel.pipeline_parallel_size * parallel.tensor_parallel_size

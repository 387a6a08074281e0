"""Where a standby of vLLM waits: before it measures the free memory of its GPU.

Its loader would be too late, because the worker that it replaces still has that memory.
"""
from __future__ import annotations

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
    if torch.cuda.is_available():
        torch.zeros(1, device=f"cuda:{wrapper.worker.local_rank}")

"""Updates of a running vLLM: `--worker-extension-cls rekindle.vllm.WorkerExtension`.

vLLM mixes the class into its Worker, which must not have any of its names: hence the prefix. Called
on all ranks by `LLM.collective_rpc("rekindle_update", args=(42,))` or `POST /collective_rpc`.
"""
from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Methods of every vLLM worker. They return what JSON can say."""

    def rekindle_status(self) -> dict[str, Any]:
        """What this worker's weights are: {"target": {"model", "version", "rung", …}, …}, and
        "draft" when it has one that came through Rekindle."""
        from .updating import status
        return status()

    def rekindle_wait_for_update(self, timeout: float = 0.0) -> int | None:
        """The version to move to: a newer one, or of an update that has begun for the group; None
        when there is none in `timeout` seconds. The worker does nothing else meanwhile."""
        from .updating import wait_for_update
        return wait_for_update(timeout)

    def rekindle_update(self, version: str | int = "latest",
                        options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Loads a version into the running model, layer by layer, and waits until all ranks of the
        instance have it. No request may run meanwhile: pause the engine.

        `options`: keys of the extra configuration, for an engine that was not started with
        `--load-format rekindle`. A draft model is updated through the weight transfer backend.
        Returns {"model", "version", "tensors", "bytes", "rung", "seconds"}; InvalidError names the
        parameters that the version has not all weights of."""
        from .updating import update
        return update(self, version, options)

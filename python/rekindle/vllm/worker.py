"""Updates of a running vLLM: `--worker-extension-cls rekindle.vllm.WorkerExtension`.

vLLM mixes the class into its Worker. The prefix keeps its names apart from those of the Worker.
`LLM.collective_rpc("rekindle_update", args=(42,))` or `POST /collective_rpc` calls a method on all
ranks.
"""
from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Methods of every vLLM worker. Their results can be written as JSON."""

    def rekindle_status(self) -> dict[str, Any]:
        """Returns the state of this worker's weights: {"target": {"model", "version", "rung", …},
        …}, and "draft" if one came through Rekindle."""
        from .updating import status
        return status()

    def rekindle_wait_for_update(self, timeout: float = 0.0) -> int | None:
        """Returns the version to move to: a newer one, or that of an update that has begun for the
        group; None when there is none in `timeout` seconds. Blocks the worker meanwhile."""
        from .updating import wait_for_update
        return wait_for_update(timeout)

    def rekindle_stage(self, version: str | int = "latest",
                       options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Checks that a version fits the running model, and begins to take it into memory beside
        the one that serves. Returns before it is there; requests may run. All ranks call it.

        Returns {"model", "version", "staged", "why_not", "phases"}. `why_not`: the version will be
        loaded by `rekindle_switch` instead. With {"staging": "require"} in the options,
        ExhaustedError instead. InvalidError names what does not fit."""
        from .updating import stage
        return stage(self, version, options)

    def rekindle_staged(self, timeout: float = 0.0) -> dict[str, Any]:
        """Returns what `rekindle_stage` returns, as it is now. Blocks the worker for at most
        `timeout` seconds, until every byte is there."""
        from .._engines.staging import staged_status
        return staged_status("target", timeout)

    def rekindle_unstage(self) -> None:
        """Gives up the version that was staged."""
        from .._engines.staging import unstage
        unstage("target")

    def rekindle_switch(self) -> dict[str, Any]:
        """Loads the staged version, and waits until all ranks of the instance have it. No request
        may run meanwhile: pause the engine. Returns what `rekindle_update` returns, and "phases" in
        seconds."""
        from .updating import switch
        return switch(self)

    def rekindle_update(self, version: str | int = "latest",
                        options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Loads a version into the running model, layer by layer, and waits until all ranks of the
        instance have it. No request may run meanwhile: pause the engine.

        `options`: keys of the extra configuration, for an engine that was not started with
        `--load-format rekindle`. A draft model is updated through the weight transfer backend.
        Returns {"model", "version", "tensors", "bytes", "rung", "seconds"}. InvalidError names
        parameters for which the version lacks weights."""
        from .updating import update
        return update(self, version, options)

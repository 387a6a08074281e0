"""The rollout workers' side of a checkpoint engine: they attach to what the trainers publish."""
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch

import rekindle


class Receiver:
    """One rollout worker."""

    def __init__(self, model: str, agent: str | None, device: str | None, bucket_bytes: int,
                 timeout: float) -> None:
        """`device`: of the tensors: "cuda", "cpu" or a double; None: "cuda" where there is one.
        Rekindle's buckets are at most 256 MiB."""
        self._model, self._agent, self._timeout = model, agent, timeout
        self._bucket_bytes = min(bucket_bytes, 256 << 20)
        self._device = device if device is not None else (
            "cuda" if torch.cuda.is_available() else "cpu")

    async def buckets(self, version: int | str
                      ) -> AsyncIterator[Iterable[tuple[str, torch.Tensor]]]:
        """Yields the tensors of a version, or of the newest ready one ("latest"), as they arrive.
        The caller reads the tensors of a bucket before it takes the next one, on the stream that
        is current here.

        TimeoutError: the trainer has not published the version after `timeout` seconds."""
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
                yield bucket
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

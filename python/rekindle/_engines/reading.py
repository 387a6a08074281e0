"""Gives the tensors of a session to an engine's own loader: whole, and as copies."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from .layers import by_layer

if TYPE_CHECKING:
    from ..session import Session


def whole_tensors(session: "Session", timeout: float | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) for everything that the session has, a layer at a time.

    The tensors are copies, so a loader may keep and change them. Each has its shape in the
    checkpoint. Where the session has only boxes of a tensor, the rest is not-a-number (bytes 0xFF),
    so that a loader that reads more than those boxes is noticed.
    TimeoutError: nothing came for `timeout` seconds."""
    infos = session.tensors()
    names = dict.fromkeys(info.name for info in infos)
    return by_layer(_whole(session, Counter(info.name for info in infos), timeout), names)


def _whole(session: "Session", boxes: Counter[str],
           timeout: float | None) -> Iterator[tuple[str, torch.Tensor]]:
    partial: dict[str, torch.Tensor] = {}
    for info, tensor in session.entries(timeout):
        if info.shape == info.full_shape:
            yield info.name, tensor.clone()
            continue
        if info.name not in partial:
            partial[info.name] = _blank(info, tensor)
        place = tuple(slice(at, at + n) for at, n in zip(info.offset, info.shape))
        partial[info.name][place].copy_(tensor)
        boxes[info.name] -= 1
        if not boxes[info.name]:
            yield info.name, partial.pop(info.name)


def _blank(info: Any, like: torch.Tensor) -> torch.Tensor:
    blank = torch.empty(info.full_shape, dtype=like.dtype, device=like.device)
    blank.view(torch.uint8).fill_(0xFF)
    return blank

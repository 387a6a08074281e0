"""The order in which an engine that reloads layer by layer wants its weights."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any


def layer_of(name: str) -> str:
    """"model.layers.3.mlp.experts.7.w1" → "model.layers.3", up to the outermost number; a name
    without one is a layer of its own."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:index + 1])
    return name


def by_layer(pairs: Iterable[tuple[str, Any]],
             names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """`pairs`, in which every one of `names` comes once, a layer at a time, each as soon as it is
    complete. Those that come before the rest of their layer are held, so they must stay valid.

    Engines hold what they are given of a layer until it is complete, and its memory with it: this
    keeps that to one layer, and what waits here to the layers whose bytes come interleaved."""
    missing = Counter(layer_of(name) for name in names)
    waiting: dict[str, list[tuple[str, Any]]] = {}
    for name, tensor in pairs:
        layer = layer_of(name)
        waiting.setdefault(layer, []).append((name, tensor))
        missing[layer] -= 1
        if missing[layer] <= 0:
            yield from waiting.pop(layer)
    for rest in waiting.values():
        yield from rest

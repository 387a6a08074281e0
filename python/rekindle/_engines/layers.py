"""Orders weights for an engine that reloads layer by layer."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any


def layer_of(name: str) -> str:
    """Returns "model.layers.3" for "model.layers.3.mlp.experts.7.w1": the name up to its first
    number. A name without a number is a layer by itself."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:index + 1])
    return name


def by_layer(pairs: Iterable[tuple[str, Any]],
             names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yields `pairs`, which have each of `names` once, a layer at a time, when the layer is
    complete. Pairs wait here for the rest of their layer, so their tensors must stay valid.

    Engines keep the tensors of a layer, with their memory, until it is complete. With this order,
    they keep one layer at most, and only layers whose bytes come interleaved wait here."""
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

"""What `WorkerExtension` does: a version into a vLLM that runs, by its layerwise reload."""
from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from .._engines.completeness import has_default
from .._engines.loading import ALONE, Held, Place, attached, device_of, held, hold
from .._engines.options import Options
from .._engines.reading import whole_tensors
from ..errors import InvalidError
from ..session import Session
from . import versions

Pairs = Iterable[tuple[str, torch.Tensor]]


def status() -> dict[str, Any]:
    """Of each model of this worker that came through Rekindle."""
    found = {}
    for role in ("target", "draft"):
        now = held(role)
        if now is not None:
            session = now.session
            found[role] = {
                "model": session.model, "version": session.version, "rung": session.rung,
                "device_path": session.device_path, "instance": now.place.instance or None,
                "generation": now.place.generation, "tensors": len(now.names),
                "recorded": now.boxes is not None, "bytes": session.bytes_total}
    return found


def wait_for_update(timeout: float) -> int | None:
    """InvalidError when nothing has been loaded through Rekindle."""
    now = held("target")
    if now is None:
        raise InvalidError("this worker's weights have not come through Rekindle: nothing says "
                           "which model to wait for")
    return now.session.wait_for_update(timeout)


def update(worker: Any, version: str | int, given: dict[str, Any] | None) -> dict[str, Any]:
    """Attaches, reloads, commits. Returns what it was and how long it took."""
    begun = time.perf_counter()
    versions.check()
    options = replace(_options(worker.vllm_config, held("target"), given), version=version)
    session = bring(worker.vllm_config, worker.model_runner.get_model(), options,
                    lambda pairs: worker.reload_weights(weights_iterator=pairs))
    return {"model": session.model, "version": session.version, "tensors": session.tensor_count,
            "bytes": session.bytes_total, "rung": session.rung,
            "seconds": time.perf_counter() - begun}


def bring(config: Any, model: torch.nn.Module, options: Options, apply: Callable[[Pairs], None],
          role: str = "target") -> Session:
    """A version into `model` by `apply`, which takes checkpoint tensors. The session is held."""
    if role == "target":
        from .loader import of_one_version
        options = of_one_version(options, config)
    now = held(role)
    if now is not None and now.options.name != options.name:
        now = None
    place = _next_place(config, options, now) if role == "target" else ALONE
    device = now.device if now is not None else device_of(model, options)
    boxes = now.boxes if now is not None else None
    session = attached(options, place, device, boxes)
    try:
        reload(model, options, session, apply)
        if device is not None and torch.cuda.is_available():
            torch.cuda.synchronize()  # before anybody is told that it may serve
        session.commit(options.commit_timeout)
    except BaseException:
        session.close()
        raise
    names = frozenset(info.name for info in session.tensors())
    hold(role, Held(options, place, device, session, boxes, names))
    return session


def _options(config: Any, now: Held | None, given: dict[str, Any] | None) -> Options:
    if given is not None:
        return Options.parse(given)
    if now is not None:
        return now.options
    if config.load_config.load_format == "rekindle":
        return Options.parse(config.load_config.model_loader_extra_config)
    return Options()


def _next_place(config: Any, options: Options, now: Held | None) -> Place:
    """The next generation of the instance: same on all ranks."""
    from .loader import agreed, place_of
    place = place_of(config, options)
    if not place.instance or now is None:
        return place
    assert place.generation is not None and now.place.generation is not None
    later = max(place.generation, now.place.generation + 1)
    return replace(place, generation=agreed(later, place.world or 1))


def reload(model: torch.nn.Module, options: Options, session: Session,
           apply: Callable[[Pairs], None]) -> None:
    """`apply` runs vLLM's reload; then every tensor must have been taken and every layer filled.

    InvalidError names what was not: the model then has weights of two versions."""
    pairs = _Counted(whole_tensors(session, options.load_timeout))
    loads = _Loads(model)
    with loads:
        apply(pairs)
    if not pairs.finished:
        raise InvalidError(f"the model's loader has stopped after {pairs.last}; it must not serve")
    idle = [name for name in loads.idle
            if not any(re.search(pattern, name) for pattern in options.allow_unwritten)]
    if idle:
        more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
        raise InvalidError(f"{session.model}@{session.version} has nothing for "
                           f"{', '.join(idle[:3])}{more}: they keep the weights of before, and the "
                           "model must not serve")


class _Counted:
    """Pairs, and whether all were taken."""

    def __init__(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._pairs = pairs
        self.last: str | None = None
        self.finished = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._pairs:
            self.last = name
            yield name, tensor
        self.finished = True


class _Loads:
    """Looks at the model when its `load_weights` returns, within vLLM's reload: which
    layers were given nothing. vLLM gives those their old weights, with a warning."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.idle: list[str] = []

    def __enter__(self) -> None:
        inner = self._model.load_weights

        def load_weights(pairs: Pairs, *more: Any, **named: Any) -> Any:
            returned = inner(pairs, *more, **named)
            self.idle = _idle_layers(self._model)
            return returned

        self._model.load_weights = load_weights

    def __exit__(self, *_: Any) -> None:
        del self._model.load_weights


def _idle_layers(model: torch.nn.Module) -> list[str]:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    idle = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        own = [key for key, parameter in layer._parameters.items()
               if parameter is not None and parameter.numel() and not has_default(key)]
        if own and info.can_load() and not info.load_numel:
            idle.append(name or type(model).__name__)
    return idle

"""A version into a SGLang that runs, as its own `/update_weights_from_disk` does it."""
from __future__ import annotations

from dataclasses import replace

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader

from .._engines.loading import ALONE, Held, attached, device_of, hold, held
from .._engines.options import Options
from .._engines.reading import whole_tensors
from .loader import of_one_version


def update(model: torch.nn.Module, name: str, version: str) -> None:
    """Attaches with the instance's next generation, loads, commits, and holds the session."""
    now = held("target")
    if now is not None and now.options.name != name:
        now = None
    options = of_one_version(replace(now.options if now is not None else Options(), model=name,
                                     version=version))
    place = ALONE
    if now is not None and now.place.instance:
        place = replace(now.place, generation=(now.place.generation or 0) + 1)
    boxes = now.boxes if now is not None else None
    device = now.device if now is not None else device_of(model, options)
    session = attached(options, place, device, boxes)
    try:
        pairs = whole_tensors(session, options.load_timeout)
        on = next(model.parameters()).device
        DefaultModelLoader.restore_weights_before_loading(model, on)
        DefaultModelLoader.load_weights_and_postprocess(model, pairs, on)
        for _ in pairs:  # a loader may stop before the end
            pass
        if on.type == "cuda":
            torch.cuda.synchronize(on)  # before anybody is told that it may serve
        session.commit(options.commit_timeout)
    except BaseException:
        session.close()
        raise
    names = frozenset(info.name for info in session.tensors())
    hold("target", Held(options, place, device, session, boxes, names))

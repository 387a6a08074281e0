"""Catalog, plan, session with the plan's boxes, and filled targets in one call."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import session as sessions
from ..cataloging import catalog as rekindle_catalog
from ..errors import InvalidError
from .cache import cached, fingerprint
from .execute import boxes, catalog_of, execute
from .recorder import Load, record

if TYPE_CHECKING:
    from torch import nn


def attach(load: Load, targets: nn.Module | Mapping[str, torch.Tensor], key: Mapping[str, Any],
           model: str | None = None, version: str | int | None = "latest", *,
           loaders: Iterable[Any] = (), record_device: str | torch.device = "cpu",
           load_timeout: float | None = 60.0, **options: Any) -> sessions.Session:
    """Fills `targets` with the elements that `load` reads of a version. Returns the session, which
    the caller commits.

    `key`, `loaders`: of the plan's `fingerprint`, which always has `load`'s own module.
    `record_device`: the device on which the loader finds its tensors. `options`: of
    `rekindle.attach`, except shard and spec, which the recording decides.

    Raises what `rekindle.attach`, `record` and `execute` raise.
    """
    if options.get("shard") is not None or options.get("spec") is not None:
        raise InvalidError("the recording says which shard to attach with: give no shard, no spec")
    where = {key: options[key] for key in ("agent", "fallback_dir", "timeout") if key in options}
    whole = rekindle_catalog(model, version, **where)
    catalog = catalog_of(whole.tensors)
    mark = fingerprint(catalog, targets, (load, *loaders), key, record_device=record_device)
    plan = cached(mark, lambda: record(load, catalog, targets, device=record_device))
    wanted = boxes(plan)
    if not wanted:
        raise InvalidError(f"the loader reads none of the {len(catalog)} tensors of {whole.model}@"
                           f"{whole.version}: is it this model's loader, and does it know these "
                           f"names ({', '.join(list(catalog)[:2])}, …)?")
    session = sessions.attach(whole.model, whole.version, **{**options, "shard": wanted})
    try:
        execute(plan, load, targets, session, timeout=load_timeout)
    except BaseException:
        session.close()
        raise
    return session

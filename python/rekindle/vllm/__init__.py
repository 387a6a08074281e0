"""vLLM: `--load-format rekindle`, updates of a running engine, and a weight transfer backend.

    vllm serve MODEL --load-format rekindle --model-loader-extra-config '{"model": "qwen3"}' \\
        --worker-extension-cls rekindle.vllm.WorkerExtension

vLLM finds `register` by the entry point group `vllm.general_plugins`. See docs/guides/engines.md.
"""
from __future__ import annotations

import logging

from .worker import WorkerExtension

__all__ = ["WorkerExtension", "register"]


def register() -> None:
    """Registers load format and weight transfer backend `rekindle`, once.

    For an unknown version of vLLM it logs why, and registers nothing. vLLM runs it wherever this
    package is installed, so an exception would end vLLM also for users without Rekindle."""
    from . import versions
    from ..errors import InvalidError
    _log_as_vllm()
    try:
        versions.check()
    except InvalidError as why:
        logging.getLogger("rekindle").error("load format rekindle is not there: %s", why)
        return
    from .loader import register_loader
    from .resident import count_memory
    from .transfer import register_transfer
    from .waiting import wait_in_standby
    register_loader()
    register_transfer()
    count_memory()
    # A standby waits before its memory is counted.
    wait_in_standby()


def _log_as_vllm() -> None:
    """Has lines of Rekindle appear where those of vLLM do. Python shows a logger that nobody has set
    up only without any handler at the root, and then only its warnings."""
    ours, theirs = logging.getLogger("rekindle"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate

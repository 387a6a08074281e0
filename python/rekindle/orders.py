"""What the agent of this host wants of a worker, for example by `rekindle switch`."""
from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import _abi, errors
from ._native import Native, text, wait_until

if TYPE_CHECKING:
    from .session import Session

SERVE, MEND = 1, 2


class Order:
    """An order to the worker of a session. Answer it once, by done() or fail(), before the session
    is closed."""

    def __init__(self, session: "Session", native: Native, found: _abi.Order) -> None:
        """Called by `Session.next_order`."""
        # Keeps the connection on which the answer goes.
        self._session = session
        self._native = native
        self.number: int = found.number
        self.kind = {SERVE: "serve", MEND: "mend"}.get(found.kind, "unknown")
        """"serve": load `model` in place of the present version, and serve it. "mend": some tensors
        of the resident copy are wrong. "unknown": of a later release; answer it with fail()."""
        self.model: str | None = found.model.decode() if found.model else None
        """Of "serve": "qwen3@42", or "qwen3" for the newest version."""
        self.tensors: list[str] = [found.tensors[index].decode()
                                   for index in range(found.tensor_count)]
        """Of "mend"."""

    def done(self, phases: Mapping[str, float] | None = None) -> None:
        """Tells the agent that the order is carried out. `phases`: the seconds of each step.
        StaleError: the agent waits for no answer any more."""
        self._answer(_abi.OK, "", phases or {})

    def fail(self, why: "str | BaseException") -> None:
        """Tells the agent why the order is not carried out. StaleError as above."""
        code = why.code if isinstance(why, errors.Error) else _abi.UNAVAILABLE
        self._answer(code, str(why) or type(why).__name__, {})

    def _answer(self, code: int, why: str, seconds: Mapping[str, float]) -> None:
        phases = (_abi.Phase * len(seconds))(*(
            _abi.Phase(name.encode(), round(took * 1e6)) for name, took in seconds.items()))
        self._native.call("rk_order_done", self.number, code, text(why.replace("\0", " ")), phases,
                          len(seconds))

    def __repr__(self) -> str:
        what = self.model or ", ".join(self.tensors)
        return f"<rekindle.Order {self.number}: {self.kind} {what}>"


def wait_for(session: "Session", native: Native, timeout: float | None) -> Order | None:
    found = _abi.Order(size=ctypes.sizeof(_abi.Order))
    with native.using():
        try:
            wait_until(timeout, lambda ms: native.call("rk_watch_order", ms, ctypes.byref(found)))
        except errors.TimeoutError:
            return None
        return Order(session, native, found)

"""A connection to the agent of this host with one session or publication, and calls with deadlines.

Every session and publication has its own connection. So they never wait for each other, and closing
one closes everything that belongs to it.
"""
from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from . import _abi, errors, standby

# The longest call into C, in seconds. Ctrl-C and close() in another thread take effect after it.
SLICE_S = 1.0
# How long an interrupted call may take to end.
STOP_S = 30.0
_T = TypeVar("_T")

# Counts the forks between the import of this module and this process.
_forks = 0
_all: "weakref.WeakSet[Native]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Closes the child's copies of the parent's sockets. With these open, the agent would take a
    dead parent for alive."""
    global _forks
    _forks += 1
    for native in list(_all):
        native._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)


def milliseconds(seconds: float | None, default: int = 0) -> int:
    """Converts a time for the C ABI; None gives `default`. InvalidError: negative, infinite,
    NaN."""
    if seconds is None:
        return default
    if not 0 <= seconds < math.inf:
        raise errors.InvalidError(f"a time-out of {seconds} seconds")
    return math.ceil(seconds * 1000)


def wait_until(timeout: float | None, call: Callable[[int], _T]) -> _T:
    """Repeats `call(ms)` in slices while it raises TimeoutError, for at most `timeout` seconds
    (None: without end). Calls at least once."""
    milliseconds(timeout)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        left = max(0.0, min(SLICE_S, deadline - time.monotonic()))
        try:
            return call(math.ceil(left * 1000))
        except errors.TimeoutError:
            if time.monotonic() >= deadline:
                raise


def text(value: str | os.PathLike[str] | None) -> bytes | None:
    """Encodes a string for the C ABI. InvalidError: it contains a NUL, which would end it early."""
    if value is None:
        return None
    named = os.fspath(value)
    data = named.encode("utf-8", "surrogateescape") if isinstance(named, str) else named
    if b"\0" in data:
        raise errors.InvalidError(f"{value!r} has a NUL character inside")
    return data


class _Handles:
    """Pointers of the C library. Only the process that opened them frees them."""

    def __init__(self, abi: ctypes.CDLL) -> None:
        self.abi = abi
        self.forks = _forks
        self.agent = ctypes.c_void_p()
        self.object = ctypes.c_void_p()
        # The function that frees `object`.
        self.end = ""

    def free(self) -> None:
        if self.forks != _forks:
            return
        opened, self.object = self.object, ctypes.c_void_p()
        agent, self.agent = self.agent, ctypes.c_void_p()
        if opened:
            getattr(self.abi, self.end)(opened)
        if agent:
            self.abi.rk_disconnect(agent)


class Native:
    """A connection to the agent of a store, with one session or publication. For any thread.

    It ends with its last reference, or by end()."""

    def __init__(self, store: str | os.PathLike[str] | None, timeout: float | None,
                 what: str = "session") -> None:
        # Here, because C would not let the handlers of signals run meanwhile.
        standby.wait()
        self._abi = _abi.load()
        self._handles = _Handles(self._abi)
        self._what = what
        self._lock = threading.Lock()
        self._running = 0
        self._ended = False
        self._connect(text(store), timeout)
        # At exit, the kernel closes the connection.
        weakref.finalize(self, self._handles.free).atexit = False
        _all.add(self)

    def _connect(self, store: bytes | None, timeout: float | None) -> None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        milliseconds(timeout)
        while True:
            left = max(0.001, min(SLICE_S, deadline - time.monotonic()))
            options = _abi.ConnectOptions(ctypes.sizeof(_abi.ConnectOptions), store,
                                          milliseconds(left))
            error = _abi.Error()
            code = self._abi.rk_connect(
                ctypes.byref(options), ctypes.byref(self._handles.agent), ctypes.byref(error))
            if code == _abi.OK:
                return
            failed = _exception(code, error)
            if not isinstance(failed, errors.UnavailableError) or time.monotonic() >= deadline:
                raise failed

    def open(self, function: str, end: str, *arguments: Any) -> None:
        """Calls `function(agent, *arguments, &object, &error)`: rk_attach or rk_publish_begin.
        `end` names the function that frees the object."""
        self._handles.end = end
        self._run(function, self._handles.agent, *arguments, ctypes.byref(self._handles.object))

    def call(self, function: str, *arguments: Any) -> None:
        """Calls `function(object, *arguments, &error)`."""
        self._run(function, self._handles.object, *arguments)

    def call_agent(self, function: str, *arguments: Any) -> None:
        """Calls `function(agent, *arguments, &error)`."""
        self._run(function, self._handles.agent, *arguments)

    def call_last(self, function: str, *arguments: Any) -> None:
        """Calls a function that frees the object even if it fails: rk_publish_commit."""
        error = _abi.Error()
        with self.using():
            with self._lock:
                opened, self._handles.object = self._handles.object, ctypes.c_void_p()
            code = getattr(self._abi, function)(opened, *arguments, ctypes.byref(error))
        if code != _abi.OK:
            raise _exception(code, error)

    def check(self) -> None:
        """Raises StaleError when the connection was closed or belongs to a parent process."""
        if self._handles.forks != _forks:
            raise errors.StaleError(f"the {self._what} was opened before fork(): only the parent "
                                    "may use it; open another one")
        if self._ended:
            raise errors.StaleError(f"the {self._what} was closed")

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Keeps memory of the library valid in this context: end() takes effect only after it."""
        self.check()
        with self._lock:
            self.check()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                last = self._ended and not self._running
            if last:
                self._handles.free()

    def _run(self, function: str, *arguments: Any) -> None:
        error = _abi.Error()
        with self.using():
            code = getattr(self._abi, function)(*arguments, ctypes.byref(error))
        raise_error(code, error)

    def end(self) -> None:
        """Ends now, or when the calls of other threads return. A second call does nothing."""
        if self._handles.forks != _forks:
            return
        with self._lock:
            if self._ended:
                return
            self._ended = True
            running = self._running
        if not running:
            self._handles.free()

    def cut(self) -> None:
        """Ends the connection, so that a call in another thread returns. The handles stay valid
        for that call. The caller then calls end()."""
        with self._lock:
            if self._handles.agent and self._handles.forks == _forks:
                self._abi.rk_interrupt(self._handles.agent)

    def _leave_to_parent(self) -> None:
        agent, self._handles.agent = self._handles.agent, ctypes.c_void_p()
        if agent:
            # Only once: in a grandchild, the descriptor may belong to another file.
            self._abi.rk_disconnect(agent)


class Ended(Native):
    """Takes the place of a Native that only views still own."""

    def __init__(self, what: str = "session") -> None:
        self._what = what

    def check(self) -> None:
        raise errors.StaleError(f"the {self._what} was closed")

    def call(self, function: str, *arguments: Any) -> None:
        self.check()

    def end(self) -> None:
        pass


def raise_error(code: int, error: _abi.Error) -> None:
    """Raises the error of a call of the C library, if `code` is one."""
    if code != _abi.OK:
        raise _exception(code, error)


def _exception(code: int, error: _abi.Error) -> errors.Error:
    return errors.of_code(code, error.message.decode("utf-8", "replace"))


def run_interruptibly(call: Callable[[], _T], stop: Callable[[], None]) -> _T:
    """Runs a long call of the C library in a thread, so that Ctrl-C in the main thread has an
    effect: it calls `stop`, which may be called several times, waits up to 30 s for the end of the
    call, and then raises KeyboardInterrupt. More Ctrl-C do not shorten that wait, because the call
    may still write to the caller's memory."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    outcome: list[tuple[_T | None, BaseException | None]] = []
    ended = threading.Event()
    # Whoever takes it first decides whether the call is made: its thread, or an interrupt.
    turn = threading.Lock()

    def run() -> None:
        if not turn.acquire(blocking=False):
            return
        try:
            outcome.append((call(), None))
        except BaseException as why:  # raised below
            outcome.append((None, why))
        ended.set()

    thread = threading.Thread(target=run, name="rekindle-call", daemon=True)
    try:
        thread.start()
        while not ended.wait(SLICE_S):
            pass
    except BaseException:
        deadline = time.monotonic() + STOP_S
        called = not turn.acquire(blocking=False)
        while called and not ended.is_set() and time.monotonic() < deadline:
            with contextlib.suppress(KeyboardInterrupt):
                stop()
                ended.wait(max(0.0, deadline - time.monotonic()))
        raise
    result, failed = outcome[0]
    if failed is not None:
        raise failed
    return cast(_T, result)

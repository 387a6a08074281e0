"""A connection to the agent of this host with what was opened on it, and calls with deadlines.

Every session and publication has a connection of its own: what one of them does never waits for
another, and closing it closes all that belongs to it.
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

from . import _abi, errors

# The longest stay in C. Ctrl-C, and close() from another thread, are noticed after it.
SLICE_S = 1.0
_T = TypeVar("_T")

# Counts the forks between the import of this module and this process.
_forks = 0
_all: "weakref.WeakSet[Native]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """What the parent opened is its own. The child's copies of its sockets are closed: an agent
    that waited for them would take a dead parent for alive."""
    global _forks
    _forks += 1
    for native in list(_all):
        native._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)


def milliseconds(seconds: float | None, default: int = 0) -> int:
    """For the C ABI; `default` for None. InvalidError for what is no time."""
    if seconds is None:
        return default
    if not 0 <= seconds < math.inf:
        raise errors.InvalidError(f"a time-out of {seconds} seconds")
    return math.ceil(seconds * 1000)


def wait_until(timeout: float | None, call: Callable[[int], _T]) -> _T:
    """`call(ms)` in slices until it does not raise TimeoutError or `timeout` seconds are over
    (None: never). At least once."""
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
    """For the C ABI. InvalidError when it has a 0 inside, which would end it early."""
    if value is None:
        return None
    named = os.fspath(value)
    data = named.encode("utf-8", "surrogateescape") if isinstance(named, str) else named
    if b"\0" in data:
        raise errors.InvalidError(f"{value!r} has a NUL character inside")
    return data


class _Handles:
    """Pointers of the C library. Not freed in a child of the process that opened them."""

    def __init__(self, abi: ctypes.CDLL) -> None:
        self.abi = abi
        self.forks = _forks
        self.agent = ctypes.c_void_p()
        self.object = ctypes.c_void_p()
        self.end = ""  # what frees `object`

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
    """The agent of a store, and one session or publication there. Any thread.

    It ends when nobody refers to it, or with end(), which waits for calls of other threads."""

    def __init__(self, store: str | os.PathLike[str] | None, timeout: float | None,
                 what: str = "session") -> None:
        self._abi = _abi.load()
        self._handles = _Handles(self._abi)
        self._what = what
        self._lock = threading.Lock()
        self._running = 0
        self._ended = False
        self._connect(text(store), timeout)
        weakref.finalize(self, self._handles.free).atexit = False  # the kernel does that
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
        """rk_attach or rk_publish_begin: `function(agent, *arguments, &object, &error)`."""
        self._handles.end = end
        self._run(function, self._handles.agent, *arguments, ctypes.byref(self._handles.object))

    def call(self, function: str, *arguments: Any) -> None:
        """`function(object, *arguments, &error)`."""
        self._run(function, self._handles.object, *arguments)

    def call_agent(self, function: str, *arguments: Any) -> None:
        """`function(agent, *arguments, &error)`."""
        self._run(function, self._handles.agent, *arguments)

    def call_last(self, function: str, *arguments: Any) -> None:
        """The call that frees the object, whatever comes of it: rk_publish_commit."""
        opened, self._handles.object = self._handles.object, ctypes.c_void_p()
        self._run(function, opened, *arguments)

    def check(self) -> None:
        """StaleError when it has ended or belongs to a parent process."""
        if self._handles.forks != _forks:
            raise errors.StaleError(f"the {self._what} was opened before fork(): only the parent "
                                    "may use it; open another one")
        if self._ended:
            raise errors.StaleError(f"the {self._what} was closed")

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """While what the library has handed out is read: end() waits for it."""
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
        if code != _abi.OK:
            raise _exception(code, error)

    def end(self) -> None:
        """Now, or when the calls that run in other threads return. Again: nothing."""
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
        """Disconnects, so that a call that runs in another thread returns; then end() it."""
        with self._lock:
            agent, self._handles.agent = self._handles.agent, ctypes.c_void_p()
        if agent and self._handles.forks == _forks:
            self._abi.rk_disconnect(agent)

    def _leave_to_parent(self) -> None:
        agent, self._handles.agent = self._handles.agent, ctypes.c_void_p()
        if agent:
            # Only once: in a grandchild, the descriptor may belong to another file.
            self._abi.rk_disconnect(agent)


class Ended(Native):
    """In the place of one whose last owners are views."""

    def __init__(self, what: str = "session") -> None:
        self._what = what

    def check(self) -> None:
        raise errors.StaleError(f"the {self._what} was closed")

    def call(self, function: str, *arguments: Any) -> None:
        self.check()

    def end(self) -> None:
        pass


def _exception(code: int, error: _abi.Error) -> errors.Error:
    return errors.of_code(code, error.message.decode("utf-8", "replace"))


def run_interruptibly(call: Callable[[], _T], stop: Callable[[], None]) -> _T:
    """A long call of the C library, in a thread of its own, so that Ctrl-C in the main thread has
    an effect: `stop`, and then the call's end is waited for before KeyboardInterrupt goes on."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    outcome: list[tuple[_T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as why:  # handed on below
            outcome.append((None, why))

    thread = threading.Thread(target=run, name="rekindle-call", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(SLICE_S)
    except BaseException:
        stop()
        thread.join()
        raise
    result, failed = outcome[0]
    if failed is not None:
        raise failed
    return cast(_T, result)

"""Threads that copy between places of host memory, outside of Python's global lock."""
from __future__ import annotations

import ctypes
import functools
import mmap
import os
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

# On 16 CPUs, 16 threads were slower (docs/reference/performance.md).
MOST_THREADS = 14
# Bytes. Page faults fill the page tables of smaller pieces.
SMALL = 1 << 20

_MADV_POPULATE_WRITE = 23  # Linux 5.14

Hold = Callable[[], "AbstractContextManager[None]"]


class Piece(NamedTuple):
    """Bytes to copy, by addresses."""

    target: int
    source: int
    nbytes: int


class CopyThreads:
    """Copies pieces in the background. One thread calls the methods. finish() ends the threads."""

    def __init__(self, hold: Hold) -> None:
        """`hold`: a context in which the targets stay mapped. A thread enters it for each task, and
        fails if it raises."""
        self._hold = hold
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[_Thread] = []
        self._most = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) - 2))
        self._stopped = False
        self._failed: BaseException | None = None

    def check(self) -> None:
        """Raises the first error of a thread."""
        if self._failed is not None:
            raise self._failed

    def put(self, pieces: list[Piece], keep: object,
            done: Callable[[], None] | None = None) -> None:
        """Begins to copy `pieces`. `keep` owns the sources. `done` is called afterwards by a
        thread, also if the copy fails or is dropped."""
        self._tasks.put(_Task(pieces, keep, done))
        if len(self._threads) < self._most:
            thread = _Thread(self._run)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Drops the tasks that no thread has begun. For any thread."""
        self._stopped = True
        self._end_threads()

    def finish(self) -> None:
        """Returns when all tasks are done and all threads have ended. An interrupt drops the tasks
        that no thread has begun, and is raised when all threads have ended."""
        interrupt: BaseException | None = None
        while self._threads:
            try:
                self._end_threads()
                for thread in self._threads:
                    if thread.ident is not None:  # It was started.
                        thread.ended.wait()
                self._threads.clear()
            except KeyboardInterrupt as why:
                interrupt = why
                self._stopped = True
        if interrupt is not None:
            raise interrupt

    def _end_threads(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            try:
                if not self._stopped and self._failed is None:
                    with self._hold():
                        for piece in task.pieces:
                            _populate(piece)
                            ctypes.memmove(*piece)
            except BaseException as why:  # check() raises it.
                self._failed = why
            finally:
                if task.done is not None:
                    task.done()


class _Thread(threading.Thread):
    """Before Python 3.13, an interrupt of join() makes later calls return at once, while the thread
    still runs. Therefore this has an event."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="rekindle-copy", daemon=True)
        self._work = work
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self.ended.set()


class _Task(NamedTuple):
    pieces: list[Piece]
    keep: object
    done: Callable[[], None] | None


@functools.lru_cache(maxsize=None)
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


def _populate(piece: Piece) -> None:
    """Fills page tables with one call instead of a fault for each page. Where the kernel refuses,
    the copy faults the pages in."""
    if piece.nbytes >= SMALL:
        begin = piece.target & -mmap.PAGESIZE
        _madvise()(begin, piece.target + piece.nbytes - begin, _MADV_POPULATE_WRITE)

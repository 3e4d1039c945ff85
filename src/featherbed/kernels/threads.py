"""Running compiled jobs: in the calling thread alone, or shared with worker threads.

numba's own thread layers are not used: its work queue aborts under concurrent callers, its OpenMP
layer dies after a fork. Workers are started on first use, and again in a process forked from this
one. They spin for half a millisecond after a job, which makes look-ups of some thousand rows about
twice as fast as waking a plain thread pool does (``benchmarks/threads.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from threading import Lock, Semaphore, Thread, get_native_id

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.kernels import workqueue
from featherbed.kernels.compiled import Job

VARIABLE = "FEATHERBED_THREADS"
TURNS = 12_000  # waiting turns of a worker after a job, about 0.5 ms: waking it costs 20 to 100 µs
_threads: int | None = None
_workers: Workers | None = None
_lock = Lock()


class Workers:
    """Worker threads and the queue they share."""

    def __init__(self, count: int) -> None:
        self.queue: NDArray[np.int64] = np.zeros(workqueue.WORDS, dtype=np.int64)
        self.wake, self.calling = Semaphore(0), Lock()
        self.cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self.current_core, self.caller_core = _current_core(), -1
        self.count, self.native_ids = count, list[int]()
        self.arguments: object = None
        for number in range(count):
            Thread(target=self._work, name=f"featherbed-{number}", daemon=True).start()

    def _work(self) -> None:
        self.native_ids.append(get_native_id())
        last = 0
        while last >= 0:
            last = workqueue.serve(self.queue, last, TURNS)
            if last >= 0 and workqueue.may_sleep(self.queue, last):
                self.wake.acquire()

    def _leave_core(self, core: int) -> None:
        """Keep workers off the core of the caller: schedulers tend to wake a thread where its
        waker runs, and to leave it there.
        """
        others = self.cores - {core}
        if others:
            self.caller_core = core if len(self.native_ids) == self.count else -1
            for worker in self.native_ids:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(worker, others)

    def run(self, job: Job, block: NDArray[np.int64], count: int, grain: int, held: object) -> bool:
        """Run a job with all workers; alone if another thread is using them."""
        address = block.ctypes.data
        if not self.calling.acquire(blocking=False):
            return bool(workqueue.run_alone(job.address, address, count) == 1)
        try:
            if self.queue[workqueue.OPEN]:  # an interrupt came before the end of the last job
                workqueue.finish(self.queue)
            self.arguments = (block, held)  # alive at least as long as the queue is open
            core = self.current_core()
            if core != self.caller_core:
                self._leave_core(core)
            sleeping = workqueue.publish(self.queue, job.address, address, count, grain)
            try:
                if sleeping:
                    self.wake.release(sleeping)
            finally:
                good = workqueue.finish(self.queue)
            return bool(good == 1)
        finally:
            self.calling.release()

    def dismiss(self) -> None:
        """End the threads."""
        with self.calling:
            workqueue.dismiss(self.queue)
            self.wake.release(self.count)


def _current_core() -> Callable[[], int]:
    """Return the function that returns the core of the calling thread; -1 where it is unknown."""
    try:
        function: Callable[[], int] = ctypes.CDLL(None).sched_getcpu
    except (AttributeError, OSError, TypeError):  # not Linux
        return lambda: -1
    return function


def thread_count() -> int:
    """Return the number of threads: ``$FEATHERBED_THREADS``, else one for each available core."""
    global _threads
    if _threads is None:
        given = os.environ.get(VARIABLE, "")
        if given and (not given.isdecimal() or int(given) < 1):
            raise ArgumentError(f"{VARIABLE}={given!r}: give a number of threads, at least 1")
        _threads = int(given) if given else cores()
    return _threads


def cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_threads(count: int | None) -> None:
    """Use ``count`` threads from now on; None returns to the default."""
    global _threads, _workers
    workers, _threads, _workers = _workers, count, None
    if workers is not None:
        workers.dismiss()


def _forget_workers() -> None:
    """Start without workers in a forked process: threads do not survive a fork."""
    global _workers, _lock
    _workers, _lock = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)


def run(job: Job, block: NDArray[np.int64], count: int, grain: int, held: object = None) -> bool:
    """Run a compiled job over ``count`` rows in pieces of ``grain`` rows; return False on failure.

    ``block`` holds the job's arguments (see ``featherbed.kernels.memory``), ``held`` keeps alive
    what they point to.
    """
    global _workers
    workers = _workers
    if count >= 2 * grain and workers is None and thread_count() > 1:
        with _lock:
            workers = _workers = _workers or Workers(thread_count() - 1)
    if count < 2 * grain or workers is None:
        return bool(workqueue.run_alone(job.address, block.ctypes.data, count) == 1)
    return workers.run(job, block, count, grain, held)

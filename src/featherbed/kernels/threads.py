"""Running compiled jobs: in the calling thread alone, or shared with worker threads.

numba's own thread layers are not used: its work queue aborts under concurrent callers, its OpenMP
layer dies after a fork. Workers are started on first use, and again in a process forked from this
one. They spin for half a millisecond after a job, which makes look-ups of some thousand rows about
twice as fast as waking a plain thread pool does (``benchmarks/threads.py``).

The queue of one job's pieces, which threads share without the GIL, is an array of int64 words. The
calling thread publishes a job (address of the compiled function, address of its arguments, number
of rows, rows per piece) and opens the queue; all threads take pieces until none is left; the caller
closes the queue and waits until no worker uses it. Workers spin for a moment after a job, then
sleep until they are woken.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from threading import Lock, Semaphore, Thread, get_native_id
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError
from featherbed.kernels.atomics import (
    atomic_add,
    atomic_decrement,
    atomic_load,
    atomic_swap,
    call,
    pause,
    yield_core,
)
from featherbed.kernels.compiled import Job, compiled

# words of the queue, eight apart: each on a cache line of its own
SEQUENCE, OPEN, ACTIVE, NEXT, DONE, GOOD, ASLEEP, CLOSED = range(0, 64, 8)
JOB, BLOCK, COUNT, GRAIN = range(64, 68)
WORDS = 72
PATIENCE = 400  # turns of waiting, about 15 µs, before the core is yielded to other threads


@compiled
def _word(queue: Any, word: Any) -> Any:
    return np.uint64(queue.ctypes.data) + np.uint64(8 * word)


@compiled
def _take_pieces(queue: Any) -> None:
    job, block, count, grain = queue[JOB], queue[BLOCK], queue[COUNT], queue[GRAIN]
    pieces = (count + grain - 1) // grain
    while True:
        piece = atomic_add(_word(queue, NEXT), 1)
        if piece >= pieces:
            return
        if call(job, block, piece * grain, min(count, (piece + 1) * grain)) != 1:
            atomic_swap(_word(queue, GOOD), 0)
        atomic_add(_word(queue, DONE), 1)


@compiled
def publish(queue: Any, job: Any, block: Any, count: Any, grain: Any) -> Any:
    """Publish a job and open the queue; return the number of sleeping workers to wake."""
    queue[JOB], queue[BLOCK], queue[COUNT], queue[GRAIN] = job, block, count, grain
    atomic_swap(_word(queue, NEXT), 0)
    atomic_swap(_word(queue, DONE), 0)
    atomic_swap(_word(queue, GOOD), 1)
    atomic_swap(_word(queue, OPEN), 1)
    atomic_add(_word(queue, SEQUENCE), 1)
    return atomic_swap(_word(queue, ASLEEP), 0)


@compiled
def _wait(turns: Any) -> Any:
    """Wait a moment; yield the core from time to time."""
    if turns % PATIENCE == PATIENCE - 1:
        yield_core()
    else:
        pause()
    return turns + 1


@compiled
def finish(queue: Any) -> Any:
    """Take pieces, wait for those of the workers, close the queue; return 1 if all succeeded."""
    _take_pieces(queue)
    pieces = (queue[COUNT] + queue[GRAIN] - 1) // queue[GRAIN]
    turns = 0
    while atomic_load(_word(queue, DONE)) < pieces:
        turns = _wait(turns)
    atomic_swap(_word(queue, OPEN), 0)
    while atomic_load(_word(queue, ACTIVE)) > 0:
        turns = _wait(turns)
    return atomic_load(_word(queue, GOOD))


@compiled
def serve(queue: Any, last: Any, turns: Any) -> Any:
    """Work on jobs after job ``last`` until none comes for ``turns`` turns of waiting.

    Returns the number of the last job, or -1 once the workers are dismissed.
    """
    idle = 0
    while idle < turns:
        now = atomic_load(_word(queue, SEQUENCE))
        if now == last:
            idle = _wait(idle)
            continue
        last, idle = now, 0
        if atomic_load(_word(queue, CLOSED)):
            return np.int64(-1)
        atomic_add(_word(queue, ACTIVE), 1)
        if atomic_load(_word(queue, OPEN)):
            _take_pieces(queue)
        atomic_add(_word(queue, ACTIVE), -1)
    return last


@compiled
def may_sleep(queue: Any, last: Any) -> Any:
    """Announce that a worker goes to sleep; return whether it has to wait to be woken.

    If a job came meanwhile the announcement is withdrawn, unless a caller has already counted it:
    then the worker will be woken.
    """
    atomic_add(_word(queue, ASLEEP), 1)
    if atomic_load(_word(queue, SEQUENCE)) == last:
        return True
    while True:
        asleep = atomic_load(_word(queue, ASLEEP))
        if asleep <= 0:
            return True
        if atomic_decrement(_word(queue, ASLEEP), asleep):
            return False


@compiled
def dismiss(queue: Any) -> None:
    """Tell the workers to end."""
    atomic_swap(_word(queue, CLOSED), 1)
    atomic_add(_word(queue, SEQUENCE), 1)


@compiled
def run_alone(job: Any, block: Any, count: Any) -> Any:
    """Run a whole job in this thread."""
    return call(job, block, 0, count)


@compiled
def run_row(job: Any, constants: Any, position: Any, out: Any) -> Any:
    """Run a job for one row in this thread: its arguments are constants, a position and the row."""
    count = len(constants)
    block, place = np.empty(count + 5, np.int64), np.empty(1, np.int64)
    block[:count] = constants
    place[0] = position
    block[count], block[count + 1] = place.ctypes.data, 1
    block[count + 2], block[count + 3], block[count + 4] = out.ctypes.data, 1, len(out)
    good = call(job, block.ctypes.data, 0, 1)
    block[0] = place[0] = (
        0  # an array is freed after its last use, which must not be before the call
    )
    return good


@compiled
def run_few(job: Any, constants: Any, positions: Any, out: Any) -> Any:
    """Run a whole job in this thread: its arguments are constants, positions, and the rows."""
    count = len(constants)
    block = np.empty(count + 5, np.int64)
    block[:count] = constants
    block[count], block[count + 1] = positions.ctypes.data, len(positions)
    block[count + 2], block[count + 3], block[count + 4] = out.ctypes.data, len(out), out.shape[1]
    good = call(job, block.ctypes.data, 0, len(positions))
    block[0] = 0  # an array is freed after its last use, which must not be before the call
    return good


VARIABLE = "FEATHERBED_THREADS"
TURNS = 12_000  # waiting turns of a worker after a job, about 0.5 ms: waking it costs 20 to 100 µs
_threads: int | None = None
_workers: Workers | None = None
_lock = Lock()


class Workers:
    """Worker threads and the queue they share."""

    def __init__(self, count: int) -> None:
        self.queue: NDArray[np.int64] = np.zeros(WORDS, dtype=np.int64)
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
            last = serve(self.queue, last, TURNS)
            if last >= 0 and may_sleep(self.queue, last):
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
            return bool(run_alone(job.address, address, count) == 1)
        try:
            if self.queue[OPEN]:  # an interrupt came before the end of the last job
                finish(self.queue)
            self.arguments = (block, held)  # alive at least as long as the queue is open
            core = self.current_core()
            if core != self.caller_core:
                self._leave_core(core)
            sleeping = publish(self.queue, job.address, address, count, grain)
            try:
                if sleeping:
                    self.wake.release(sleeping)
            finally:
                good = finish(self.queue)
            return bool(good == 1)
        finally:
            self.calling.release()

    def dismiss(self) -> None:
        """End the threads."""
        with self.calling:
            dismiss(self.queue)
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

    ``block`` holds the job's arguments (see ``featherbed.kernels.memory``), ``held`` keeps the
    arrays alive that they point to.
    """
    global _workers
    workers = _workers
    if count >= 2 * grain and workers is None and thread_count() > 1:
        with _lock:
            workers = _workers = _workers or Workers(thread_count() - 1)
    if count < 2 * grain or workers is None:
        return bool(run_alone(job.address, block.ctypes.data, count) == 1)
    return workers.run(job, block, count, grain, held)

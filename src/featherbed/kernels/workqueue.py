"""The queue of one job's pieces that threads share, in compiled code: no thread needs the GIL.

The queue is an array of int64 words. The calling thread publishes a job (address of the compiled
function, address of its arguments, number of rows, rows per piece) and opens the queue; all threads
take pieces until none is left; the caller closes the queue and waits until no worker uses it.
Workers spin for a moment after a job, then sleep until they are woken.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.kernels.atomics import (
    atomic_add,
    atomic_decrement,
    atomic_load,
    atomic_swap,
    call,
    pause,
    yield_core,
)
from featherbed.kernels.compiled import compiled

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

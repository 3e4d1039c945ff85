"""The threads that share a look-up, in compiled code: work is taken from a desk, nobody needs the GIL for it.

numba's own thread layers are not used: its work queue aborts under concurrent callers, its OpenMP layer dies after a fork.
The desk is an array of int64 words. Whoever leads lays out a job (address of the compiled function, address of its
arguments, how many rows, rows a piece) and opens the desk; everyone takes pieces until none is left; the leader closes the
desk and waits until nobody leans over it. Workers stay awake for a moment after a job, then sleep until they are woken.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from featherbed.kernels.compiled import compiled
from featherbed.kernels.shared import (
    breathe,
    call,
    give_way,
    shared_add,
    shared_load,
    shared_swap,
    shared_take,
)

# words of the desk, eight apart: each on a cache line of its own
SEQUENCE, OPEN, ACTIVE, NEXT, DONE, GOOD, ASLEEP, RETIRED = range(0, 64, 8)
JOB, BLOCK, COUNT, GRAIN = range(64, 68)
WORDS = 72
PATIENCE = 400  # turns of waiting, about 15 µs, before the core is offered to others


@compiled
def _take_pieces(desk: Any) -> None:
    base = np.uint64(desk.ctypes.data)
    job, block, count, grain = desk[JOB], desk[BLOCK], desk[COUNT], desk[GRAIN]
    pieces = (count + grain - 1) // grain
    while True:
        piece = shared_add(base + np.uint64(8 * NEXT), 1)
        if piece >= pieces:
            return
        if call(job, block, piece * grain, min(count, (piece + 1) * grain)) != 1:
            shared_swap(base + np.uint64(8 * GOOD), 0)
        shared_add(base + np.uint64(8 * DONE), 1)


@compiled
def open_desk(desk: Any, job: Any, block: Any, count: Any, grain: Any) -> Any:
    """Lay out a job and open the desk; return how many workers sleep and must be woken."""
    base = np.uint64(desk.ctypes.data)
    desk[JOB], desk[BLOCK], desk[COUNT], desk[GRAIN] = job, block, count, grain
    shared_swap(base + np.uint64(8 * NEXT), 0)
    shared_swap(base + np.uint64(8 * DONE), 0)
    shared_swap(base + np.uint64(8 * GOOD), 1)
    shared_swap(base + np.uint64(8 * OPEN), 1)
    shared_add(base + np.uint64(8 * SEQUENCE), 1)
    return shared_swap(base + np.uint64(8 * ASLEEP), 0)


@compiled
def _wait(turns: Any) -> Any:
    """Wait a moment; from time to time let others have the core, as whoever is waited for may need it."""
    if turns % PATIENCE == PATIENCE - 1:
        give_way()
    else:
        breathe()
    return turns + 1


@compiled
def finish(desk: Any) -> Any:
    """Take pieces like everyone, wait for those others took, close the desk; return 1 if every piece went well."""
    base = np.uint64(desk.ctypes.data)
    _take_pieces(desk)
    pieces = (desk[COUNT] + desk[GRAIN] - 1) // desk[GRAIN]
    turns = 0
    while shared_load(base + np.uint64(8 * DONE)) < pieces:
        turns = _wait(turns)
    shared_swap(base + np.uint64(8 * OPEN), 0)
    while shared_load(base + np.uint64(8 * ACTIVE)) > 0:
        turns = _wait(turns)
    return shared_load(base + np.uint64(8 * GOOD))


@compiled
def serve(desk: Any, heard: Any, turns: Any) -> Any:
    """Take part in jobs until none has come for so many turns; return the last one heard of, or -1 once retired."""
    base, idle = np.uint64(desk.ctypes.data), 0
    while idle < turns:
        now = shared_load(base + np.uint64(8 * SEQUENCE))
        if now == heard:
            idle = _wait(idle)
            continue
        heard, idle = now, 0
        if shared_load(base + np.uint64(8 * RETIRED)):
            return np.int64(-1)
        shared_add(base + np.uint64(8 * ACTIVE), 1)
        if shared_load(base + np.uint64(8 * OPEN)):
            _take_pieces(desk)
        shared_add(base + np.uint64(8 * ACTIVE), -1)
    return heard


@compiled
def may_sleep(desk: Any, heard: Any) -> Any:
    """Announce that a worker goes to sleep; return whether it has to wait for its wake-up call.

    If a job came meanwhile the announcement is taken back, unless a leader has already taken it: then the call is under way.
    """
    base = np.uint64(desk.ctypes.data)
    shared_add(base + np.uint64(8 * ASLEEP), 1)
    if shared_load(base + np.uint64(8 * SEQUENCE)) == heard:
        return True
    while True:
        asleep = shared_load(base + np.uint64(8 * ASLEEP))
        if asleep <= 0:
            return True
        if shared_take(base + np.uint64(8 * ASLEEP), asleep):
            return False


@compiled
def dismiss(desk: Any) -> None:
    """Tell the workers to leave."""
    base = np.uint64(desk.ctypes.data)
    shared_swap(base + np.uint64(8 * RETIRED), 1)
    shared_add(base + np.uint64(8 * SEQUENCE), 1)


@compiled
def alone(job: Any, block: Any, count: Any) -> Any:
    """Run a whole job in this thread."""
    return call(job, block, 0, count)

"""Side-by-side timing: contenders take turns in short bursts, medians are compared."""

import time

PAUSE = 0.02


def race(contenders, batches, bursts=15, burst=8, quantile=0.5, clock=time.perf_counter_ns):
    """Return the median time of each contender in nanoseconds a call, or another quantile.

    On a machine that runs other programs too, a low quantile compares what contenders can do, and so does the clock
    ``time.thread_time_ns`` if all of them work in the calling thread alone.

    ``contenders`` maps names to functions of a batch. They take turns in bursts of calls, each call on a batch of its own, so
    that none profits from rows another has just brought into the caches. Before a burst there is a pause in which waiting
    threads go to sleep (OpenMP's stay awake for milliseconds, on cores the next contender needs), and its first two calls,
    which wake the contender's own threads, are not counted.
    """
    times = {name: [] for name in contenders}
    number = 0
    for function in contenders.values():
        function(batches[0])
    for turn in range(bursts):
        order = list(contenders) if turn % 2 == 0 else list(reversed(contenders))
        for name in order:
            time.sleep(PAUSE)
            for call in range(burst + 2):
                batch = batches[number % len(batches)]
                number += 1
                start = clock()
                contenders[name](batch)
                spent = clock() - start
                if call > 1:
                    times[name].append(spent)
    return {name: sorted(spent)[int(quantile * len(spent))] for name, spent in times.items()}

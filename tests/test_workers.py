"""The worker processes of the fuzzers: every case has an outcome, whatever it does."""

import os
import signal
import time

import pytest

from fuzz.workers import run_cases


def behave(case):
    match case:
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            time.sleep(60)
        case "raise":
            raise KeyError("missing")
        case "allocate":
            return len(bytearray(1 << 32))
    return case * 2


def test_every_case_has_an_outcome():
    cases = [1, "crash", 2, "raise", 3, "hang", 4, "allocate", 5]
    outcomes = {o.case: o for o in run_cases(cases, behave, jobs=2, seconds=1, memory=1 << 28)}
    kinds = {case: outcomes[case].kind for case in cases}
    assert kinds == dict.fromkeys(range(1, 6), "done") | {
        "crash": "crash",
        "hang": "hang",
        "raise": "error",
        "allocate": "error",
    }
    assert [outcomes[n].result for n in range(1, 6)] == [2, 4, 6, 8, 10]
    assert outcomes["crash"].detail.startswith("SIGSEGV")
    assert outcomes["raise"].detail.startswith("KeyError: 'missing' at test_workers.py:")
    assert outcomes["allocate"].detail.startswith("MemoryError")


@pytest.mark.parametrize("cases", [[], [1]])
def test_fewer_cases_than_workers(cases):
    assert [o.result for o in run_cases(cases, behave, jobs=2)] == [2 * case for case in cases]

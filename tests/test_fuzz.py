"""A few thousand mutated files of fixed seeds: no crash, no hang, the same rows on both engines."""

import random

import pytest
from safetensors.numpy import load

from fuzz import run
from fuzz.corpus import write_corpus
from fuzz.exercise import REFUSED, Scores, differing, exercise, sources
from fuzz.mutate import Parts, mutant

CHUNKS, FILES = 3, 1000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, small=True)
    return folder


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_mutated_files(chunk, corpus, tmp_path):
    counts = run.fuzz(corpus, range(chunk * FILES, (chunk + 1) * FILES), 0, 1, tmp_path / "found")
    found = tmp_path / "found" / "reasons.txt"
    assert not found.exists(), found.read_text()[:2000]
    assert counts["files"] == FILES
    assert counts["opened"] > FILES // 2  # most get past the header and are really used


def test_the_corpus_is_sound(corpus):
    for name, data in sources(str(corpus)).items():
        assert exercise(data) == (True, []), name
        whole = Parts(data)
        again = whole.join(whole.header(random.Random(0)))
        assert set(load(again)) == set(whole.arrays)


def test_mutants_are_the_same_for_the_same_seed(corpus):
    files = sources(str(corpus))
    assert [mutant(files, 1, n) for n in range(20)] == [mutant(files, 1, n) for n in range(20)]
    assert len({mutant(files, 1, n)[0] for n in range(20)}) == 20


def test_a_finding_is_kept_with_its_reason(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_cases", lambda *_: [run_outcome(7)])
    counts = run.fuzz(corpus, range(1), 3, 1, tmp_path)
    assert counts["crash"] == 1
    assert (
        (tmp_path / "reasons.txt").read_text().startswith("crash-3-7.safetensors\tcrash: SIGSEGV")
    )
    assert (tmp_path / "crash-3-7.safetensors").read_bytes() == mutant(sources(str(corpus)), 3, 7)[
        0
    ]


def run_outcome(case):
    from fuzz.workers import Outcome

    return Outcome(case, "crash", detail="SIGSEGV")


def test_engines_that_differ_are_told_apart():
    import numpy as np

    row, nan = np.array([1.0, np.inf]), np.array([np.nan])
    assert differing(row, row * (1 + 1e-7)) is None
    assert differing(nan, nan) is None
    assert differing(REFUSED, REFUSED) is None
    assert "refused with numpy, accepted with numba" in differing(REFUSED, row)
    assert "1.0 with numpy" in differing(row, np.array([1.1, np.inf]))
    assert "inf with numpy" in differing(row, np.array([1.0, -np.inf]))
    assert differing(Scores(np.array([1e-6]), 10.0), Scores(np.array([2e-6]), 10.0)) is None

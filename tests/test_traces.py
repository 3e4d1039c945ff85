"""A training step is short enough to be followed: distinct files and functions of featherbed it enters."""

import sys
import threading
from pathlib import Path

import pytest
import torch

import featherbed as fb

ROOT = str(Path(fb.__file__).parent)
FILES, FUNCTIONS = 15, 50


def entered(run):
    """Return the (file, function) pairs of the package that ``run()`` enters, in any thread."""
    found = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            found.add((code.co_filename[len(ROOT) + 1 :], code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def test_a_step_with_slots_enters_few_files_and_functions():
    pytest.importorskip("numba")
    table = fb.AnchorTable(1000, 16, anchors=50, slots=8)
    penalties = {weights: fb.NonNegativeL1(1e-5) for weights in table.penalized}
    optimizer = fb.Yogi(table.parameters(), penalties=penalties)
    generator = torch.Generator().manual_seed(0)

    def train():
        for _ in range(16):  # in one of them anchors that rows lack are scored
            table(torch.randint(1000, (64,), generator=generator)).square().sum().backward()
            optimizer.step()

    train()
    found = entered(train)
    files = {file for file, _ in found}
    assert "kernels/train.py" in files, "the compiled loops take part"
    assert len(files) <= FILES, sorted(files)
    assert len(found) <= FUNCTIONS, sorted(found)

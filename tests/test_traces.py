"""What can be followed: distinct files and functions of featherbed that a training step or a run enters."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import featherbed as fb

ROOT = str(Path(fb.__file__).parent)
FILES, FUNCTIONS = 15, 50  # of a training step
RATINGS, TEXT = 25, 35  # files of a whole run


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


def files_of_second_run(train, source, folder, *settings):
    """Return the files entered by a run, when everything has been imported and compiled before."""
    train(source, folder / "first", *settings, progress=False)
    found = entered(lambda: train(source, folder / "second", *settings, progress=False))
    return {file for file, _ in found}


def test_training_a_recommender_within_a_budget_enters_few_files(tmp_path):
    pytest.importorskip("numba")
    from featherbed.apps.recommender import train_recommender

    rng = np.random.default_rng(0)
    users, items = rng.normal(size=(80, 3)), rng.normal(size=(60, 3))
    lines = ["user,item,rating,time"]
    for number, pair in enumerate(rng.permutation(80 * 60)[:2400].tolist()):
        u, i = divmod(pair, 60)
        rating = np.clip(round(3 + 0.8 * float(users[u] @ items[i])), 1, 5)
        lines.append(f"u{u},i{i},{rating},{number}")
    source = tmp_path / "ratings.csv"
    source.write_text("\n".join(lines))
    files = files_of_second_run(train_recommender, source, tmp_path, {"table.budget": "40KB"})
    assert {"apps/pipeline.py", "kernels/bayes.py", "report/ratings.py"} <= files
    assert len(files) <= RATINGS, sorted(files)


def test_training_a_text_classifier_enters_few_files(tmp_path):
    from featherbed.apps.classifier import train_classifier

    rng = np.random.default_rng(0)
    lines = ["label,text"]
    for number in range(400):
        words = rng.integers(30, size=8) + 30 * (number % 2) * (rng.random(8) < 0.7)
        lines.append(f"{number % 2},{' '.join(f'w{word}' for word in words)}")
    source = tmp_path / "texts.csv"
    source.write_text("\n".join(lines))
    files = files_of_second_run(train_classifier, source, tmp_path, {"training.epochs": 2})
    assert {"apps/pipeline.py", "tables/anchor.py", "report/texts.py"} <= files
    assert len(files) <= TEXT, sorted(files)

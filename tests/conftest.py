"""Shared fixtures: where real data is found."""

import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
torch.set_num_threads(1)  # small tensors: a second thread only waits for a busy core


def data_folder() -> Path | None:
    given = os.environ.get("FEATHERBED_DATA")
    folder = Path(given) if given else ROOT.parent / "shared" / "data"
    return folder if folder.is_dir() else None


@pytest.fixture
def data():
    folder = data_folder()
    if folder is None:
        pytest.skip("no data folder: set FEATHERBED_DATA to one")
    return folder


@pytest.fixture
def tensors():
    return torch.Generator().manual_seed(0)

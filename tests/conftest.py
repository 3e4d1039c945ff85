"""Shared fixtures: where real data is found."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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
    import torch

    return torch.Generator().manual_seed(0)

"""Shared fixtures: where real data is found. And what makes a test say the same alone, in any order and beside others."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent.parent


torch.set_num_threads(1)  # small tensors: a second thread only waits for a busy core
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("same")  # new examples: pytest --hypothesis-profile=explore


def data_folder() -> Path | None:
    given = os.environ.get("FEATHERBED_DATA")
    folder = Path(given) if given else ROOT.parent / "shared" / "data"
    return folder if folder.is_dir() else None


@pytest.fixture(autouse=True)
def same_draws(request):
    """Every test starts with the same draws, whichever ran before it in the same process."""
    torch.manual_seed(0)
    drawn = getattr(request.module, "RNG", None)
    if drawn is not None:
        drawn.bit_generator.state = np.random.default_rng(1).bit_generator.state


@pytest.fixture
def data():
    folder = data_folder()
    if folder is None:
        pytest.skip("no data folder: set FEATHERBED_DATA to one")
    return folder


@pytest.fixture
def tensors():
    return torch.Generator().manual_seed(0)

"""Shared fixtures: where real data is found. And what makes a test say the same alone, in any order and beside others."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER:  # numba's index has no lock: two workers with an empty cache can file different loops under one number
    kept = os.environ.get("NUMBA_CACHE_DIR") or ROOT / ".pytest_cache" / "numba"
    os.environ["NUMBA_CACHE_DIR"] = str(Path(kept) / WORKER)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

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

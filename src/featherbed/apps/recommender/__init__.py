"""Recommenders from files of ratings: train, store, serve.

Read in this order: train (the whole run), settings, data, graded or model or stream (the fit), serve
(the stored files), insight (the report).
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "BPR": "ranking",
    "MatrixFactorization": "model",
    "Recommender": "serve",
    "RecommenderSettings": "settings",
    "Split": "data",
    "StreamedFactorization": "stream",
    "check_recommender": "serve",
    "collect_rated": "serve",
    "fit_graded": "graded",
    "fit_model": "model",
    "fit_tables": "model",
    "load_split": "data",
    "make_split": "data",
    "save_split": "data",
    "sort_by_frequency": "data",
    "train_bpr": "ranking",
    "train_online": "online",
    "train_recommender": "train",
    "write_recommender": "serve",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

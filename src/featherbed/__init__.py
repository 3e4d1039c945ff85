"""featherbed: compact embedding tables. Train them, compress existing ones, store each in one file, serve it without torch.

Public names are loaded on first use, so ``import featherbed`` and ``featherbed.load`` never import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from featherbed.version import __version__

if TYPE_CHECKING:
    from featherbed.anchors import Coreset as Coreset
    from featherbed.anchors import Frequency as Frequency
    from featherbed.anchors import FrequencyThenClusters as FrequencyThenClusters
    from featherbed.anchors import GroupLasso as GroupLasso
    from featherbed.anchors import HalfNormal as HalfNormal
    from featherbed.anchors import KMeansPlusPlus as KMeansPlusPlus
    from featherbed.anchors import RandomBasis as RandomBasis
    from featherbed.anchors import TfIdf as TfIdf
    from featherbed.anchors import VocabularyDropout as VocabularyDropout
    from featherbed.anchors import Xavier as Xavier
    from featherbed.apps.recommender.serve import Recommender as Recommender
    from featherbed.codecs.compress import compress as compress
    from featherbed.errors import ArgumentError as ArgumentError
    from featherbed.errors import DataError as DataError
    from featherbed.errors import FeatherbedError as FeatherbedError
    from featherbed.errors import FeatherbedWarning as FeatherbedWarning
    from featherbed.errors import FormatError as FormatError
    from featherbed.errors import IdError as IdError
    from featherbed.errors import IsFolderError as IsFolderError
    from featherbed.errors import MissingExtra as MissingExtra
    from featherbed.errors import MissingFileError as MissingFileError
    from featherbed.errors import NotPackable as NotPackable
    from featherbed.errors import TrainingError as TrainingError
    from featherbed.errors import UnknownKeyError as UnknownKeyError
    from featherbed.graphs import Graph as Graph
    from featherbed.graphs import cooccurrence as cooccurrence
    from featherbed.graphs import cooccurrence_counts as cooccurrence_counts
    from featherbed.graphs import edge_file as edge_file
    from featherbed.graphs import wordnet as wordnet
    from featherbed.interop.disk import DiskRows as DiskRows
    from featherbed.interop.embedding import PackedEmbedding as PackedEmbedding
    from featherbed.interop.folder import compress_folder as compress_folder
    from featherbed.interop.onnx.export import to_onnx as to_onnx
    from featherbed.interop.pretrained import load_model as load_model
    from featherbed.interop.swap import compress_model as compress_model
    from featherbed.interop.swap import restore_model as restore_model
    from featherbed.interop.tuning import measure_model as measure_model
    from featherbed.interop.tuning import tune_model as tune_model
    from featherbed.losses import NCE as NCE
    from featherbed.losses import FullSoftmax as FullSoftmax
    from featherbed.losses import LogUniform as LogUniform
    from featherbed.losses import SampledSoftmax as SampledSoftmax
    from featherbed.losses import Uniform as Uniform
    from featherbed.losses import negative_pairs as negative_pairs
    from featherbed.losses import orthogonality as orthogonality
    from featherbed.losses import tied_cross_entropy as tied_cross_entropy
    from featherbed.optim import L1 as L1
    from featherbed.optim import SGD as SGD
    from featherbed.optim import Adagrad as Adagrad
    from featherbed.optim import AdamW as AdamW
    from featherbed.optim import Averaged as Averaged
    from featherbed.optim import Budget as Budget
    from featherbed.optim import GroupL1 as GroupL1
    from featherbed.optim import NonNegativeL1 as NonNegativeL1
    from featherbed.optim import Proximal as Proximal
    from featherbed.optim import Schedule as Schedule
    from featherbed.optim import Several as Several
    from featherbed.optim import Yogi as Yogi
    from featherbed.optim import clip_grad_norm_ as clip_grad_norm_
    from featherbed.optim.lazy.rows import settle as settle
    from featherbed.packed.anchor_weights import largest_pairs as largest_pairs
    from featherbed.packed.anchor_weights import objects_of as objects_of
    from featherbed.packed.anchor_weights import purity as purity
    from featherbed.packed.anchor_weights import zero_rows as zero_rows
    from featherbed.packed.file import check as check
    from featherbed.packed.file import load as load
    from featherbed.packed.file import save as save
    from featherbed.packed.keys import Keys as Keys
    from featherbed.packed.table import PackedTable as PackedTable
    from featherbed.sharing import SSE as SSE
    from featherbed.sharing import share as share
    from featherbed.tables import *  # noqa: F403 - every table class
    from featherbed.tables.arrivals import Arrivals as Arrivals
    from featherbed.tables.bag import Bag as Bag
    from featherbed.tables.composed import Composer as Composer
    from featherbed.tables.growth import Growth as Growth
    from featherbed.tables.guide import Online as Online
    from featherbed.tables.guide import Pretrained as Pretrained
    from featherbed.tables.model import auxiliary_loss as auxiliary_loss
    from featherbed.tables.model import split_codes as split_codes
    from featherbed.tables.product import Matching as Matching
    from featherbed.tables.relax import Softmax as Softmax
    from featherbed.tables.relax import StraightThrough as StraightThrough
    from featherbed.tables.relax import Temperature as Temperature
    from featherbed.tables.replace import replace_embeddings as replace_embeddings
    from featherbed.tables.selected import selected_rows as selected_rows
    from featherbed.tables.sizes import Sizes as Sizes
    from featherbed.tables.spec import make_table as make_table

_HOMES = {
    "featherbed.anchors": (
        "Coreset",
        "Frequency",
        "FrequencyThenClusters",
        "GroupLasso",
        "HalfNormal",
        "KMeansPlusPlus",
        "RandomBasis",
        "TfIdf",
        "VocabularyDropout",
        "Xavier",
    ),
    "featherbed.codecs.compress": ("compress",),
    "featherbed.errors": (
        "ArgumentError",
        "DataError",
        "FeatherbedError",
        "FeatherbedWarning",
        "FormatError",
        "IdError",
        "IsFolderError",
        "MissingExtra",
        "MissingFileError",
        "NotPackable",
        "TrainingError",
        "UnknownKeyError",
    ),
    "featherbed.interop.onnx.export": ("to_onnx",),
    "featherbed.graphs": (
        "Graph",
        "cooccurrence",
        "cooccurrence_counts",
        "edge_file",
        "wordnet",
    ),
    "featherbed.losses": (
        "FullSoftmax",
        "LogUniform",
        "NCE",
        "SampledSoftmax",
        "Uniform",
        "negative_pairs",
        "orthogonality",
        "tied_cross_entropy",
    ),
    "featherbed.optim": (
        "Adagrad",
        "AdamW",
        "Averaged",
        "Budget",
        "GroupL1",
        "L1",
        "NonNegativeL1",
        "Proximal",
        "SGD",
        "Schedule",
        "Several",
        "Yogi",
        "clip_grad_norm_",
    ),
    "featherbed.interop.disk": ("DiskRows",),
    "featherbed.interop.embedding": ("PackedEmbedding",),
    "featherbed.interop.folder": ("compress_folder",),
    "featherbed.interop.pretrained": ("load_model",),
    "featherbed.interop.swap": (
        "compress_model",
        "restore_model",
    ),
    "featherbed.interop.tuning": (
        "measure_model",
        "tune_model",
    ),
    "featherbed.packed.file": (
        "check",
        "load",
        "save",
    ),
    "featherbed.packed.anchor_weights": (
        "largest_pairs",
        "objects_of",
        "purity",
        "zero_rows",
    ),
    "featherbed.packed.keys": ("Keys",),
    "featherbed.packed.table": ("PackedTable",),
    "featherbed.optim.lazy.rows": ("settle",),
    "featherbed.apps.recommender.serve": ("Recommender",),
    "featherbed.sharing": (
        "SSE",
        "share",
    ),
    "featherbed.tables.arrivals": ("Arrivals",),
    "featherbed.tables.bag": ("Bag",),
    "featherbed.tables.growth": ("Growth",),
    "featherbed.tables.composed": ("Composer",),
    "featherbed.tables.product": ("Matching",),
    "featherbed.tables.guide": (
        "Online",
        "Pretrained",
    ),
    "featherbed.tables.model": (
        "auxiliary_loss",
        "split_codes",
    ),
    "featherbed.tables.relax": (
        "Softmax",
        "StraightThrough",
        "Temperature",
    ),
    "featherbed.tables.replace": ("replace_embeddings",),
    "featherbed.tables.selected": ("selected_rows",),
    "featherbed.tables.sizes": ("Sizes",),
    "featherbed.tables.spec": ("make_table",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
with open(f"{__path__[0]}/tables/__init__.py", encoding="utf-8") as _lines:  # noqa: PTH123, F405
    for _words in map(str.split, _lines):  # from HOME import NAME as NAME
        if _words[:1] == ["from"] and _words[-1].endswith("Table"):
            _HOME_OF[_words[-1]] = _words[1]

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        if name in ("testing", "tasks", "theory"):
            return import_module(f"featherbed.{name}")
        raise AttributeError(f"module 'featherbed' has no attribute {name!r}")
    try:
        module = import_module(_HOME_OF[name])
    except ModuleNotFoundError as error:
        if error.name == "torch":
            from featherbed.errors import MissingExtra

            raise MissingExtra("torch", "train", f"featherbed.{name}") from None
        raise
    return getattr(module, name)


def __dir__() -> list[str]:
    return list(__all__)

"""featherbed: compact embedding tables. Train them, compress existing ones, store each in one file, serve it without torch.

Public names are loaded on first use, so ``import featherbed`` and ``featherbed.load`` never import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from featherbed.version import __version__

if TYPE_CHECKING:
    from featherbed.anchors import Frequency as Frequency
    from featherbed.anchors import HalfNormal as HalfNormal
    from featherbed.anchors import Xavier as Xavier
    from featherbed.compression.run import compress as compress
    from featherbed.errors import ArgumentError as ArgumentError
    from featherbed.errors import DataError as DataError
    from featherbed.errors import FeatherbedError as FeatherbedError
    from featherbed.errors import FormatError as FormatError
    from featherbed.errors import IdError as IdError
    from featherbed.errors import MissingExtra as MissingExtra
    from featherbed.errors import NotPackable as NotPackable
    from featherbed.errors import UnknownKeyError as UnknownKeyError
    from featherbed.losses import NCE as NCE
    from featherbed.losses import FullSoftmax as FullSoftmax
    from featherbed.losses import LogUniform as LogUniform
    from featherbed.losses import SampledSoftmax as SampledSoftmax
    from featherbed.losses import Uniform as Uniform
    from featherbed.optim import L1 as L1
    from featherbed.optim import SGD as SGD
    from featherbed.optim import Adagrad as Adagrad
    from featherbed.optim import AdamW as AdamW
    from featherbed.optim import GroupL1 as GroupL1
    from featherbed.optim import NonNegativeL1 as NonNegativeL1
    from featherbed.optim import Proximal as Proximal
    from featherbed.optim import Several as Several
    from featherbed.optim import Yogi as Yogi
    from featherbed.optim import clip_grad_norm_ as clip_grad_norm_
    from featherbed.packed.file import check as check
    from featherbed.packed.file import load as load
    from featherbed.packed.file import save as save
    from featherbed.packed.table import PackedTable as PackedTable
    from featherbed.rows.parameter import settle as settle
    from featherbed.tables import AnchorTable as AnchorTable
    from featherbed.tables import DenseTable as DenseTable
    from featherbed.tables import HashedTable as HashedTable
    from featherbed.tables import KDTable as KDTable
    from featherbed.tables import LowRankTable as LowRankTable
    from featherbed.tables import ProductTable as ProductTable
    from featherbed.tables import QuantizedTable as QuantizedTable
    from featherbed.tables import RemainderTable as RemainderTable
    from featherbed.tables import SelectedTable as SelectedTable
    from featherbed.tables import Table as Table
    from featherbed.tables.bag import Bag as Bag
    from featherbed.tables.guide import Online as Online
    from featherbed.tables.guide import Pretrained as Pretrained
    from featherbed.tables.model import auxiliary_loss as auxiliary_loss
    from featherbed.tables.model import split_codes as split_codes
    from featherbed.tables.relax import Softmax as Softmax
    from featherbed.tables.relax import StraightThrough as StraightThrough
    from featherbed.tables.relax import Temperature as Temperature
    from featherbed.tables.replace import replace_embeddings as replace_embeddings
    from featherbed.tables.sizes import Sizes as Sizes
    from featherbed.tables.spec import make_table as make_table

_HOMES = {
    "featherbed.anchors": ("Frequency", "HalfNormal", "Xavier"),
    "featherbed.compression.run": ("compress",),
    "featherbed.errors": (
        "ArgumentError",
        "DataError",
        "FeatherbedError",
        "FormatError",
        "IdError",
        "MissingExtra",
        "NotPackable",
        "UnknownKeyError",
    ),
    "featherbed.losses": ("FullSoftmax", "LogUniform", "NCE", "SampledSoftmax", "Uniform"),
    "featherbed.optim": (
        "Adagrad",
        "AdamW",
        "GroupL1",
        "L1",
        "NonNegativeL1",
        "Proximal",
        "SGD",
        "Several",
        "Yogi",
        "clip_grad_norm_",
    ),
    "featherbed.packed.file": ("check", "load", "save"),
    "featherbed.packed.table": ("PackedTable",),
    "featherbed.rows.parameter": ("settle",),
    "featherbed.tables": (
        "AnchorTable",
        "DenseTable",
        "HashedTable",
        "KDTable",
        "LowRankTable",
        "ProductTable",
        "QuantizedTable",
        "RemainderTable",
        "SelectedTable",
        "Table",
    ),
    "featherbed.tables.bag": ("Bag",),
    "featherbed.tables.guide": ("Online", "Pretrained"),
    "featherbed.tables.relax": ("Softmax", "StraightThrough", "Temperature"),
    "featherbed.tables.replace": ("replace_embeddings",),
    "featherbed.tables.sizes": ("Sizes",),
    "featherbed.tables.spec": ("make_table",),
    "featherbed.tables.model": ("auxiliary_loss", "split_codes"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        if name in ("testing", "tasks"):
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

"""Tables: one file, one method."""

from featherbed.tables.anchor import AnchorTable
from featherbed.tables.dense import DenseTable
from featherbed.tables.hashed import HashedTable
from featherbed.tables.lowrank import LowRankTable
from featherbed.tables.quantized import QuantizedTable
from featherbed.tables.remainder import RemainderTable
from featherbed.tables.selected import SelectedTable
from featherbed.tables.table import Codes, Table

METHODS: tuple[type[Table], ...] = (
    AnchorTable,
    DenseTable,
    HashedTable,
    LowRankTable,
    QuantizedTable,
    RemainderTable,
    SelectedTable,
)

__all__ = [
    "METHODS",
    "AnchorTable",
    "Codes",
    "DenseTable",
    "HashedTable",
    "LowRankTable",
    "QuantizedTable",
    "RemainderTable",
    "SelectedTable",
    "Table",
]

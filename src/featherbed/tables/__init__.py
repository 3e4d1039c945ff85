"""Tables: one file, one method."""

from featherbed.tables.anchor import AnchorTable
from featherbed.tables.banded import BandedTable
from featherbed.tables.codes import Codes
from featherbed.tables.dense import DenseTable
from featherbed.tables.graded import GradedTable
from featherbed.tables.growing import GrowingAnchorTable
from featherbed.tables.hashed import HashedTable
from featherbed.tables.kd import KDTable
from featherbed.tables.lowrank import LowRankTable
from featherbed.tables.mixed import MixedTable
from featherbed.tables.mixture import MixtureTable
from featherbed.tables.product import ProductTable
from featherbed.tables.quantized import QuantizedTable
from featherbed.tables.remainder import RemainderTable
from featherbed.tables.selected import SelectedTable
from featherbed.tables.table import Table
from featherbed.tables.tensortrain import TensorTrainTable
from featherbed.tables.variational import VariationalTable

METHODS: tuple[type[Table], ...] = (
    AnchorTable,
    BandedTable,
    DenseTable,
    GradedTable,
    GrowingAnchorTable,
    HashedTable,
    KDTable,
    LowRankTable,
    MixedTable,
    MixtureTable,
    ProductTable,
    QuantizedTable,
    RemainderTable,
    SelectedTable,
    TensorTrainTable,
    VariationalTable,
)

__all__ = [
    "METHODS",
    "AnchorTable",
    "BandedTable",
    "Codes",
    "DenseTable",
    "GradedTable",
    "GrowingAnchorTable",
    "HashedTable",
    "KDTable",
    "LowRankTable",
    "MixedTable",
    "MixtureTable",
    "ProductTable",
    "QuantizedTable",
    "RemainderTable",
    "SelectedTable",
    "Table",
    "TensorTrainTable",
    "VariationalTable",
]

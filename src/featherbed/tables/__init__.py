"""Tables: one file, one method. The imports below are the public list.

One line makes a method public: ``fb.<Name>`` and specs find it; ``METHODS`` are all of them.
"""

from featherbed.tables.anchor import AnchorTable as AnchorTable
from featherbed.tables.banded import BandedTable as BandedTable
from featherbed.tables.codes import Codes as Codes
from featherbed.tables.dense import DenseTable as DenseTable
from featherbed.tables.graded import GradedTable as GradedTable
from featherbed.tables.growing import GrowingAnchorTable as GrowingAnchorTable
from featherbed.tables.hashed import HashedTable as HashedTable
from featherbed.tables.kd import KDTable as KDTable
from featherbed.tables.lowrank import LowRankTable as LowRankTable
from featherbed.tables.mixed import MixedTable as MixedTable
from featherbed.tables.mixture import MixtureTable as MixtureTable
from featherbed.tables.product import ProductTable as ProductTable
from featherbed.tables.quantized import QuantizedTable as QuantizedTable
from featherbed.tables.remainder import RemainderTable as RemainderTable
from featherbed.tables.selected import SelectedTable as SelectedTable
from featherbed.tables.table import Table as Table
from featherbed.tables.tensortrain import TensorTrainTable as TensorTrainTable
from featherbed.tables.variational import VariationalTable as VariationalTable

METHODS: tuple[type[Table], ...] = tuple(
    method
    for name, method in sorted(vars().items())
    if isinstance(method, type) and issubclass(method, Table) and method is not Table
)

__all__ = sorted(["METHODS", "Codes", "Table", *(method.__name__ for method in METHODS)])

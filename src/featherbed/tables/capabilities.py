"""Capabilities: the questions that training loops ask of a table instead of checking its type."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from featherbed.anchors.random import AnchorInit
from featherbed.errors import ArgumentError
from featherbed.optim.exempt import Exempt
from featherbed.tables.rows import RowModule

if TYPE_CHECKING:
    from featherbed.tables.table import Table

SCALE_SAMPLE = 4096  # rows whose standard deviation is measured


class Capabilities(RowModule):
    """The defaults for a table without special features; methods override those that concern them.

    Class attributes and class methods can also be asked of the class that a spec names, before a
    table exists: ``parse_spec(spec)[0].has_anchors``.
    """

    has_anchors: ClassVar[bool] = False  # rows weigh anchors: `transform` [V, K or slots], `atoms`
    sparse_codes: ClassVar[bool] = False  # a weight of zero leaves its atom out of the row
    selects_rows: ClassVar[bool] = False  # keeps a number of rows, those of the largest `counts`
    is_dense: ClassVar[bool] = False  # every row is stored as it is
    grows: ClassVar[bool] = False  # fb.Growth adds and removes atoms
    relaxes_rows: ClassVar[bool] = False  # forward in training may differ from lookup (noise ...)
    nonnegative: bool = False  # penalized weights are kept at zero and above
    slots: int | None = None  # maximum number of weights of a row, where a method limits it
    on_training: Callable[[], None] | None = None  # called before rows are looked up in training
    on_gradient: Callable[[Tensor], None] | None = None  # called with the gradients of rows

    @abstractmethod
    def parameter_count(self) -> int:
        """Count parameters as the method's paper does."""

    def code_bits(self) -> float | None:
        """Return the bits of learned codes as their papers count them, None without codes."""
        return None

    def code_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that only choose codes (own optimizer, no clipping)."""
        return []

    def auxiliary(self) -> Tensor | None:
        """Return the method's loss term for the rows looked up since the last call, or None."""
        return None

    @property
    def anchor_count(self) -> int:
        """Number of anchors, 0 for tables without any."""
        return 0

    @property
    def penalized(self) -> tuple[nn.Parameter, ...]:
        """Parameters whose entries an L1 penalty or an ``fb.Budget`` makes sparse."""
        return ()

    @property
    def penalized_rows(self) -> tuple[nn.Parameter, ...]:
        """Parameters [V, d] of which a group lasso (``fb.GroupL1``) may empty whole rows."""
        return ()

    @property
    def weighted_codes(self) -> bool:
        """Whether every row weighs all atoms of one dictionary: row = codes.values @ atoms."""
        return False

    @property
    def factors(self) -> tuple[nn.Parameter, nn.Parameter | None] | None:
        """(P [V, K], A [K, d]) if row(i) = P[i] A, (P [V, d], None) if row(i) = P[i], else None.

        Compiled training loops read and step these parameters and nothing else, so a subclass that
        changes rows or the loss is safe: ``factors`` is not inherited, it must be assigned again.
        """
        return None

    def schedulers(self, steps: int) -> list[Any]:
        """Return the objects to ``step()`` after the optimizer, in a training loop of ``steps``
        steps.

        Each has ``reached`` (an epoch cannot be the best one before it is true), ``state_dict`` and
        ``load_state_dict``.
        """
        return []

    def pruned(self) -> Table:
        """Return the table to pack after training, without rows emptied by a penalty."""
        return self  # type: ignore[return-value]

    def pruned_parameter_count(self) -> int:
        """Count parameters like ``parameter_count``, without those of emptied rows."""
        return self.parameter_count()

    def health(self) -> Any:
        """Return statistics on the use of learned codes (``fb.CodeHealth``), None without codes."""
        return None

    def anchor_objects(self) -> Tensor | None:  # int64 [K]
        """Return the id that each anchor represents, None if some anchor represents none."""
        return None

    def related(self, graph: Any) -> Exempt:
        """Return the (id, anchor) weights related by ``graph``, to exempt them from a penalty."""
        raise ArgumentError(
            f"{type(self).__name__} has no anchors that a graph could relate to its rows"
        )

    @classmethod
    def anchor_sizes(cls, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the number of anchors in each set, given constructor settings."""
        return ()

    @classmethod
    def init_settings(cls, inits: Sequence[AnchorInit]) -> dict[str, Any]:
        """Return the constructor keywords that initialize each set of anchors."""
        return {}

    @classmethod
    def settings_for(
        cls,
        parameters: float,
        rows: int,
        dim: int,
        settings: Mapping[str, Any],
    ) -> dict[str, Any] | None:
        """Return the setting that gives about ``parameters`` parameters, None if there is none."""
        return None

    @torch.no_grad()
    def scale_initial_rows(self, std: float) -> None:
        """Scale freshly initialized rows to the standard deviation ``std``.

        By default ``atoms`` are scaled by (std / std of rows)^(1/g), where g, the degree of the
        rows in the atoms, is measured by halving the atoms. Normalized rows (g = 0) are left
        unchanged.
        """
        atoms = getattr(self, "atoms", None)
        if not isinstance(atoms, Tensor):
            return
        was_training = self.training
        self.eval()
        count = min(SCALE_SAMPLE, self.num_embeddings)
        ids = torch.linspace(0, self.num_embeddings - 1, count, device=self.device).long()
        before = float(self(ids).std())
        atoms.mul_(0.5)
        after = float(self(ids).std())
        atoms.mul_(2.0)
        degree = math.log2(before / after) if before > 0 and after > 0 else 0.0
        if degree > 0.5:
            atoms.mul_((std / before) ** (1 / degree))
        self.train(was_training)

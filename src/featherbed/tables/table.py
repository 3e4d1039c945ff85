"""Table, the base class of all methods; loss terms and parameters of all tables of a model."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from featherbed.anchors.random import AnchorInit
from featherbed.checks import check_integer, is_integer
from featherbed.errors import ArgumentError, FeatherbedWarning, IdError, NotPackable
from featherbed.ops import bag_of, check_ids
from featherbed.optim.exempt import Exempt
from featherbed.packed.band import Band
from featherbed.packed.table import PackedTable
from featherbed.tables.codes import Codes
from featherbed.tables.computed import computed
from featherbed.tables.rows import RowModule
from featherbed.tables.sizes import Sizes, measure

UNWRITABLE = ["self", "num_embeddings", "embedding_dim", "generator", "dtype", "device", "counts"]
SCALE_SAMPLE = 4096  # rows whose standard deviation is measured
BLOCK_ELEMENTS = 1 << 22  # elements of the dense table that logits may hold at once


class Table(RowModule):
    """``num_embeddings`` rows of width ``embedding_dim``, called with ids of any shape like
    nn.Embedding.

    A method defines the composition of a row in ``codes`` and its storage in ``bands``; look-up,
    bags, logits, sizes and the packed form follow. The row at ``padding_idx`` is zero and has no
    gradient. Its capabilities have defaults for a table without special features.

    >>> import featherbed as fb
    >>> table = fb.AnchorTable(1000, 16, anchors=8)
    >>> table(torch.tensor([[3, 17], [42, 3]])).shape
    torch.Size([2, 2, 16])
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    example: ClassVar[dict[str, Any]] = {}  # keywords a small table of this class can be made with
    groups: ClassVar[dict[str, Any]] = {}  # keyword -> default of the small object it takes
    packable: ClassVar[bool] = True  # False: pack raises NotPackable
    weighs_rows: ClassVar[bool] = True  # False: fit_dense raises where weights are given
    # capabilities that training loops use, of a table or of the class of a spec
    # state tensors with one row per id, where a row is composed from these and from nothing else
    # that depends on its id: ``part`` and fb.distributed divide such tables by their rows
    row_tensors: tuple[str, ...] = ()
    has_anchors: ClassVar[bool] = False  # rows weigh anchors: `transform` [V, K or slots], `atoms`
    sparse_codes: ClassVar[bool] = False  # a weight of zero leaves its atom out of the row
    selects_rows: ClassVar[bool] = False  # keeps a number of rows, those of the largest `counts`
    is_dense: ClassVar[bool] = False  # every row is stored as it is
    rows_alike: ClassVar[bool] = True  # False: ids are sorted or counted (the most popular first)
    grows: ClassVar[bool] = False  # fb.Growth adds and removes atoms
    relaxes_rows: ClassVar[bool] = False  # forward in training may differ from lookup (noise ...)
    nonnegative: bool = False  # penalized weights are kept at zero and above
    slots: int | None = None  # maximum number of weights of a row, where a method limits it
    on_training: Callable[[], None] | None = None  # called before rows are looked up in training
    on_gradient: Callable[[Tensor], None] | None = None  # called with the gradients of rows

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        sparse: bool = False,
    ) -> None:
        super().__init__(sparse)
        self.num_embeddings = check_integer("num_embeddings", num_embeddings)
        self.embedding_dim = check_integer("embedding_dim", embedding_dim)
        if padding_idx is not None:
            if not is_integer(padding_idx, -num_embeddings, num_embeddings - 1):
                raise ArgumentError(
                    f"padding_idx={padding_idx!r}: give an id from 0 to {num_embeddings - 1}, or "
                    "None"
                )
            padding_idx = int(padding_idx) % num_embeddings
        self.padding_idx = padding_idx

    def initialize(self, generator: torch.Generator | None) -> None:
        """Call ``reset_parameters``, unless the table is on the meta device."""
        if not any(parameter.is_meta for parameter in self.parameters()):
            self.reset_parameters(generator)

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize every parameter and buffer as the constructor does."""

    @abstractmethod
    def codes(self, ids: Tensor) -> Codes:  # int64 [...]
        """Return the composition of the rows of ids (ids are already checked)."""

    def bands(self, values: str, dictionary: str, layout: str) -> list[Band]:
        """Return the packed bands, with values and dictionary in the given storage types."""
        raise NotPackable(f"{type(self).__name__} has no packed form: it defines no bands")

    def lookup(self, ids: Tensor) -> Tensor:  # int64 [...], checked -> [..., d]
        """Compose the rows of checked ids."""
        return self.mask_padding(ids, self.codes(ids).rows())

    def mask_padding(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return rows with zeros, and no gradient, where an id is the padding id."""
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((ids == self.padding_idx)[..., None], 0.0)

    def forward(self, ids: Tensor) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids."""
        if not isinstance(ids, Tensor):
            raise IdError(
                f"ids are a tensor of whole numbers, got {type(ids).__name__}: use "
                "torch.as_tensor(ids)"
            )
        checked = check_ids(ids, self.num_embeddings)
        return self.training_rows(checked) if self.relaxes_rows else self.lookup(checked)

    def training_rows(self, ids: Tensor) -> Tensor:  # int64 [...], checked -> [..., d]
        """Return the rows that ``forward`` returns: relaxed or noisy ones while training."""
        return self.lookup(ids)

    def __init_subclass__(cls, **settings: Any) -> None:
        """Record whether the method overrides ``training_rows``."""
        super().__init_subclass__(**settings)
        cls.relaxes_rows = cls.training_rows is not Table.training_rows

    @property
    def weight(self) -> Tensor:  # [V, d]
        """The dense table, computed on access and read-only (``fit_dense`` sets rows)."""
        return computed(self.dense_rows(), type(self).__name__)

    def all_ids(self) -> Tensor:  # int64 [V]
        """Return the ids 0 to V - 1, on the device of the table."""
        return torch.arange(self.num_embeddings, device=self.device)

    def dense_rows(self) -> Tensor:  # [V, d]
        """Compute all rows."""
        return self.lookup(self.all_ids())

    def bag(
        self,
        ids: Tensor,  # integer [N] with offsets, or [B, n]
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        mode: str = "sum",
        include_last_offset: bool = False,
    ) -> Tensor:  # [B, d]
        """Pool rows into bags like nn.EmbeddingBag: Σ_i w_i row(i), or their mean."""
        if mode not in ("sum", "mean"):
            raise ArgumentError(f"mode={mode!r}: bags are pooled by sum or mean")
        if per_sample_weights is not None and mode != "sum":
            raise ArgumentError("per_sample_weights go with mode='sum' only, as in nn.EmbeddingBag")
        if per_sample_weights is not None and per_sample_weights.shape != ids.shape:
            raise ArgumentError(
                f"per_sample_weights {tuple(per_sample_weights.shape)} and ids {tuple(ids.shape)} "
                "differ in shape"
            )
        if ids.dim() == 2:
            if offsets is not None:
                raise ArgumentError(
                    "offsets go with 1-D ids; for 2-D ids each row is a bag already"
                )
            bags = ids.shape[0]
            owner = torch.arange(bags, device=ids.device).repeat_interleave(
                ids.shape[1], output_size=ids.numel()
            )
        elif ids.dim() == 1 and offsets is not None:
            bags = offsets.shape[0] - include_last_offset
            owner = bag_of(offsets, ids.shape[0], include_last_offset)
        else:
            raise ArgumentError(
                f"bag takes 2-D ids, or 1-D ids with offsets; got {ids.dim()}-D ids"
            )
        ids = check_ids(ids, self.num_embeddings).reshape(-1)
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        pooled = self.pooled(ids, owner, bags, weights)
        if mode == "sum":
            return pooled
        counted = (ids != (-1 if self.padding_idx is None else self.padding_idx)).long()
        sizes = torch.zeros(bags, dtype=torch.int64, device=ids.device).index_add(0, owner, counted)
        return pooled / sizes.clamp(min=1)[:, None].to(pooled.dtype)

    def pooled(self, ids: Tensor, owner: Tensor, bags: int, weights: Tensor | None) -> Tensor:
        """Sum the weighted rows of checked ids [n] into the bags given by ``owner`` [n]."""
        rows = self.training_rows(ids)
        if weights is not None:
            rows = rows * weights[:, None].to(rows.dtype)
        if self.padding_idx is not None:
            rows = rows.masked_fill((ids == self.padding_idx)[:, None], 0.0)
        return rows.new_zeros(bags, self.embedding_dim).index_add(0, owner, rows)

    def logits(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """Return hidden . row(i) for every id: a softmax tied to this table.

        Computed through the atoms, Σ_j v_ij (h . a_j), if the composer is a sum and there are fewer
        hidden vectors than d; otherwise in blocks of rows that are recomputed in the backward pass,
        so that at most one block is dense at a time.
        """
        if hidden.shape[-1] != self.embedding_dim:
            raise ArgumentError(
                f"hidden vectors have width {hidden.shape[-1]}, rows have {self.embedding_dim}"
            )
        flat = hidden.reshape(-1, self.embedding_dim)
        block = max(1, BLOCK_ELEMENTS // self.embedding_dim)
        if self._through_atoms(flat.shape[0]):
            scores = self._atom_logits(flat)
        elif self.num_embeddings <= block:
            scores = flat @ self.dense_rows().to(flat.dtype).T
        else:
            starts = range(0, self.num_embeddings, block)
            scores = torch.cat(
                [self._block_logits(flat, s, min(s + block, self.num_embeddings)) for s in starts],
                dim=1,
            )
        return scores.reshape(*hidden.shape[:-1], self.num_embeddings)

    def _through_atoms(self, count: int) -> bool:
        probe = self.codes(torch.zeros(1, dtype=torch.int64, device=self.device))
        plain = probe.combine == "sum" and probe.then is None
        return plain and probe.dictionary is not None and count < self.embedding_dim

    def _atom_logits(self, flat: Tensor) -> Tensor:  # [n, d] -> [n, V]
        ids = torch.arange(self.num_embeddings, device=flat.device)
        codes = self.codes(ids)
        assert codes.dictionary is not None
        scores = flat @ codes.dictionary.to(flat.dtype).T  # [n, K]
        if codes.indices is None:
            assert codes.values is not None
            total = scores @ codes.values.to(flat.dtype).T
        else:
            total = flat.new_zeros(flat.shape[0], self.num_embeddings)
            for j, index in enumerate(codes.indices.unbind(1)):
                part = scores.index_select(1, index)
                if codes.values is not None:
                    part = part * codes.values[:, j].to(flat.dtype)
                total = total + part
        return self.mask_padding(ids, total.T).T if self.padding_idx is not None else total

    def _block_logits(self, flat: Tensor, start: int, stop: int) -> Tensor:  # [n, d] -> [n, block]
        def score(queries: Tensor) -> Tensor:
            rows = self.lookup(torch.arange(start, stop, device=queries.device))
            return queries @ rows.to(queries.dtype).T

        if not torch.is_grad_enabled():
            return score(flat)
        scores: Tensor = checkpoint(score, flat, use_reentrant=False, preserve_rng_state=False)
        return scores

    def pack(
        self, values: str = "float32", dictionary: str = "float32", layout: str = "auto"
    ) -> PackedTable:
        """Return the packed form; without arguments it holds every row exactly.

        ``values`` and ``dictionary``: float32, float16, int8, int4, int3 or int2. ``layout`` of
        sparse values: auto (the smallest), fixed, ragged or all.
        """
        with torch.no_grad():
            bands = self.bands(values, dictionary, layout)
        return PackedTable(
            bands, self.embedding_dim, padding_idx=self.padding_idx, made_by=self.described()
        )

    def sizes(self, optimizer: torch.optim.Optimizer | None = None) -> Sizes:
        """Return the four sizes: file, resident, training (with optimizer state) and parameters."""
        packed = self.pack()
        return Sizes(
            file=sum(packed.sizes_by_part().values()),
            resident=packed.nbytes,
            training=None if optimizer is None else measure(self, optimizer),
            parameters=self.parameter_count(),
            dense=self.num_embeddings * self.embedding_dim * 4,
            code_bits=self.code_bits(),
        )

    @classmethod
    def from_dense(cls, matrix: Tensor, **settings: Any) -> Self:  # [V, d]
        """Return a table fitted to ``matrix``, with the given constructor settings."""
        if isinstance(matrix, np.ndarray):
            matrix = torch.from_numpy(matrix)
        if not isinstance(matrix, Tensor):
            given = f"{type(matrix).__name__} (of a module, give its weight)"
            raise ArgumentError(f"from_dense takes a matrix [V, d], got {given}")
        if matrix.dim() != 2:
            shape = tuple(matrix.shape)
            raise ArgumentError(f"from_dense takes a matrix [V, d], got shape {shape}")
        if not matrix.is_floating_point():
            raise ArgumentError(f"from_dense takes a float matrix, got {matrix.dtype}")
        if not bool(torch.isfinite(matrix).all()):
            bad = int((~torch.isfinite(matrix)).any(dim=1).nonzero()[0])
            raise ArgumentError(f"row {bad} of the matrix holds NaN or infinity: clean it first")
        settings.setdefault("dtype", matrix.dtype)
        settings.setdefault("device", matrix.device)
        table = cls(matrix.shape[0], matrix.shape[1], **settings)
        with torch.no_grad():
            target = matrix.detach().to(device=table.device, dtype=table.dtype).clone()
            table.fit_dense(table.without_padding(target))
        if not all(bool(torch.isfinite(parameter).all()) for parameter in table.parameters()):
            raise ArgumentError(
                f"the fit does not fit into {table.dtype}: pass dtype=torch.float32"
            )
        return table

    def without_padding(self, matrix: Tensor) -> Tensor:  # [V, d]
        """Return the matrix with a zero padding row; warn if that row was not zero."""
        padding = self.padding_idx
        if padding is None or not bool(matrix[padding].any()):
            return matrix
        warnings.warn(
            f"row {padding} of the matrix is the padding row of this {type(self).__name__}, which "
            "is zero: its numbers are dropped (fb.DenseTable keeps them)",
            FeatherbedWarning,
            stacklevel=3,
        )
        found = matrix.clone()
        found[padding] = 0
        return found

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,  # [V, d]
        freeze: bool = True,
        padding_idx: int | None = None,
        **settings: Any,
    ) -> Self:
        """Return a table fitted to ``embeddings``, frozen by default, like nn.Embedding.

        >>> import featherbed as fb
        >>> table = fb.DenseTable.from_pretrained(torch.eye(3))
        >>> table.weight.requires_grad, table(torch.tensor([1])).tolist()
        (False, [[0.0, 1.0, 0.0]])
        """
        table = cls.from_dense(embeddings, padding_idx=padding_idx, **settings)
        return table.requires_grad_(not freeze)

    @abstractmethod
    def fit_dense(self, matrix: Tensor, weights: Tensor | None = None) -> None:  # [V, d], [V]
        """Fit the parameters to ``matrix``.

        ``weights`` are the weights of the rows' squared errors, equal by default.
        """

    @abstractmethod
    def parameter_count(self) -> int:
        """Count parameters as the method's paper does."""

    def part(self, start: int, stop: int) -> Self:
        """Return a copy of the rows ``start`` to ``stop - 1``, with a copy of all that rows share.

        >>> import featherbed as fb
        >>> table = fb.AnchorTable(10, 4, anchors=3)
        >>> part = table.part(6, 10)
        >>> torch.equal(part(torch.tensor([0])), table(torch.tensor([6])))
        True
        """
        if not self.row_tensors:
            raise ArgumentError(
                f"the rows of this {type(self).__name__} cannot be divided: they depend on their "
                "ids, or on each other"
            )
        self.settle()
        # settings such as `init` are shared; everything else is copied
        memo: dict[int, Any] = {id(value): value for value in self.settings().values()}
        for name in self.row_tensors:
            whole = self._parameters.get(name, self._buffers.get(name))
            if whole is not None:
                some = whole.detach()[start:stop].clone()
                divided = isinstance(whole, nn.Parameter)
                memo[id(whole)] = nn.Parameter(some, whole.requires_grad) if divided else some
        found = copy.deepcopy(self, memo)
        found.num_embeddings = stop - start
        inside = self.padding_idx is not None and start <= self.padding_idx < stop
        found.padding_idx = self.padding_idx - start if inside else None  # type: ignore[operator]
        return found

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
        """Return the objects to ``step()`` after the optimizer, in a loop of ``steps`` steps.

        Each has ``reached`` (an epoch cannot be the best one before it is true), ``state_dict`` and
        ``load_state_dict``.
        """
        return []

    def pruned(self) -> Table:
        """Return the table to pack after training, without rows emptied by a penalty."""
        return self

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
        cls, parameters: float, rows: int, dim: int, settings: Mapping[str, Any]
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

    def settings(self) -> dict[str, Any]:
        """Return the constructor's keywords and values, as shown by repr and file metadata."""
        return {name: getattr(self, name) for name in keywords(type(self)) if hasattr(self, name)}

    def described(self) -> dict[str, Any]:
        """Return class and settings as plain values, for a file's metadata."""
        plain = {
            k: v if isinstance(v, int | float | str | bool | None) else repr(v)
            for k, v in self.settings().items()
        }
        return {"table": type(self).__name__} | plain

    def extra_repr(self) -> str:
        """Show the arguments of the constructor."""
        shown = "".join(
            f", {n}={v!r}"
            for n, v in self.settings().items()
            if v is not None and (n, v) != ("sparse", False)
        )
        return f"{self.num_embeddings}, {self.embedding_dim}{shown}"


def keywords(method: type[Table]) -> dict[str, inspect.Parameter]:
    """Return the constructor keywords of a method that a spec can write, by name."""
    parameters = inspect.signature(method.__init__).parameters
    return {name: parameter for name, parameter in parameters.items() if name not in UNWRITABLE}


def auxiliary_loss(model: nn.Module) -> Tensor | float:
    """Return the sum of the loss terms of all tables of a model, 0.0 if there are none.

    >>> auxiliary_loss(nn.Linear(2, 2))
    0.0
    """
    added = [module.auxiliary() for module in model.modules() if isinstance(module, Table)]
    return sum((part for part in added if part is not None), 0.0)


def split_codes(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of a model that only choose codes, and all others.

    >>> [len(part) for part in split_codes(nn.Linear(2, 2))]
    [0, 2]
    """
    codes = [
        p
        for module in model.modules()
        if isinstance(module, Table)
        for p in module.code_parameters()
    ]
    known = {id(p) for p in codes}
    return codes, [p for p in model.parameters() if id(p) not in known]

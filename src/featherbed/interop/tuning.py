"""``fb.tune_model``: train a compressed table so that the model predicts as the original does.

Codes are fixed; dictionaries, bases, norms and scales are trained, and stored in their original
formats, so that the size does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.checks import check_integer, check_number
from featherbed.errors import ArgumentError
from featherbed.interop.embedding import PackedEmbedding, TiedModule
from featherbed.interop.swap import is_pretrained, packed_places
from featherbed.ops import check_ids
from featherbed.packed.band import Affine, Band, Every, Identity
from featherbed.packed.matrix import Graded, Matrix, level_bits, unpack_levels
from featherbed.packed.table import PackedTable

MAX_NATS = 700.0  # bound of the logarithm of a perplexity, so that it does not overflow
Z = 1.96  # standard errors on either side of a 95 % interval


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Return a copy of an array as a tensor."""
    return torch.from_numpy(np.array(array))


class TrainableMatrix(nn.Module):
    """A stored matrix whose elements are all trained."""

    def __init__(self, stored: Matrix) -> None:
        super().__init__()
        self.stored = stored
        self.elements = nn.Parameter(as_tensor(stored.dense()))

    def rows(self, positions: Tensor) -> Tensor:  # [n] -> [n, m]
        """Return rows."""
        return nn.functional.embedding(positions, self.elements)

    def dense(self) -> Tensor:
        """Return the matrix."""
        return self.elements

    def pack(self) -> Matrix:
        """Return the matrix in its original format."""
        scale = self.stored.scale
        half = scale is not None and scale.dtype == np.float16
        return Matrix.encode(
            self.elements.detach().cpu().numpy(),
            self.stored.kind,
            "column" if self.stored.axis else "row",
            "float16" if half else "float32",
        )


class TrainableScales(nn.Module):
    """A quantized matrix whose scales are trained: x = scale (level - (2^bits - 1) / 2)."""

    levels: Tensor  # uint8 [n, m]

    def __init__(self, stored: Matrix) -> None:
        super().__init__()
        assert stored.scale is not None
        self.stored, bits = stored, level_bits(stored.kind)
        self.middle = (2**bits - 1) / 2
        data = np.ascontiguousarray(stored.data).astype(np.uint8, copy=False)
        levels = as_tensor(unpack_levels(data, bits, stored.shape[1]))
        self.register_buffer("levels", levels, persistent=False)
        self.scale = nn.Parameter(as_tensor(stored.scale.astype(np.float32)))

    def rows(self, positions: Tensor) -> Tensor:  # [n] -> [n, m]
        """Return rows."""
        scale = self.scale if self.stored.axis else self.scale[positions][:, None]
        rows: Tensor = (self.levels[positions].to(scale.dtype) - self.middle) * scale
        return rows

    def dense(self) -> Tensor:
        """Return the matrix."""
        return self.rows(torch.arange(len(self.levels), device=self.levels.device))

    def pack(self) -> Matrix:
        """Return the matrix with the new scales and the original levels."""
        assert self.stored.scale is not None
        scale = self.scale.detach().cpu().numpy().astype(self.stored.scale.dtype)
        return replace(self.stored, scale=scale)


def trainable_rows(stored: Any) -> TrainableMatrix | TrainableScales:
    """Return the trainable form of rows that are stored one by one."""
    return TrainableMatrix(stored) if stored.scale is None else TrainableScales(stored)


class TrainableBand(nn.Module):
    """A band with gradients: norms * affine(combine(dictionary[indices], values) + plus)."""

    indices: Tensor | None  # int64 [rows, s]
    values: Tensor | None  # [rows, s]
    stored: TrainableMatrix | TrainableScales | None
    dictionary: TrainableMatrix | TrainableScales | None

    def __init__(self, band: Band, ids: NDArray[np.int64]) -> None:  # ids [rows] of the band
        super().__init__()
        if band.cell is not None or isinstance(band.values, Graded):
            raise ArgumentError(
                "graded rows and rows of a composer with a cell cannot be tuned: "
                "compress by another method"
            )
        self.band = band
        dense = isinstance(band.codes, Every)
        codes = (None, None) if dense else band.fetch(ids, np.arange(band.rows, dtype=np.int64))
        for name, array in zip(("indices", "values"), codes, strict=True):
            tensor = None if array is None else as_tensor(array)
            self.register_buffer(name, tensor, persistent=False)
        self.stored = trainable_rows(band.values) if dense and band.values is not None else None
        self.dictionary = None
        if band.dictionary is not None:
            own_rows = isinstance(band.codes, Identity)
            self.dictionary = (trainable_rows if own_rows else TrainableMatrix)(band.dictionary)
        self.norms = None if band.norms is None else TrainableMatrix(band.norms)
        self.plus = None if band.plus is None else TrainableBand(band.plus, ids)
        affine = band.affine or Affine()
        self.basis = None if affine.weight is None else TrainableMatrix(affine.weight)
        self.bias = None if affine.bias is None else nn.Parameter(as_tensor(affine.bias))

    def forward(self, positions: Tensor) -> Tensor:  # [n] -> [n, d]
        """Return rows."""
        rows: Tensor = self.combine(positions)
        rows = rows if self.plus is None else rows + self.plus(positions)
        rows = rows if self.basis is None else rows @ self.basis.dense()
        rows = rows if self.bias is None else rows + self.bias
        return rows if self.norms is None else rows * self.norms.rows(positions)

    def combine(self, positions: Tensor) -> Tensor:  # [n] -> [n, d']
        """Combine atoms."""
        if self.stored is not None:
            rows = self.stored.rows(positions)
            return rows if self.dictionary is None else rows @ self.dictionary.dense()
        assert self.indices is not None
        assert self.dictionary is not None
        indices = self.indices[positions]
        weights = None if self.values is None else self.values[positions]
        if self.band.combine == "sum" and isinstance(self.dictionary, TrainableMatrix):
            return nn.functional.embedding_bag(
                indices, self.dictionary.dense(), mode="sum", per_sample_weights=weights
            )
        atoms = self.dictionary.rows(indices.reshape(-1)).reshape(*indices.shape, -1)
        atoms = atoms if weights is None else atoms * weights[..., None]
        if self.band.combine == "sum":
            return atoms.sum(1)
        if self.band.combine != "concat":
            raise ArgumentError(
                f"rows combined by {self.band.combine} cannot be tuned: compress by another method"
            )
        return atoms.flatten(1)

    def pack(self) -> Band:
        """Return the band with the trained parameters and the original codes."""
        weight = None if self.basis is None else self.basis.pack()
        bias = None if self.bias is None else self.bias.detach().cpu().numpy()
        norms = None if self.norms is None else self.norms.pack()
        return replace(
            self.band,
            values=self.band.values if self.stored is None else self.stored.pack(),
            dictionary=None if self.dictionary is None else self.dictionary.pack(),
            plus=None if self.plus is None else self.plus.pack(),
            affine=None if self.band.affine is None else Affine(weight, bias, norms),
        )


class TrainableEmbedding(nn.Module):
    """A packed embedding while it is tuned: the same rows and logits, with gradients.

    >>> import featherbed as fb
    >>> matrix = np.random.default_rng(0).standard_normal((600, 16))
    >>> packed = PackedEmbedding(fb.compress(matrix, ratio=3, method="int4"))
    >>> trainable = TrainableEmbedding(packed)
    >>> ids = torch.tensor([3, 17])
    >>> torch.allclose(trainable(ids), packed(ids), atol=1e-6), trainable(ids).requires_grad
    (True, True)
    """

    like: Tensor  # empty, with the dtype of rows

    def __init__(self, packed: PackedEmbedding) -> None:
        super().__init__()
        self.packed_table = table = packed.table
        self.num_embeddings, self.embedding_dim = packed.num_embeddings, packed.embedding_dim
        self.padding_idx, self.scale = packed.padding_idx, packed.scale
        self.register_buffer("like", packed.like.clone(), persistent=False)
        ids = np.arange(len(table), dtype=np.int64)
        self.bands = nn.ModuleList(
            TrainableBand(band, ids[batch]) for band, batch, _ in table.places(ids)
        )

    def forward(self, ids: Tensor) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids."""
        return self.rows(ids, self.scale)

    def rows(self, ids: Tensor, scale: float) -> Tensor:  # integer [...] -> [..., d]
        """Return the rows of ids times ``scale``."""
        unique, inverse = torch.unique(check_ids(ids, self.num_embeddings), return_inverse=True)
        rows = self.compose(unique)[inverse]
        return (rows if scale == 1 else rows * scale).to(self.like.dtype)

    def compose(self, ids: Tensor) -> Tensor:  # int64 [n] -> float32 [n, d]
        """Compute the rows of ids."""
        places = list(self.packed_table.places(ids.cpu().numpy()))
        parts = [
            band(torch.from_numpy(positions).to(ids.device))
            for band, (_, _, positions) in zip(self.bands, places, strict=False)
            if len(positions)
        ]
        order = torch.from_numpy(np.concatenate([batch for _, batch, _ in places])).to(ids.device)
        rows = torch.cat(parts)
        rows = rows if len(parts) == 1 else torch.empty_like(rows).index_copy(0, order, rows)
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((ids == self.padding_idx)[:, None], 0.0)

    @property
    def weight(self) -> Tensor:  # [V, d]
        """The dense rows, computed on each access."""
        ids = torch.arange(self.num_embeddings, device=self.like.device)
        return self.compose(ids).to(self.like.dtype)

    def logits(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """Return the logits of hidden states."""
        return hidden @ self.weight.T

    def pack(self) -> PackedTable:
        """Return the trained table."""
        table = self.packed_table
        bands = [band.pack() for band in self.bands]  # type: ignore[operator]
        return PackedTable(
            bands, table.dim, padding_idx=table.padding_idx, keys=table.keys, made_by=table.made_by
        )


@contextmanager
def restore_on_error(
    parameters: list[nn.Parameter], tables: list[PackedEmbedding]
) -> Iterator[Callable[[], None]]:
    """Restore parameters and packed tables after an error or Ctrl-C; yield a function that does."""
    values = [parameter.detach().clone() for parameter in parameters]
    buffers = [table.packed for table in tables]

    @torch.no_grad()
    def restore() -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
        for table, data in zip(tables, buffers, strict=True):
            table.replace(data)

    try:
        yield restore
    except BaseException:
        restore()
        raise


@contextmanager
def train_only(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Let only the given parameters of a model require gradients."""
    trained = {id(parameter) for parameter in parameters}
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in flags:
        parameter.requires_grad_(id(parameter) in trained)
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
            parameter.grad = None


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode (no dropout)."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def replaced_modules(
    model: nn.Module, old: list[PackedEmbedding], new: list[TrainableEmbedding]
) -> Iterator[None]:
    """Replace modules of a model; modules tied to them use the replacements."""
    _replace(model, old, new)
    try:
        yield
    finally:
        _replace(model, new, old)


def _replace(model: nn.Module, old: list[Any], new: list[Any]) -> None:
    new_of = {id(before): after for before, after in zip(old, new, strict=True)}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in new_of:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new_of[id(module)])
        elif isinstance(module, TiedModule) and id(module.embedding) in new_of:
            module.tie(new_of[id(module.embedding)])


@dataclass(frozen=True)
class Divergence:
    """Divergence of a model from the original on a text: means over sequences, 95 % intervals.

    ``divergence`` is KL(original || model) of the next token in nats; for models without logits,
    1 - cosine of the hidden states. ``perplexity`` is that of the next token, for causal models.
    """

    divergence: float
    divergence_error: float  # half of the interval
    perplexity: float | None = None
    perplexity_low: float | None = None
    perplexity_high: float | None = None

    def __str__(self) -> str:
        text = f"divergence {self.divergence:.5f} ± {self.divergence_error:.5f}"
        if self.perplexity is None:
            return text
        interval = f"({self.perplexity_low:.2f} to {self.perplexity_high:.2f})"
        return f"{text}, perplexity {self.perplexity:.2f} {interval}"


@dataclass(frozen=True)
class TuningResult:
    """Result of tuning: the original, the model before and after, and the loss of every step.

    ``kept`` is False if tuning did not reduce the divergence on the validation sequences; the
    model is then unchanged.
    """

    original: Divergence
    before: Divergence
    after: Divergence
    losses: tuple[float, ...]
    kept: bool = True

    def __str__(self) -> str:
        end = str(self.after) if self.kept else "no improvement, not kept: lower lr or add steps"
        return f"original    {self.original}\ncompressed  {self.before}\ntuned       {end}"


def tune_model(
    model: nn.Module,
    original: nn.Module,
    ids: Tensor,  # integer [sequences, length]
    *,
    validation: Tensor | None = None,  # integer [sequences, length]
    steps: int = 200,
    batch: int = 8,
    lr: float = 3e-3,
    norms: bool = False,
    generator: torch.Generator | None = None,
    tell: Callable[[str, float], None] = lambda _description, _share: None,
) -> TuningResult:
    """Train the packed tables of a model in place, so that it predicts as ``original`` does.

    The loss is KL(original || model) of the next token at every position of ``ids`` (1 - cosine of
    the hidden states if there are no logits). Codes are fixed; dictionaries, bases, norms and
    scales are trained by Adam with a cosine schedule and stored in their original formats. Other
    weights are fixed, except normalization layers with ``norms``. The result is kept if it reduces
    the divergence on the validation sequences.

    Args:
        model: a model with packed tables.
        original: the model before compression.
        ids: token sequences to train on.
        validation: token sequences to measure on (default: the last tenth of ``ids``).
        steps: number of steps.
        batch: sequences per step.
        lr: initial learning rate, relative to the root mean square of each parameter.
        norms: also train normalization layers.
        generator: random generator for batches.
        tell: called with a description and the completed share.

    >>> import copy, featherbed as fb
    >>> original = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 4))
    >>> model = copy.deepcopy(original)
    >>> _ = fb.compress_model(model, ratio=4, method="int4")
    >>> result = tune_model(model, original, torch.randint(1000, (40, 8)), steps=5)
    >>> len(result.losses), result.before.divergence > 0
    (5, True)
    """
    packed = [module for _, module, _, _ in packed_places(model)]
    check_tuning(model, original, packed, steps, batch, lr)
    ids, validation = split_sequences(ids, validation)
    before = measure_model(model, original, validation)
    trainable = [TrainableEmbedding(module) for module in packed]
    layers = norm_weights(model) if norms else []
    parameters = [*(p for table in trainable for p in table.parameters()), *layers]
    with restore_on_error(layers, packed) as restore:
        with (
            evaluation_mode(model, original),
            train_only(model, parameters),
            replaced_modules(model, packed, trainable),
        ):
            draw = generator or torch.Generator().manual_seed(0)
            losses = distill(
                *(model, original, ids, parameters, draw),
                steps=steps,
                batch=batch,
                lr=lr,
                tell=tell,
            )
        for module, table in zip(packed, trainable, strict=True):
            store_trained(module, table)
        after = measure_model(model, original, validation)
        kept = after.divergence < before.divergence
        if not kept:
            restore()
    if is_pretrained(model):
        from featherbed.interop.pretrained import mark

        mark(model)
    reference = measure_model(original, original, validation)
    return TuningResult(reference, before, after if kept else before, tuple(losses), kept)


def check_tuning(
    model: nn.Module,
    original: nn.Module,
    packed: list[PackedEmbedding],
    steps: int,
    batch: int,
    lr: float,
) -> None:
    """Refuse arguments with which tuning is impossible."""
    if not packed:
        raise ArgumentError(
            "the model has no packed table to tune: compress it first, "
            "by fb.compress_model(model, ratio=8)"
        )
    check_integer("steps", steps)
    check_integer("batch", batch)
    check_number("lr", lr, above=0)
    if original is model:
        raise ArgumentError(
            "original is the model itself: keep a copy from before, by copy.deepcopy(model)"
        )


def split_sequences(ids: Tensor, validation: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return training and validation sequences; the last tenth by default."""
    ids = check_sequences("ids", ids)
    if validation is not None:
        return ids, check_sequences("validation", validation)
    if len(ids) < 10:
        raise ArgumentError(
            f"{len(ids)} sequences are too few to hold out a tenth: give validation= as well"
        )
    return ids[: -(len(ids) // 10)], ids[-(len(ids) // 10) :]


def check_sequences(name: str, ids: Tensor) -> Tensor:
    """Return token sequences, or raise if they are not integers [sequences, length >= 2]."""
    if (
        not isinstance(ids, Tensor)
        or ids.dim() != 2
        or ids.is_floating_point()
        or ids.shape[0] < 1
        or ids.shape[1] < 2
    ):
        given = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentError(
            f"{name}: got {given}; give token ids [sequences, length], at least 2 long"
        )
    return ids.long()


def norm_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of normalization layers."""
    layers = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    return [parameter for layer in layers for parameter in layer.parameters(recurse=False)]


def distill(
    model: nn.Module,
    original: nn.Module,
    ids: Tensor,
    parameters: list[nn.Parameter],
    generator: torch.Generator,
    *,
    steps: int,
    batch: int,
    lr: float,
    tell: Callable[[str, float], None],
) -> list[float]:
    """Train parameters so that the model predicts as the original; return the losses."""
    optimizer = torch.optim.Adam(
        [
            {"params": [parameter], "lr": lr * root_mean_square(parameter)}
            for parameter in parameters
        ]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps)
    )
    losses = []
    for step in range(steps):
        part = ids[torch.randint(len(ids), (batch,), generator=generator)]
        with torch.no_grad():
            target = predict(original, part)
        loss = divergences(target, predict(model, part)).mean()
        if not torch.isfinite(loss):
            raise ArgumentError(f"the loss became {loss.item()} at step {step}: lower lr={lr}")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        tell(f"divergence {losses[-1]:.4f}", (step + 1) / steps)
    return losses


def root_mean_square(parameter: nn.Parameter) -> float:
    """Return the root mean square of a parameter, or 1 if it is all zero.

    >>> root_mean_square(nn.Parameter(torch.tensor([3.0, -3.0])))
    3.0
    """
    return float(parameter.detach().float().square().mean().sqrt()) or 1.0


def store_trained(module: PackedEmbedding, trained: TrainableEmbedding) -> None:
    """Replace the bytes of a packed embedding by those of the trained table."""
    module.replace(PackedEmbedding(trained.pack()).packed.to(module.packed.device))


def predict(model: nn.Module, ids: Tensor) -> Any:
    """Return the output of a model; encoder and decoder read the same sequences."""
    if not is_pretrained(model):
        return model(ids)
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model(input_ids=ids, decoder_input_ids=ids) if both else model(input_ids=ids)


def logits_or_states(output: Any) -> tuple[Tensor, bool]:
    """Return the logits of an output, or its hidden states, and whether they are logits."""
    if isinstance(output, Tensor):
        return output, True
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits, True
    states = getattr(output, "last_hidden_state", None)
    if not isinstance(states, Tensor):
        raise ArgumentError(
            f"the model returns {type(output).__name__}, which has neither logits nor "
            "last_hidden_state: tune a model that has one of them"
        )
    return states, False


def divergences(original: Any, output: Any) -> Tensor:  # -> [sequences, positions]
    """Return the divergence from the original's output at every position."""
    (target, are_logits), (found, _) = logits_or_states(original), logits_or_states(output)
    if not are_logits:
        return 1 - F.cosine_similarity(target.float(), found.float(), dim=-1)
    p, q = target.float().log_softmax(-1), found.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@torch.no_grad()
def measure_model(
    model: nn.Module, original: nn.Module, ids: Tensor, *, batch: int = 8
) -> Divergence:
    """Return the divergence of a model from the original, and its perplexity if it is causal.

    Means over the sequences ``ids`` [sequences, length]; intervals are 1.96 standard errors, for
    the perplexity on the logarithmic scale.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    >>> measure_model(model, model, torch.randint(10, (6, 5))).divergence
    0.0
    """
    distances: list[Tensor] = []
    costs: list[Tensor] = []
    for part in torch.split(check_sequences("ids", ids), batch):
        with evaluation_mode(model, original):
            target, output = predict(original, part), predict(model, part)
        distances.append(divergences(target, output).mean(1))
        found = logits_or_states(output)[0]
        if predicts_next(model, found):
            logits = found[:, :-1].float().flatten(0, 1)
            cost = F.cross_entropy(logits, part[:, 1:].flatten(), reduction="none")
            costs.append(cost.reshape(len(part), -1).mean(1))
    mean, error = interval(torch.cat(distances))
    if not costs:
        return Divergence(mean, error)
    nats, width = interval(torch.cat(costs))
    bounds = (nats, nats - width, nats + width)
    return Divergence(mean, error, *(math.exp(min(bound, MAX_NATS)) for bound in bounds))


def predicts_next(model: nn.Module, logits: Tensor) -> bool:
    """Whether logits are those of the next token; of a plain module, if it scores its input ids."""
    if is_pretrained(model):
        return type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
    sizes = {getattr(module, "num_embeddings", None) for module in model.modules()}
    return logits.dim() == 3 and logits.shape[-1] in sizes


def interval(values: Tensor) -> tuple[float, float]:
    """Return the mean of values and half of its 95 % interval."""
    error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return values.mean().item(), Z * error

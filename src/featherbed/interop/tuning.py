"""``fb.tune_model``: train a compressed table so that the model predicts as the original does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.checks import check_integer, check_number
from featherbed.errors import ArgumentError
from featherbed.interop.contexts import (
    evaluation_mode,
    replaced_modules,
    restore_on_error,
    train_only,
)
from featherbed.interop.embedding import PackedEmbedding
from featherbed.interop.swap import is_pretrained, packed_places
from featherbed.interop.trainable import TrainableEmbedding

MAX_NATS = 700.0  # bound of the logarithm of a perplexity, so that it does not overflow
Z = 1.96  # standard errors on either side of a 95 % interval


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

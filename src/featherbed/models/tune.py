"""``fb.tune_model``: a compressed model learns to answer as the original does. Only its table learns, or table and norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.errors import ArgumentError
from featherbed.models.embedding import PackedEmbedding
from featherbed.models.learn import LearntEmbedding
from featherbed.models.swap import is_pretrained, packed_places
from featherbed.models.within import evaluating, learning, restoring, swapped

MOST = 700.0  # nats: the perplexity of a model that has gone astray is large, not an error
Z = 1.96  # standard errors on either side of a 95 % interval


@dataclass(frozen=True)
class Divergence:
    """How far a model is from the original on a text, means over its pieces with 95 % intervals.

    ``divergence``: KL(original || model) of the next token, nats; of models without logits 1 - cosine of their states.
    ``perplexity``: of the next token, of causal models only.
    """

    divergence: float
    divergence_error: float  # half of the interval
    perplexity: float | None = None
    perplexity_low: float | None = None
    perplexity_high: float | None = None

    def __str__(self) -> str:
        said = f"divergence {self.divergence:.5f} ± {self.divergence_error:.5f}"
        if self.perplexity is None:
            return said
        return f"{said}, perplexity {self.perplexity:.2f} ({self.perplexity_low:.2f} to {self.perplexity_high:.2f})"


@dataclass(frozen=True)
class Tuned:
    """What tuning did: the original's own perplexity, the model before and after, and the loss of every step.

    ``kept``: whether what was learnt was kept, as it is where it brings the model nearer to the original on the held pieces.
    """

    original: Divergence
    before: Divergence
    after: Divergence
    losses: tuple[float, ...]
    kept: bool = True

    def __str__(self) -> str:
        end = (
            f"tuned       {self.after}"
            if self.kept
            else "tuned       no nearer, so not kept: try a lower lr or more steps"
        )
        return f"original    {self.original}\ncompressed  {self.before}\n{end}"


def tune_model(
    model: nn.Module,
    original: nn.Module,
    ids: Tensor,  # integer [pieces, length]
    *,
    held: Tensor | None = None,  # integer [pieces, length]
    steps: int = 200,
    batch: int = 8,
    lr: float = 3e-3,
    norms: bool = False,
    generator: torch.Generator | None = None,
    tell: Callable[[str, float], None] = lambda _what, _share: None,
) -> Tuned:
    """Tune the packed tables of a model in place, so that it answers as ``original`` does; return both, measured.

    The loss is KL(original || model) of the next token at every place of ``ids`` (1 - cosine of the states where there are no
    logits). Codes stay; dictionaries, bases, lengths and scales learn by Adam at a rate that falls by half a cosine, and are
    stored again in the bytes they had. All else stays, or with ``norms`` the weights of normalisations learn too. What was
    learnt is kept if the divergence on the held pieces is lower with it.

    Args:
        ids: pieces of a text to learn from, in tokens.
        held: other pieces, to measure by; a tenth of ``ids`` is held back where there are none.
        batch: pieces a step.
        lr: of the root mean square of every array is a step, at the beginning.
        norms: let layer norms learn too.
        generator: by which pieces are drawn.
        tell: is told what is done and which share of it.

    >>> import copy, featherbed as fb
    >>> original = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 4))
    >>> model = copy.deepcopy(original)
    >>> _ = fb.compress_model(model, ratio=4, method="int4")
    >>> tuned = tune_model(model, original, torch.randint(1000, (40, 8)), steps=5)
    >>> len(tuned.losses), tuned.before.divergence > 0
    (5, True)
    """
    places = list(packed_places(model))
    check_asked(model, original, bool(places), steps, batch, lr)
    ids = pieces("ids", ids)
    if held is None:
        if len(ids) < 10:
            raise ArgumentError(
                f"{len(ids)} pieces are too few to hold a tenth back: give held= as well"
            )
        ids, held = ids[: -(len(ids) // 10)], ids[-(len(ids) // 10) :]
    held = pieces("held", held)
    draw = generator or torch.Generator().manual_seed(0)
    before = measure_model(model, original, held)
    learnt = [LearntEmbedding(module) for _, module, _, _ in places]
    free = [parameter for one in learnt for parameter in one.parameters()]
    also = norm_weights(model) if norms else []
    packed = [module for _, module, _, _ in places]
    with restoring(also, packed) as state:
        with (
            evaluating(model, original),
            learning(model, [*free, *also]),
            swapped(model, packed, learnt),
        ):
            losses = follow(
                model,
                original,
                ids,
                [*free, *also],
                draw,
                steps=steps,
                batch=batch,
                lr=lr,
                tell=tell,
            )
        for module, one in zip(packed, learnt, strict=True):
            renew(module, one)
        after = measure_model(model, original, held)
        kept = after.divergence < before.divergence
        if not kept:
            state.restore()
            after = before
    if is_pretrained(model):
        from featherbed.models.pretrained import mark

        mark(model)
    return Tuned(measure_model(original, original, held), before, after, tuple(losses), kept)


def check_asked(
    model: nn.Module, original: nn.Module, packed: bool, steps: int, batch: int, lr: float
) -> None:
    """Refuse what cannot be tuned, or not so."""
    if not packed:
        raise ArgumentError(
            "the model has no packed table to tune: compress it first, by fb.compress_model(model, ratio=8)"
        )
    for name, given in (("steps", steps), ("batch", batch)):
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ArgumentError(f"{name}={given!r}: give a whole number of at least 1")
    if not (math.isfinite(lr) and lr > 0):
        raise ArgumentError(f"lr={lr}: give a number above 0")
    if original is model:
        raise ArgumentError(
            "original is the model itself: keep a copy from before, by copy.deepcopy(model)"
        )


def pieces(name: str, given: Tensor) -> Tensor:
    """Return pieces of a text, or say what they must be."""
    if (
        not isinstance(given, Tensor)
        or given.dim() != 2
        or given.is_floating_point()
        or given.shape[0] < 1
        or given.shape[1] < 2
    ):
        what = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ArgumentError(f"{name}: got {what}; give token ids [pieces, length], at least 2 long")
    return given.long()


def norm_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of normalisations."""
    found = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    return [parameter for module in found for parameter in module.parameters(recurse=False)]


def follow(
    model: nn.Module,
    original: nn.Module,
    ids: Tensor,
    free: list[nn.Parameter],
    draw: torch.Generator,
    *,
    steps: int,
    batch: int,
    lr: float,
    tell: Callable[[str, float], None],
) -> list[float]:
    """Let parameters learn to answer as the original does; return the loss of every step."""
    optimizer = torch.optim.Adam([{"params": [one], "lr": lr * size_of(one)} for one in free])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps)
    )
    losses = []
    for step in range(steps):
        part = ids[torch.randint(len(ids), (batch,), generator=draw)]
        with torch.no_grad():
            wanted = answer(original, part)
        loss = distances(wanted, answer(model, part)).mean()
        if not torch.isfinite(loss):
            raise ArgumentError(f"the loss became {loss.item()} at step {step}: lower lr={lr}")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        tell(f"divergence {losses[-1]:.4f}", (step + 1) / steps)
    return losses


def size_of(parameter: nn.Parameter) -> float:
    """Return the root mean square of an array, or 1 where it is all zero: steps are a share of it.

    >>> size_of(nn.Parameter(torch.tensor([3.0, -3.0])))
    3.0
    """
    return float(parameter.detach().float().square().mean().sqrt()) or 1.0


def renew(module: PackedEmbedding, learnt: LearntEmbedding) -> None:
    """Give a packed embedding the bytes of what was learnt."""
    module.replace(PackedEmbedding(learnt.pack()).packed.to(module.packed.device))


def answer(model: nn.Module, ids: Tensor) -> Any:
    """Return what a model says of pieces: its output. Of an encoder and decoder both read them."""
    if not is_pretrained(model):
        return model(ids)
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model(input_ids=ids, decoder_input_ids=ids) if both else model(input_ids=ids)


def said(output: Any) -> tuple[Tensor, bool]:
    """Return the logits of an output, or its states, and whether they are logits."""
    if isinstance(output, Tensor):
        return output, True
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits, True
    states = getattr(output, "last_hidden_state", None)
    if not isinstance(states, Tensor):
        raise ArgumentError(
            f"the model returns {type(output).__name__}, which has neither logits nor last_hidden_state"
        )
    return states, False


def distances(original: Any, output: Any) -> Tensor:  # -> [pieces, places]
    """Return how far answers are from the original's at every place."""
    (wanted, scored), (given, _) = said(original), said(output)
    if not scored:
        return 1 - F.cosine_similarity(wanted.float(), given.float(), dim=-1)
    first, second = wanted.float().log_softmax(-1), given.float().log_softmax(-1)
    return (first.exp() * (first - second)).sum(-1)


@torch.no_grad()
def measure_model(
    model: nn.Module, original: nn.Module, ids: Tensor, *, batch: int = 8
) -> Divergence:
    """Return how far a model's answers are from the original's on pieces [pieces, length], and its perplexity if it is causal.

    Means over pieces; intervals are 1.96 standard errors of them, of the perplexity in logarithms.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    >>> measure_model(model, model, torch.randint(10, (6, 5))).divergence
    0.0
    """
    apart: list[Tensor] = []
    costs: list[Tensor] = []
    for part in torch.split(pieces("ids", ids), batch):
        with evaluating(model, original):
            wanted, output = answer(original, part), answer(model, part)
        apart.append(distances(wanted, output).mean(1))
        if predicts_next(model, said(output)[0]):
            logits = said(output)[0][:, :-1].float()
            cost = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
            costs.append(cost.reshape(len(part), -1).mean(1))
    mean, error = interval(torch.cat(apart))
    if not costs:
        return Divergence(mean, error)
    nats, wide = interval(torch.cat(costs))
    return Divergence(
        mean, error, *(math.exp(min(one, MOST)) for one in (nats, nats - wide, nats + wide))
    )


def predicts_next(model: nn.Module, logits: Tensor) -> bool:
    """Whether a model's logits at a place are those of the next token; a plain module's, where it scores all it reads."""
    if is_pretrained(model):
        return type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
    read = {getattr(module, "num_embeddings", None) for module in model.modules()}
    return logits.dim() == 3 and logits.shape[-1] in read


def interval(each: Tensor) -> tuple[float, float]:
    """Return the mean of pieces and half of its 95 % interval."""
    error = each.std().item() / math.sqrt(len(each)) if len(each) > 1 else math.nan
    return each.mean().item(), Z * error

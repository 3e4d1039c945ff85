"""Online training: a stream of batches, each used once and trained until its loss settles."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from featherbed.errors import ArgumentError
from featherbed.tables import Growth

Batch = TypeVar("Batch")
WINDOW = 5  # steps over which the loss of a batch is compared


def train_online(
    batches: Iterable[Batch],
    train_loss: Callable[[Batch], Tensor],
    validation_loss: Callable[[Batch], Tensor],
    optimizer: Optimizer,
    *,
    growth: Growth | None = None,
    every: int = 20,
    ahead: int = 5,
    steps: int = 10,
    tolerance: float = 1e-3,
) -> Iterator[dict[str, float]]:
    """Train on a stream; yield the loss of each batch before and after training on it.

    A batch is trained until its loss falls by less than ``tolerance`` of it over the last five
    steps, or for ``steps`` steps; then it is dropped. Liang et al. (2021, online NBANT) take 50
    steps, which overfits each batch on MovieLens-1M; 5 are far better (research/studies/anchors).
    The stream may be endless, or a file larger than memory: at most ``ahead + 1`` batches are in
    memory.

    Args:
        train_loss: loss of a batch in training; it may add rows for new ids
            (``fb.Arrivals.admit``).
        validation_loss: loss of a batch in evaluation; unknown ids share one row
            (``fb.Arrivals.ids``).
        growth: decides every ``every`` batches, by the mean validation loss of the next ``ahead``
            batches, which have not been trained on.
    """
    if every < 1 or ahead < 1 or steps < 1:
        raise ArgumentError(f"every={every}, ahead={ahead}, steps={steps}: each is at least 1")
    stream = iter(batches)
    queue = deque(islice(stream, ahead + 1))
    if not queue:
        raise ArgumentError("the stream holds no batch")
    count = 0
    while queue:
        batch = queue.popleft()
        before = _mean_loss([batch], validation_loss)
        taken, loss = _fit_batch(batch, train_loss, optimizer, steps, tolerance)
        count += 1
        row = {"batch": count, "before": before, "after": loss, "steps": taken}
        if growth is not None:
            if count % every == 0 and queue:
                growth.step(lambda: _mean_loss(queue, validation_loss))
            row["anchors"] = growth.anchor_count
        queue.extend(islice(stream, 1))
        yield row


@torch.no_grad()
def _mean_loss(batches: Iterable[Batch], loss: Callable[[Batch], Tensor]) -> float:
    losses = [float(loss(batch)) for batch in batches]
    return sum(losses) / len(losses)


def _fit_batch(
    batch: Batch,
    loss: Callable[[Batch], Tensor],
    optimizer: Optimizer,
    steps: int,
    tolerance: float,
) -> tuple[int, float]:
    losses: list[float] = []
    for step in range(1, steps + 1):
        value = loss(batch)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(value.detach()))
        if step > WINDOW and losses[-1 - WINDOW] - losses[-1] < tolerance * abs(losses[-1]):
            break
    return len(losses), losses[-1]

"""Online learning: a stream of batches, each seen once and trained until it is learnt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from featherbed.errors import ArgumentError, DataError
from featherbed.tables.growth import Growth
from featherbed.tasks.data import open_text

Batch = TypeVar("Batch")
Triples = tuple[NDArray[np.str_], NDArray[np.str_], NDArray[np.float32]]
LAST = 5  # losses of a batch that are compared with those before


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
    """Learn from a stream; yield for each batch the loss it had before it was trained, and what became of it.

    A batch is trained until its loss, over the last five steps, falls by less than ``tolerance`` of it, or for ``steps`` steps;
    then it is gone (Liang et al. 2021, online NBANT, take 50 steps; on MovieLens-1M that learns each batch by heart, and 5 do
    far better: research/studies/anchors). ``growth`` decides every ``every`` batches, by the mean validation
    loss of the ``ahead`` batches that come next, which nothing has been trained on. The stream may be endless, or a file
    larger than memory: no more than ``ahead + 1`` batches are held.

    Args:
        train_loss: the loss of a batch in training; ids it has not seen get rows there (``fb.Arrivals.admit``).
        validation_loss: its loss in evaluation; unseen ids have the row of unseen ids (``fb.Arrivals.ids``).
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
        before = _evaluated([batch], validation_loss)
        taken, loss = _learn(batch, train_loss, optimizer, steps, tolerance)
        count += 1
        found = {"batch": count, "before": before, "after": loss, "steps": taken}
        if growth is not None:
            if count % every == 0 and queue:
                growth.step(lambda: _evaluated(queue, validation_loss))
            found["anchors"] = growth.anchor_count
        queue.extend(islice(stream, 1))
        yield found


@torch.no_grad()
def _evaluated(batches: Iterable[Batch], loss: Callable[[Batch], Tensor]) -> float:
    losses = [float(loss(batch)) for batch in batches]
    return sum(losses) / len(losses)


def _learn(
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
        if step > LAST and losses[-1 - LAST] - losses[-1] < tolerance * abs(losses[-1]):
            break
    return len(losses), losses[-1]


def stream_ratings(path: str | Path, batch: int = 1024, separator: str = "::") -> Iterator[Triples]:
    """Yield (users, items, ratings) of a ratings file in batches, reading as it goes; keys stay text. Plain or gzipped.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".dat") as file:
    ...     _ = file.write("7::31::4::0\\n7::32::5::0\\n"); file.flush()
    ...     print([(users.tolist(), values.tolist()) for users, _, values in stream_ratings(file.name)])
    [(['7', '7'], [4.0, 5.0])]
    """
    if batch < 1:
        raise ArgumentError(f"batch={batch}: give a number of ratings of at least 1")
    lines = enumerate(open_text(Path(path), "latin-1"), 1)
    while True:
        rows = [_rating(line, number, path, separator) for number, line in islice(lines, batch)]
        if not rows:
            return
        users, items, values = zip(*rows, strict=True)
        yield np.array(users), np.array(items), np.array(values, dtype=np.float32)


def _rating(line: str, number: int, path: Any, separator: str) -> tuple[str, str, float]:
    fields = line.rstrip("\n").split(separator)
    try:
        return fields[0], fields[1], float(fields[2])
    except (IndexError, ValueError):
        found = line.strip()[:60]
        raise DataError(
            f"{path}, line {number}: expected User{separator}Item{separator}Rating, found {found!r}"
        ) from None

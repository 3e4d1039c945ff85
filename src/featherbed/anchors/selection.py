"""Anchors by vocabulary selection: the words that a small classifier keeps."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.anchors.given import documents_for, draw_seed, labels_for
from featherbed.anchors.objects import ObjectAnchors
from featherbed.anchors.random import check_scale
from featherbed.checks import check_integer
from featherbed.optim import GroupL1, Yogi

Ids = NDArray[np.int64]
BATCH = 1024  # documents of a step
RATE = 0.05
START = 1.5  # of log alpha: the middle of the range that Chen et al. draw it from
# log alpha from which a word is noise alone, a dropout rate of 95 % (Molchanov et al. 2017)
DROPPED = 3.0


class BagClassifier:
    """A document classifier on bags of embeddings: logits = b + Σ_w x_w e_w, counts x of norm 1.

    An embedding has one number per class and no further weights, which could grow and evade a
    penalty on embeddings. Embeddings are initialized to 0, b to the log of the class frequencies.
    """

    def __init__(self, counts: Any, labels: Ids, classes: int, seed: int) -> None:  # [n, V], [n]
        self.bags, self.labels = counts, torch.from_numpy(labels)
        lengths = np.sqrt(np.asarray(counts.multiply(counts).sum(axis=1)).reshape(-1))
        self.bags.data /= np.repeat(lengths, np.diff(counts.indptr))
        self.rows = nn.Parameter(torch.zeros(counts.shape[1], classes))  # e, [V, C]
        share = torch.from_numpy(np.log(np.bincount(labels) / len(labels)))
        self.bias = nn.Parameter(share.float())  # b, [C]
        self.order = np.random.default_rng(seed)
        self.noise = torch.Generator().manual_seed(seed)

    def loss(self, documents: Ids, log_alpha: Tensor | None = None) -> Tensor:  # [B], [V]
        """Return the cross-entropy summed over all documents, estimated from a batch.

        With ``log_alpha`` every word of a document is multiplied by its own draw from N(1, alpha).
        """
        bags = self.bags[documents]
        ids = torch.from_numpy(bags.indices).long()
        starts = torch.from_numpy(bags.indptr[:-1]).long()
        words = torch.from_numpy(bags.data).float()
        if log_alpha is not None:
            noise = torch.randn(len(ids), generator=self.noise)
            words = words * (1 + torch.exp(0.5 * log_alpha[ids]) * noise)
        total = F.embedding_bag(ids, self.rows, starts, mode="sum", per_sample_weights=words)
        labels = self.labels[torch.from_numpy(documents)]
        return len(self.labels) * F.cross_entropy(self.bias + total, labels)

    def slopes(self) -> tuple[Tensor, Tensor]:  # -> [V, C], [C]
        """Return the gradients over all documents."""
        loss = self.loss(np.arange(len(self.labels)))
        rows, bias = torch.autograd.grad(loss, (self.rows, self.bias))
        return rows, bias

    def safe_steps(self) -> tuple[Tensor, float]:  # -> [V, 1], scalar
        """Return step sizes, one per row and one for b, that cannot increase the loss.

        The Hessian of the cross-entropy is at most Σ_D z_D z_Dᵀ / 2, z = (x, 1), which is at most
        the diagonal of Σ_D z_D (Σ z_D) / 2, since z is nonnegative.
        """
        sums = 1 + np.asarray(self.bags.sum(axis=1)).reshape(-1)  # [n]
        curvature = self.bags.T @ sums / 2  # [V]
        steps = np.divide(1, curvature, out=np.zeros_like(curvature), where=curvature > 0)
        return torch.from_numpy(steps).float()[:, None], 2 / float(sums.sum())

    def batches(self, steps: int) -> Iterator[Ids]:
        """Yield the documents of each step, without repeats."""
        for _ in range(steps):
            yield self.order.choice(len(self.labels), min(BATCH, len(self.labels)), replace=False)


class LabeledAnchors(ObjectAnchors):
    """Base of group lasso and vocabulary dropout: ranks words by a trained ``BagClassifier``."""

    survivors: int | None = None  # after the choice: how many words were not dropped
    embeddings: Tensor | None = None  # after the choice: [V, classes]

    def __init__(
        self, documents: Any, labels: Any, strength: float, steps: int, transform_std: float | None
    ) -> None:
        super().__init__(transform_std)
        check_scale("strength", strength)
        self.documents, self.labels, self.strength = documents, labels, strength
        self.steps = check_integer("steps", steps)
        self._seed = 0

    @abstractmethod
    def train(self, classifier: BagClassifier) -> tuple[Tensor, int]:  # -> [V], survivors
        """Train the classifier; return a score for each word and the number of surviving words."""

    def choose(self, objects: int, count: int, generator: torch.Generator | None) -> Tensor:
        """Return the words of highest score; ties by number of documents, then lower id."""
        counts = documents_for(self.documents, objects)
        labels, classes = labels_for(self.labels, counts.shape[0])
        common = np.bincount(counts.indices, minlength=objects)
        self._seed = draw_seed(generator)
        classifier = BagClassifier(counts, labels, classes, self._seed)
        with torch.enable_grad():
            scores, self.survivors = self.train(classifier)
        self.embeddings = classifier.rows.detach()
        return torch.from_numpy(np.lexsort((-common, -scores.numpy()))[:count].copy())

    def vectors(self, ids: Tensor, width: int) -> Tensor | None:  # [K] -> [K, d]
        """Return the embeddings, rotated at random into ``width`` dimensions, if they fit."""
        if self.embeddings is None or self.embeddings.shape[1] > width:
            return None
        rows = self.embeddings[ids]
        generator = torch.Generator().manual_seed(self._seed)
        turn = nn.init.orthogonal_(torch.empty(rows.shape[1], width), generator=generator)
        mean = float(rows.norm(dim=1).mean())
        return (rows if mean == 0 else rows / mean) @ turn


class GroupLasso(LabeledAnchors):
    """The words kept by a group lasso in a document classifier are the anchors.

        minimize  Σ_D cross-entropy(y_D, b + Σ_w x_Dw e_w) + lam Σ_w ||e_w||_2

    A word survives if its embedding e_w is not zero; the longest embeddings are the anchors (Chen
    et al. 2019, baseline; Liang et al. 2021, appendix D). x_D are the counts of a document, scaled
    to norm 1. After selection ``survivors`` is the number of surviving words and ``embeddings`` [V,
    classes] are theirs; other words follow only if there are too few. Atoms are initialized to the
    embeddings, rotated into the table's dimensions, if there are at most as many classes.

    Args:
        documents: counts as a scipy.sparse matrix [documents, V], or a list with an array of ids
            per document.
        labels: class of each document, [documents].
        strength: lam relative to the smallest one that keeps no word.
        steps: number of accelerated proximal gradient steps over all documents, with ``fb.GroupL1``
            (Beck and Teboulle 2009).
        transform_std: standard deviation of the other rows' initial weights, as in
            ``fb.HalfNormal``.

    >>> import featherbed as fb
    >>> documents = [[0, 3], [0, 4], [1, 3], [1, 4]] * 10  # words 0 and 1 tell the class
    >>> lasso = GroupLasso(documents, [0, 0, 1, 1] * 10, strength=0.1)
    >>> fb.AnchorTable(5, 8, anchors=2, init=lasso).anchor_ids.sort().values, lasso.survivors
    (tensor([0, 1]), 2)
    """

    def __init__(
        self,
        documents: Any,
        labels: Any,
        *,
        strength: float = 0.02,
        steps: int = 200,
        transform_std: float | None = None,
    ) -> None:
        super().__init__(documents, labels, strength, steps, transform_std)

    def train(self, classifier: BagClassifier) -> tuple[Tensor, int]:
        """Minimize the objective; a word's score is the length of its embedding."""
        rows, bias = classifier.rows, classifier.bias
        lam = self.strength * float(classifier.slopes()[0].norm(dim=1).max())
        penalty = GroupL1(lam)
        row_step, bias_step = classifier.safe_steps()
        at, momentum = (rows.detach().clone(), bias.detach().clone()), 1.0
        for _ in range(self.steps):
            row_slope, bias_slope = classifier.slopes()
            moved = penalty.prox(rows.detach() - row_step * row_slope, row_step)
            to = (moved, bias.detach() - bias_step * bias_slope)
            ahead = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            rows.data, bias.data = (
                new + (momentum - 1) / ahead * (new - old) for new, old in zip(to, at, strict=True)
            )
            at, momentum = to, ahead
        rows.data, bias.data = at
        lengths = rows.detach().norm(dim=1)
        return lengths, int(torch.count_nonzero(lengths))


class VocabularyDropout(LabeledAnchors):
    """The words kept by variational dropout in a document classifier are the anchors.

        minimize  Σ_D E cross-entropy(y_D, b + Σ_w x_Dw e_w N(1, alpha_w)) + strength Σ_w
        KL(alpha_w)
        KL(alpha) = 0.63576 (1 - sigmoid(1.8732 + 1.48695 log alpha)) + 0.5 log(1 + 1/alpha)

    Chen et al. 2019 (variational vocabulary dropout): one dropout rate alpha / (1 + alpha) per
    word, with the KL of Molchanov et al. 2017. Words with log alpha below 3 survive; those with the
    smallest are the anchors. ``survivors``, ``embeddings``, atoms and other arguments are as in
    ``fb.GroupLasso``.

    Args:
        strength: weight of the KL; 1 is the evidence lower bound, which keeps nearly every word of
            few documents.
        steps: number of steps of ``fb.Yogi``, on at most 1,024 documents each.

    >>> import featherbed as fb
    >>> documents = [[0, 3], [0, 4], [1, 3], [1, 4]] * 10  # words 0 and 1 tell the class
    >>> dropout = VocabularyDropout(documents, [0, 0, 1, 1] * 10, strength=1.0)
    >>> fb.AnchorTable(5, 8, anchors=2, init=dropout).anchor_ids.sort().values, dropout.survivors
    (tensor([0, 1]), 2)
    """

    log_alpha: Tensor | None = None  # after the choice: [V]

    def __init__(
        self,
        documents: Any,
        labels: Any,
        *,
        strength: float = 10.0,
        steps: int = 200,
        transform_std: float | None = None,
    ) -> None:
        super().__init__(documents, labels, strength, steps, transform_std)

    def train(self, classifier: BagClassifier) -> tuple[Tensor, int]:
        """Minimize the objective; a word's score is -log alpha."""
        log_alpha = nn.Parameter(torch.full((len(classifier.rows),), START))
        optimizer = Yogi([classifier.rows, classifier.bias, log_alpha], lr=RATE)
        for documents in classifier.batches(self.steps):
            optimizer.zero_grad()
            bound = classifier.loss(documents, log_alpha) + self.strength * kl(log_alpha).sum()
            torch.autograd.backward(bound)
            optimizer.step()
        self.log_alpha = log_alpha.detach()
        return -self.log_alpha, int((self.log_alpha < DROPPED).sum())


def kl(log_alpha: Tensor) -> Tensor:  # [V] -> [V]
    """Return the KL of N(w, alpha w²) from the log-uniform prior (Molchanov et al. 2017)."""
    return 0.63576 * torch.sigmoid(-1.8732 - 1.48695 * log_alpha) + 0.5 * F.softplus(-log_alpha)

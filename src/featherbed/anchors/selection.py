"""Anchors by vocabulary selection: a small classifier is trained, and the words it keeps are the anchors."""

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

from featherbed.anchors.clusters import whole
from featherbed.anchors.given import documents_for, draw_seed, labels_for
from featherbed.anchors.objects import ObjectAnchors
from featherbed.anchors.random import check_scale
from featherbed.optim.penalties import GroupL1
from featherbed.optim.yogi import Yogi

BATCH = 1024  # documents of a step
RATE = 0.05
START = 1.5  # of log alpha: the middle of the range that Chen et al. draw it from
DROPPED = 3.0  # log alpha from which a word is noise alone, a dropout rate of 95 % (Molchanov et al. 2017)


class BagClassifier:
    """Classes of documents by their bags of embeddings: logits = b + Σ_w x_w e_w, x the counts of a document at length 1.

    An embedding has as many numbers as there are classes and is its own read-out: a read-out of its own could grow and let
    embeddings escape a penalty. Embeddings start at 0, b at the classes' shares.
    """

    def __init__(
        self, counts: Any, labels: NDArray[np.int64], classes: int, seed: int
    ) -> None:  # [n, V], [n]
        self.bags, self.labels = counts, torch.from_numpy(labels)
        lengths = np.sqrt(np.asarray(counts.multiply(counts).sum(axis=1)).reshape(-1))
        self.bags.data /= np.repeat(lengths, np.diff(counts.indptr))
        self.rows = nn.Parameter(torch.zeros(counts.shape[1], classes))  # e, [V, C]
        self.bias = nn.Parameter(
            torch.from_numpy(np.log(np.bincount(labels) / len(labels))).float()
        )  # b, [C]
        self.order = np.random.default_rng(seed)
        self.noise = torch.Generator().manual_seed(seed)

    def loss(
        self, documents: NDArray[np.int64], log_alpha: Tensor | None = None
    ) -> Tensor:  # [B], [V] -> scalar
        """Return the cross-entropy summed over all documents, estimated from these.

        With ``log_alpha`` every word of a document is multiplied by its own draw of N(1, alpha).
        """
        bags = self.bags[documents]
        ids, starts = (
            torch.from_numpy(bags.indices).long(),
            torch.from_numpy(bags.indptr[:-1]).long(),
        )
        weights = torch.from_numpy(bags.data).float()
        if log_alpha is not None:
            weights = weights * (
                1 + torch.exp(0.5 * log_alpha[ids]) * torch.randn(len(ids), generator=self.noise)
            )
        logits = self.bias + F.embedding_bag(
            ids, self.rows, starts, mode="sum", per_sample_weights=weights
        )
        return len(self.labels) * F.cross_entropy(logits, self.labels[torch.from_numpy(documents)])

    def slopes(self) -> tuple[Tensor, Tensor]:  # -> [V, C], [C]
        """Return the gradients over all documents."""
        rows, bias = torch.autograd.grad(
            self.loss(np.arange(len(self.labels))), (self.rows, self.bias)
        )
        return rows, bias

    def safe_steps(self) -> tuple[Tensor, float]:  # -> [V, 1], scalar
        """Return steps of gradient descent, one a row and one for b, that cannot raise the loss.

        The Hessian of the cross-entropy is at most Σ_D z_D z_Dᵀ / 2, z = (x, 1), and that at most the diagonal of
        Σ_D z_D (Σ z_D) / 2, since no z is negative.
        """
        sums = 1 + np.asarray(self.bags.sum(axis=1)).reshape(-1)  # [n]
        curvature = self.bags.T @ sums / 2  # [V]
        steps = np.divide(1, curvature, out=np.zeros_like(curvature), where=curvature > 0)
        return torch.from_numpy(steps).float()[:, None], 2 / float(sums.sum())

    def batches(self, steps: int) -> Iterator[NDArray[np.int64]]:
        """Yield the documents of each step, drawn without repeats."""
        for _ in range(steps):
            yield self.order.choice(len(self.labels), min(BATCH, len(self.labels)), replace=False)


class LabelledAnchors(ObjectAnchors):
    """What group lasso and vocabulary dropout share: train a ``BagClassifier``, rank its words, start atoms at its rows."""

    survivors: int | None = None  # after the choice: how many words were not dropped
    embeddings: Tensor | None = None  # after the choice: [V, classes]

    def __init__(
        self, documents: Any, labels: Any, strength: float, steps: int, transform_std: float | None
    ) -> None:
        super().__init__(transform_std)
        check_scale("strength", strength)
        self.documents, self.labels, self.strength, self.steps = (
            documents,
            labels,
            strength,
            whole("steps", steps),
        )
        self._seed = 0

    @abstractmethod
    def train(self, classifier: BagClassifier) -> tuple[Tensor, int]:  # -> [V], survivors
        """Train the classifier; return how much each word deserves to be kept, and how many words survived."""

    def choose(self, objects: int, count: int, generator: torch.Generator | None) -> Tensor:
        """Return the words best kept, best first; of equal ones those in more documents, then the lower id."""
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
        """Return the embeddings, turned at random into ``width`` dimensions, their mean length 1; None if they do not fit."""
        if self.embeddings is None or self.embeddings.shape[1] > width:
            return None
        rows = self.embeddings[ids]
        generator = torch.Generator().manual_seed(self._seed)
        turn = nn.init.orthogonal_(torch.empty(rows.shape[1], width), generator=generator)
        mean = float(rows.norm(dim=1).mean())
        return (rows if mean == 0 else rows / mean) @ turn


class GroupLasso(LabelledAnchors):
    """The words that group lasso keeps in a classifier of labelled documents are the anchors.

        minimise  Σ_D cross-entropy(y_D, b + Σ_w x_Dw e_w) + lam Σ_w ||e_w||_2

    A word survives if its embedding e_w is not zero; the longest are the anchors (Chen et al. 2019, baseline; Liang et al.
    2021, appendix D). x_D are the counts of a document, scaled to length 1. After the choice ``survivors`` says how many
    words were left and ``embeddings`` [V, classes] holds them; dropped words follow only when there are too few others. Atoms
    start at the embeddings, turned into the table's dimensions, if it has as many as there are classes.

    Args:
        documents: counts as a scipy.sparse matrix [documents, V], or a list with an array of ids for each document.
        labels: the class of each document, [documents].
        strength: lam as a share of the smallest that leaves no word.
        steps: of accelerated proximal descent over all documents, with ``fb.GroupL1`` (Beck and Teboulle 2009).
        transform_std: spread of the other rows' first weights, as in ``fb.HalfNormal``.

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
        """Minimise; a word's score is the length of its embedding."""
        rows, bias = classifier.rows, classifier.bias
        lam = self.strength * float(classifier.slopes()[0].norm(dim=1).max())
        penalty = GroupL1(lam)
        row_step, bias_step = classifier.safe_steps()
        at, momentum = (rows.detach().clone(), bias.detach().clone()), 1.0
        for _ in range(self.steps):
            row_slope, bias_slope = classifier.slopes()
            to = (
                penalty.prox(rows.detach() - row_step * row_slope, row_step),
                bias.detach() - bias_step * bias_slope,
            )
            ahead = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            rows.data, bias.data = (
                new + (momentum - 1) / ahead * (new - old) for new, old in zip(to, at, strict=True)
            )
            at, momentum = to, ahead
        rows.data, bias.data = at
        lengths = rows.detach().norm(dim=1)
        return lengths, int(torch.count_nonzero(lengths))


class VocabularyDropout(LabelledAnchors):
    """The words that variational dropout does not drop in a classifier of labelled documents are the anchors.

        minimise  Σ_D E cross-entropy(y_D, b + Σ_w x_Dw e_w N(1, alpha_w)) + strength Σ_w KL(alpha_w)
        KL(alpha) = 0.63576 (1 - sigmoid(1.8732 + 1.48695 log alpha)) + 0.5 log(1 + 1/alpha)

    Chen et al. 2019 (variational vocabulary dropout): one dropout rate alpha / (1 + alpha) for each word, with the KL of
    Molchanov et al. 2017. Words of log alpha below 3 survive; those with the smallest are the anchors. ``survivors``,
    ``embeddings``, atoms and arguments are as in ``fb.GroupLasso``, but for

    Args:
        strength: weight of the KL; 1 is the evidence bound, which on few documents keeps nearly every word.
        steps: of ``fb.Yogi``, on at most 1,024 documents each.

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
        """Minimise; a word's score is -log alpha."""
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
    """Return the divergence of N(w, alpha w²) from the log-uniform prior, the approximation of Molchanov et al. 2017."""
    return 0.63576 * torch.sigmoid(-1.8732 - 1.48695 * log_alpha) + 0.5 * F.softplus(-log_alpha)

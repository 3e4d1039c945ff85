"""Guidance: a full table teaches coded rows in training (distillation, Chen et al. 2018)."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featherbed.checks import is_number
from featherbed.errors import ArgumentError
from featherbed.tables.parts.norms import Normalize
from featherbed.tables.rows import empty_parameter


def _check_weight(name: str, value: float) -> None:
    if not is_number(value, 0):
        raise ArgumentError(f"{name}={value!r}: the weight of a loss is a number of at least 0")


@dataclass(frozen=True)
class Online:
    """A trainable full table u beside the codes ("ODG"): the model uses row v or, else, u.

    The coded row v is used with probability ``keep``, and loss += weight * mean (v - sg(u))².
    Published: weight 0.1 and keep 0.5 for small models, 1000 and 0.3 for larger ones.

    >>> Online(weight=0.1, keep=0.5)
    Online(weight=0.1, keep=0.5)
    """

    weight: float = 0.1
    keep: float = 0.5

    def __post_init__(self) -> None:
        _check_weight("weight", self.weight)
        if not is_number(self.keep) or not 0 < self.keep <= 1:
            raise ArgumentError(
                f"keep={self.keep!r}: the probability that the coded row is used is above 0, at "
                "most 1"
            )

    def module(self, rows: int, dim: int, parts: int, choices: int, **where: Any) -> Guidance:
        """Return the guidance of a table with ``rows`` rows of ``parts`` codes."""
        return OnlineGuidance(self, rows, dim, **where)


@dataclass(frozen=True)
class Pretrained:
    """A fixed matrix u [V, d] that guides the coded rows v ("PDG"): loss += weight * mean (v - u)².

    With ``autoencode`` an encoder also codes u, π_u = encoder(u), and the same composer
    reconstructs u^: loss += reconstruct * mean (u - u^)² + agree * mean (π_u - π)². ``normalize``:
    batch normalization of π_u over k, which the authors' code has.

    >>> Pretrained(torch.zeros(5, 2), autoencode=True)
    Pretrained(weight=1000.0, autoencode=True, reconstruct=100.0, agree=10.0, normalize=False)
    """

    matrix: Tensor = field(repr=False, compare=False)
    weight: float = 1000.0
    autoencode: bool = False
    reconstruct: float = 100.0
    agree: float = 10.0
    normalize: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrix", _matrix(self.matrix))
        for name in ("weight", "reconstruct", "agree"):
            _check_weight(name, getattr(self, name))

    def module(self, rows: int, dim: int, parts: int, choices: int, **where: Any) -> Guidance:
        """Return the guidance of a table with ``rows`` rows of ``parts`` codes."""
        if tuple(self.matrix.shape) != (rows, dim):
            raise ArgumentError(
                f"the guide has shape {tuple(self.matrix.shape)}: this table needs one of [{rows}, "
                f"{dim}]"
            )
        return PretrainedGuidance(self, dim, parts, choices, **where)


Guide = Online | Pretrained


def _matrix(given: Any) -> Tensor:
    """Return the matrix of a guide, or raise an error."""
    try:
        matrix = torch.as_tensor(given).detach()
    except (TypeError, ValueError, RuntimeError):
        what = f"got {type(given).__name__} (of a module, give its weight)"
        raise ArgumentError(f"a guide is a matrix [V, d] of floats, {what}") from None
    if not matrix.is_floating_point() or not bool(torch.isfinite(matrix).all()):
        what = "NaN or infinity" if matrix.is_floating_point() else str(matrix.dtype)
        raise ArgumentError(
            f"a guide is a matrix [V, d] of floats, this one holds {what}: mend it first"
        )
    return matrix


class Guidance(nn.Module):
    """A guide in training: ``loss`` pulls rows to the guide, ``mix`` selects the rows to use."""

    @abstractmethod
    def loss(self, ids: Tensor, rows: Tensor, logits: Tensor, compose: Any) -> Tensor:
        """Return the loss term."""

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize the guide's parameters."""

    def mix(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return the rows for the model."""
        return rows


class OnlineGuidance(Guidance):
    """The full table of an ``Online`` guide."""

    def __init__(self, guide: Online, rows: int, dim: int, **where: Any) -> None:
        super().__init__()
        self.guide = guide
        self.rows = empty_parameter((rows, dim), **where)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw rows from N(0, 1)."""
        self.rows.normal_(0.0, 1.0, generator=generator)

    def loss(self, ids: Tensor, rows: Tensor, logits: Tensor, compose: Any) -> Tensor:
        """Pull the coded rows to the full ones."""
        return self.guide.weight * F.mse_loss(rows, self.rows[ids].detach())

    def mix(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Choose the coded or the full row at random, for each id."""
        coded = torch.rand(ids.shape, device=ids.device) < self.guide.keep
        return torch.where(coded[..., None], rows, self.rows[ids])


class PretrainedGuidance(Guidance):
    """The matrix of a ``Pretrained`` guide, and the encoder that codes it."""

    matrix: Tensor

    def __init__(self, guide: Pretrained, dim: int, parts: int, choices: int, **where: Any) -> None:
        super().__init__()
        self.guide = guide
        real = {k: v for k, v in where.items() if v is not None and str(v) != "meta"}
        dtype = {"dtype": torch.get_default_dtype()}  # the matrix is given, so it is never on meta
        self.register_buffer("matrix", guide.matrix.to(**(dtype | real)), False)
        self.encoder: nn.Parameter | None = None
        if guide.autoencode:
            self.encoder = empty_parameter((dim, parts * choices), **where)
        self.norm: Normalize | None = None
        if guide.autoencode and guide.normalize:
            self.norm = Normalize(choices, learned=True, **where)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize the encoder; copy the guide's matrix."""
        self.matrix.copy_(self.guide.matrix)
        if self.encoder is not None:
            std = 1 / math.sqrt(self.encoder.shape[0])
            self.encoder.normal_(0.0, std, generator=generator)
        if self.norm is not None:
            self.norm.reset_parameters()

    def loss(self, ids: Tensor, rows: Tensor, logits: Tensor, compose: Any) -> Tensor:
        """Pull the coded rows to the matrix and, with ``autoencode``, its codes to theirs."""
        target = self.matrix[ids]
        total = self.guide.weight * F.mse_loss(rows, target)
        if self.encoder is None:
            return total
        own = (target @ self.encoder).reshape(logits.shape).to(logits.dtype)
        own = own if self.norm is None else self.norm(own)
        again = compose(own)
        return (
            total
            + self.guide.reconstruct * F.mse_loss(again, target)
            + self.guide.agree * F.mse_loss(own, logits)
        )

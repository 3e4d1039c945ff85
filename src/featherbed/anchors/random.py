"""Random anchors that represent no objects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from featherbed.checks import check_number


class AnchorInit(Protocol):
    """Fills atoms [K, d] and transform [V, K] in place before training."""

    def fill(
        self, atoms: Tensor, transform: Tensor, nonnegative: bool, generator: torch.Generator | None
    ) -> Tensor | None:
        """Fill both, nonnegatively if required; return the anchor objects [K], or None."""


def check_scale(name: str, value: float | None) -> None:
    """Refuse a standard deviation that is not a positive number."""
    if value is not None:
        check_number(name, value, above=0)


@dataclass(frozen=True)
class HalfNormal:
    """A ~ N(0, 2/K) and T ~ |N(0, 2/V)| as in the authors' code (Liang et al. 2021).

    ``transform_std`` replaces the standard deviation of T: with very many ids 2/V makes initial
    rows so small that a penalty removes them before they are trained.

    >>> HalfNormal(transform_std=0.1)
    HalfNormal(transform_std=0.1)
    """

    transform_std: float | None = None

    def __post_init__(self) -> None:
        check_scale("transform_std", self.transform_std)

    def fill(
        self, atoms: Tensor, transform: Tensor, nonnegative: bool, generator: torch.Generator | None
    ) -> None:
        """Fill atoms and transform."""
        atoms.normal_(0.0, math.sqrt(2.0 / len(atoms)), generator=generator)
        std = math.sqrt(2.0 / len(transform)) if self.transform_std is None else self.transform_std
        transform.normal_(0.0, std, generator=generator)
        if nonnegative:
            transform.abs_()


@dataclass(frozen=True)
class Xavier:
    """A and T uniform in ±sqrt(6 / (rows + columns)) (Glorot and Bengio 2010); |T| if nonnegative.

    >>> Xavier(gain=2.0)
    Xavier(gain=2.0)
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        check_scale("gain", self.gain)

    def fill(
        self, atoms: Tensor, transform: Tensor, nonnegative: bool, generator: torch.Generator | None
    ) -> None:
        """Fill atoms and transform."""
        for tensor in (atoms, transform):
            bound = self.gain * math.sqrt(6.0 / sum(tensor.shape))
            tensor.uniform_(-bound, bound, generator=generator)
        if nonnegative:
            transform.abs_()


@dataclass(frozen=True)
class RandomBasis:
    """A = scale · Q with uniformly random Q Qᵀ = 1, T as in ``fb.HalfNormal``.

    Liang et al. 2021, section 2.1. With more anchors than dimensions, successive groups of d
    anchors are orthonormal.

    >>> import featherbed as fb
    >>> table = fb.AnchorTable(1000, 16, anchors=8, init=RandomBasis(scale=0.5))
    >>> bool((table.atoms @ table.atoms.T - 0.25 * torch.eye(8)).abs().max() < 1e-6)
    True
    """

    scale: float = 1.0
    transform_std: float | None = None

    def __post_init__(self) -> None:
        check_scale("scale", self.scale)
        check_scale("transform_std", self.transform_std)

    def fill(
        self, atoms: Tensor, transform: Tensor, nonnegative: bool, generator: torch.Generator | None
    ) -> None:
        """Fill atoms and transform."""
        HalfNormal(self.transform_std).fill(atoms, transform, nonnegative, generator)
        dim = atoms.shape[1]
        for start in range(0, len(atoms), dim):
            block = atoms[start : start + dim]
            # float32: halves have no QR decomposition
            whole = torch.empty(block.shape, device=atoms.device)
            block.copy_(nn.init.orthogonal_(whole, self.scale, generator))

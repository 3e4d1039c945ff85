"""A random orthonormal basis of anchors that represent no objects."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from featherbed.anchors.random import HalfNormal, check_scale


@dataclass(frozen=True)
class RandomBasis:
    """A = scale · Q with uniformly random Q Qᵀ = 1, T as in ``fb.HalfNormal`` (Liang et al. 2021,
    2.1).

    With more anchors than dimensions, successive groups of d anchors are orthonormal.

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
            whole = torch.empty(
                block.shape, device=atoms.device
            )  # float32: halves have no QR decomposition
            block.copy_(nn.init.orthogonal_(whole, self.scale, generator))

"""Anchors that are objects: the most telling ids of a table."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from featherbed.anchors.random import HalfNormal
from featherbed.errors import ArgumentError


class ObjectAnchors(ABC):
    """Makes K of the V objects of a table its anchors: ``choose`` says which, ``vectors`` where their atoms start.

    The row of an anchor object starts as that anchor alone (its row of the transform is the identity's); the other rows start
    as ``fb.HalfNormal`` starts them, with the spread ``transform_std``, and so do atoms of which nothing is known.
    """

    def __init__(self, transform_std: float | None = None) -> None:
        self.transform_std = HalfNormal(transform_std).transform_std

    @abstractmethod
    def choose(
        self, objects: int, count: int, generator: torch.Generator | None
    ) -> Tensor:  # -> int64 [K]
        """Return the ``count`` distinct objects, of ``objects``, that become anchors, the most telling first."""

    def vectors(self, ids: Tensor, width: int) -> Tensor | None:  # noqa: ARG002 - some know - [K] -> [K, d]
        """Return where the atoms of these objects start, if vectors of that width are known; zero rows stand for unknown."""
        return None

    def fill(
        self, atoms: Tensor, transform: Tensor, nonnegative: bool, generator: torch.Generator | None
    ) -> Tensor:
        """Fill atoms and transform and return the ids of the anchors [K]; the table gives their rows the identity."""
        objects, count = len(transform), len(atoms)
        if count > objects:
            raise ArgumentError(
                f"anchors={count}: there are only {objects} objects that could be anchors; ask for fewer"
            )
        HalfNormal(self.transform_std).fill(atoms, transform, nonnegative, generator)
        ids = self.choose(objects, count, generator)
        known = self.vectors(ids, atoms.shape[1])
        if known is not None:
            there = known.any(dim=1).to(
                atoms.device
            )  # an atom of zeros would give its weights no gradient
            atoms[there] = known.to(atoms)[there]
        return ids

    def __repr__(self) -> str:
        """Show the call: data by name, settings by value where they are not the usual ones."""
        shown = []
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY:
                value = getattr(self, name)
                shown += [] if value == parameter.default else [f"{name}={value!r}"]
            elif name != "self":
                shown.append(name)
        return f"{type(self).__name__}({', '.join(shown)})"


def scores_for(name: str, scores: Any, objects: int) -> Tensor:  # -> float64 [V]
    """Return one finite number of at least 0 for each object, or say what was given instead."""
    try:
        found = torch.as_tensor(scores).detach().cpu().double()
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(
            f"{name} are {type(scores).__name__}: give one number for each of the {objects} objects"
        ) from None
    if found.shape != (objects,):
        raise ArgumentError(
            f"{name} have shape {tuple(found.shape)}; give one for each of the {objects} objects"
        )
    if not bool(torch.isfinite(found).all()) or bool((found < 0).any()):
        raise ArgumentError(
            f"{name} hold NaN, infinity or negative numbers: give how often each object occurs"
        )
    return found


def highest(scores: Tensor, count: int) -> Tensor:  # [V] -> int64 [K]
    """Return the ids with the highest scores, highest first; of equal ones the lower id."""
    return torch.argsort(scores, descending=True, stable=True)[:count]


class Frequency(ObjectAnchors):
    """The most frequent objects are the anchors (Liang et al. 2021, section 2.1).

    Args:
        counts: how often each object occurs, [V].
        transform_std: spread of the other rows' first weights, as in ``fb.HalfNormal``.

    >>> import featherbed as fb
    >>> table = fb.AnchorTable(5, 4, anchors=2, init=Frequency([3, 9, 1, 7, 2]))
    >>> table.anchor_ids
    tensor([1, 3])
    >>> table.transform[1].tolist(), table.transform[3].tolist()
    ([1.0, 0.0], [0.0, 1.0])
    """

    def __init__(self, counts: Any, *, transform_std: float | None = None) -> None:
        super().__init__(transform_std)
        self.counts = counts

    def choose(self, objects: int, count: int, generator: torch.Generator | None) -> Tensor:  # noqa: ARG002 - nothing is drawn
        """Return the most frequent, most frequent first."""
        return highest(scores_for("counts", self.counts, objects), count)

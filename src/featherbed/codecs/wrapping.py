"""Codecs that wrap another codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from featherbed.codecs.codec import Codec, Fit, Settings


class WrappingCodec(Codec):
    """A codec that has the settings of an inner codec, and settings ``own`` besides them."""

    own: tuple[str, ...] = ()

    def __init__(self, inner: Codec) -> None:
        self.inner = inner

    def inner_settings(self, settings: Settings) -> Settings:
        """Return the settings of the inner codec."""
        return {name: value for name, value in settings.items() if name not in self.own}

    def work(self, dim: int, **settings: Any) -> float:
        """Return the work of a fit for each row."""
        return self.inner.work(dim, **self.inner_settings(settings))

    def defaults(self) -> Settings:
        """Return the defaults of the inner codec."""
        return self.inner.defaults()

    def complete(self, settings: Settings, dim: int, rank: int) -> Settings:
        """Return settings completed by the inner codec."""
        return self.inner.complete(settings, dim, rank)


@dataclass
class WrappedFit(Fit):
    """A fit that is refined by refining an inner fit."""

    inner: Fit

    def __post_init__(self) -> None:
        self.refinable = self.inner.refinable

    def refine(self, rounds: int) -> None:
        """Refine the inner fit."""
        self.inner.refine(rounds)

"""Stochastic shared embeddings: ids replaced at random while training, in front of any table."""

from featherbed.sharing.sse import SSE, bare, share

__all__ = ["SSE", "bare", "share"]

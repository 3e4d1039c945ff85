"""Optimisers that know about penalties."""

from featherbed.optim.penalties import L1, GroupL1, NonNegativeL1, Penalty
from featherbed.optim.proximal import Proximal
from featherbed.optim.several import Several
from featherbed.optim.yogi import Yogi

__all__ = ["L1", "GroupL1", "NonNegativeL1", "Penalty", "Proximal", "Several", "Yogi"]

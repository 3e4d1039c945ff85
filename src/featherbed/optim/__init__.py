"""Optimizers with penalties, for dense and row-sparse gradients."""

from featherbed.optim.budget import Budget
from featherbed.optim.clip import clip_grad_norm_
from featherbed.optim.penalties import L1, GroupL1, NonNegativeL1, Penalty
from featherbed.optim.processes import group_of, total
from featherbed.optim.row_optimizer import SGD, Adagrad, AdamW, RowOptimizer, Yogi, penalties_of
from featherbed.optim.schedules import Schedule
from featherbed.optim.wrappers import Averaged, Proximal, Several

__all__ = [
    "L1",
    "SGD",
    "Adagrad",
    "AdamW",
    "Averaged",
    "Budget",
    "GroupL1",
    "NonNegativeL1",
    "Penalty",
    "Proximal",
    "RowOptimizer",
    "Schedule",
    "Several",
    "Yogi",
    "clip_grad_norm_",
    "group_of",
    "penalties_of",
    "total",
]

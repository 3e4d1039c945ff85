"""Optimizers with penalties, for dense and row-sparse gradients."""

from featherbed.optim.adagrad import Adagrad
from featherbed.optim.adamw import AdamW
from featherbed.optim.averaged import Averaged, penalties_of
from featherbed.optim.budget import Budget
from featherbed.optim.clip import clip_grad_norm_
from featherbed.optim.penalties import L1, GroupL1, NonNegativeL1, Penalty
from featherbed.optim.proximal import Proximal
from featherbed.optim.row_optimizer import RowOptimizer
from featherbed.optim.schedules import Schedule
from featherbed.optim.several import Several
from featherbed.optim.sgd import SGD
from featherbed.optim.yogi import Yogi

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
    "penalties_of",
]

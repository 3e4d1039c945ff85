"""The mathematics of the papers, executable: priors on who uses which anchor, divergences, and the objective they lead to."""

from featherbed.theory.buffet import expected_dishes, left_ordered, log_probability, sample_buffet
from featherbed.theory.divergences import Bregman, Gaussian, Multinomial
from featherbed.theory.limit import limit_cost, prior_cost
from featherbed.theory.objective import ObjectiveTable, Run, nbant_objective, objective_table

__all__ = [
    "Bregman",
    "Gaussian",
    "Multinomial",
    "ObjectiveTable",
    "Run",
    "expected_dishes",
    "left_ordered",
    "limit_cost",
    "log_probability",
    "nbant_objective",
    "objective_table",
    "prior_cost",
    "sample_buffet",
]

"""Executable mathematics of the papers: priors, divergences, objectives, expected sharing."""

from featherbed.theory.buffet import (
    expected_dishes,
    left_ordered,
    limit_cost,
    log_probability,
    prior_cost,
    sample_buffet,
)
from featherbed.theory.divergences import Bregman, Gaussian, Multinomial
from featherbed.theory.objective import ObjectiveTable, Run, nbant_objective, objective_table
from featherbed.theory.sharing import (
    Factors,
    Transition,
    bias_term,
    excess_risk_bound,
    label_smoothing,
    rademacher_draws,
    target_losses,
)

__all__ = [
    "Bregman",
    "Factors",
    "Gaussian",
    "Multinomial",
    "ObjectiveTable",
    "Run",
    "Transition",
    "bias_term",
    "excess_risk_bound",
    "expected_dishes",
    "label_smoothing",
    "left_ordered",
    "limit_cost",
    "log_probability",
    "nbant_objective",
    "objective_table",
    "prior_cost",
    "rademacher_draws",
    "sample_buffet",
    "target_losses",
]

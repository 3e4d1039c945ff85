"""Losses over many ids by sampling, and loss terms for anchors."""

from featherbed.losses.anchors import negative_pairs, orthogonality
from featherbed.losses.full import FullSoftmax
from featherbed.losses.nce import NCE
from featherbed.losses.sampled import SampledSoftmax
from featherbed.losses.samplers import LogUniform, Sampler, Uniform
from featherbed.losses.tied import tied_cross_entropy

__all__ = [
    "NCE",
    "FullSoftmax",
    "LogUniform",
    "SampledSoftmax",
    "Sampler",
    "Uniform",
    "negative_pairs",
    "orthogonality",
    "tied_cross_entropy",
]

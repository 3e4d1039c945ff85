"""Losses over many ids by sampling, and loss terms for anchors."""

from featherbed.losses.anchors import negative_pairs, orthogonality
from featherbed.losses.full import FullSoftmax, tied_cross_entropy
from featherbed.losses.sampled import NCE, SampledSoftmax
from featherbed.losses.samplers import LogUniform, Sampler, Uniform

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

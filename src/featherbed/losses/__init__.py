"""Losses of models with many outputs: a few sampled ids in the place of all, or few rows updated."""

from featherbed.losses.full import FullSoftmax
from featherbed.losses.nce import NCE
from featherbed.losses.sampled import SampledSoftmax
from featherbed.losses.samplers import LogUniform, Sampler, Uniform

__all__ = ["NCE", "FullSoftmax", "LogUniform", "SampledSoftmax", "Sampler", "Uniform"]

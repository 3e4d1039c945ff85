"""Losses of models with many outputs: a few sampled ids in the place of all."""

from featherbed.losses.nce import NCE
from featherbed.losses.sampled import SampledSoftmax
from featherbed.losses.samplers import LogUniform, Sampler, Uniform

__all__ = ["NCE", "LogUniform", "SampledSoftmax", "Sampler", "Uniform"]

"""Context managers that change a model within a block and restore it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from featherbed.interop.embedding import PackedEmbedding, TiedModule
from featherbed.interop.trainable import TrainableEmbedding


@contextmanager
def restore_on_error(
    parameters: list[nn.Parameter], tables: list[PackedEmbedding]
) -> Iterator[Callable[[], None]]:
    """Restore parameters and packed tables after an error or Ctrl-C; yield a function that does."""
    values = [parameter.detach().clone() for parameter in parameters]
    buffers = [table.packed for table in tables]

    @torch.no_grad()
    def restore() -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
        for table, data in zip(tables, buffers, strict=True):
            table.replace(data)

    try:
        yield restore
    except BaseException:
        restore()
        raise


@contextmanager
def train_only(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Let only the given parameters of a model require gradients."""
    trained = {id(parameter) for parameter in parameters}
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in flags:
        parameter.requires_grad_(id(parameter) in trained)
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
            parameter.grad = None


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode (no dropout)."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def replaced_modules(
    model: nn.Module, old: list[PackedEmbedding], new: list[TrainableEmbedding]
) -> Iterator[None]:
    """Replace modules of a model; modules tied to them use the replacements."""
    _replace(model, old, new)
    try:
        yield
    finally:
        _replace(model, new, old)


def _replace(model: nn.Module, old: list[Any], new: list[Any]) -> None:
    new_of = {id(before): after for before, after in zip(old, new, strict=True)}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in new_of:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new_of[id(module)])
        elif isinstance(module, TiedModule) and id(module.embedding) in new_of:
            module.tie(new_of[id(module.embedding)])

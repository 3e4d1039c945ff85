"""States a model is in within a block, and not after it: evaluated, partly learning, with other modules, restored on errors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from featherbed.models.embedding import PackedEmbedding, Tied
from featherbed.models.learn import LearntEmbedding


class restoring(AbstractContextManager["restoring"]):  # noqa: N801 - used as a verb
    """An error within it, or Ctrl-C, leaves parameters and the bytes of packed tables as they were before."""

    def __init__(self, parameters: list[nn.Parameter], packed: list[PackedEmbedding]) -> None:
        self.before = [(one, one.detach().clone()) for one in parameters]
        self.bytes = [(one, one.packed) for one in packed]

    def __enter__(self) -> restoring:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Make them what they were."""
        for one, value in self.before:
            one.copy_(value)
        for module, data in self.bytes:
            module.replace(data)


class learning(AbstractContextManager[None]):  # noqa: N801
    """Within it only some parameters learn."""

    def __init__(self, model: nn.Module, free: list[nn.Parameter]) -> None:
        self.model, self.free = model, {id(one) for one in free}

    def __enter__(self) -> None:
        self.asked = [(one, one.requires_grad) for one in self.model.parameters()]
        for one, _ in self.asked:
            one.requires_grad_(id(one) in self.free)

    def __exit__(self, *_: object) -> None:
        for one, asked in self.asked:
            one.requires_grad_(asked)
            one.grad = None


class evaluating(AbstractContextManager[None]):  # noqa: N801
    """Within it models are as in evaluation: no dropout."""

    def __init__(self, *models: nn.Module) -> None:
        self.modes = [(module, module.training) for model in models for module in model.modules()]

    def __enter__(self) -> None:
        for module, _ in self.modes:
            module.training = False

    def __exit__(self, *_: object) -> None:
        for module, mode in self.modes:
            module.training = mode


class swapped(AbstractContextManager[None]):  # noqa: N801
    """Within it a model has other modules in the place of some, and what is tied to those uses them."""

    def __init__(
        self, model: nn.Module, old: list[PackedEmbedding], new: list[LearntEmbedding]
    ) -> None:
        self.model, self.pairs = model, list(zip(old, new, strict=True))

    def __enter__(self) -> None:
        self._put([(old, new) for old, new in self.pairs])

    def __exit__(self, *_: object) -> None:
        self._put([(new, old) for old, new in self.pairs])

    def _put(self, pairs: list[tuple[Any, Any]]) -> None:
        new_of = {id(old): new for old, new in pairs}
        for name, module in list(self.model.named_modules(remove_duplicate=False)):
            if id(module) in new_of:
                parent, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(parent), leaf, new_of[id(module)])
            elif isinstance(module, Tied) and id(module.embedding) in new_of:
                module._tied = (new_of[id(module.embedding)],)

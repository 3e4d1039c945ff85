"""Loss terms and parameters of all tables of a model."""

from __future__ import annotations

from torch import Tensor, nn

from featherbed.tables.table import Table


def auxiliary_loss(model: nn.Module) -> Tensor | float:
    """Return the sum of the loss terms of all tables of a model, 0.0 if there are none.

    >>> auxiliary_loss(nn.Linear(2, 2))
    0.0
    """
    added = [module.auxiliary() for module in model.modules() if isinstance(module, Table)]
    return sum((part for part in added if part is not None), 0.0)


def split_codes(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of a model that only choose codes, and all others.

    >>> [len(part) for part in split_codes(nn.Linear(2, 2))]
    [0, 2]
    """
    codes = [
        p
        for module in model.modules()
        if isinstance(module, Table)
        for p in module.code_parameters()
    ]
    known = {id(p) for p in codes}
    return codes, [p for p in model.parameters() if id(p) not in known]

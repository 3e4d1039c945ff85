"""Budget: training to a given number of nonzero weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from featherbed.checks import check_choice, check_integer, is_number
from featherbed.errors import ArgumentError
from featherbed.optim.lazy import settle_parameter
from featherbed.optim.penalties import Penalties, Penalty
from featherbed.optim.processes import group_of, share_of_largest, total

WAYS = ("projection", "penalty")
SLACK = 1.02  # of the budget is the support while it is refitted


class Budget:
    """Steers penalties to a total of ``nonzeros`` nonzero entries; call ``step`` after the
    optimizer's.

    Three parts of ``steps`` steps: up to ``warmup`` the penalties work as they are given; from
    there to ``until`` the entries become fewer; then the support is frozen and the weights are
    trained without shrinkage (a refit). Some of them come to rest at zero, so the support N has 2 %
    more; with the last step at most ``nonzeros`` stay.

    ``how="projection"``, the default: now and then only the largest entries |x| stay, over all
    parameters,

        n(t) = N + (n(warmup) - N) (1 - t)³,   t from 0 to 1,   N = 1.02 nonzeros

    (the cubic fall of Zhu and Gupta 2017). ``how="penalty"``: lam rises or falls so that the number
    follows n(t), and the largest entries stay at ``until``. ``count`` is the number of non-zeros
    now. Measured on MovieLens-1M: see docs/size.md.

    Args:
        penalties: {parameter: penalty}, as the optimizer has them.
        steps: how many steps training takes.
        every: how many steps pass between two projections, or changes of lam.
        group: process group whose processes hold other rows of the tables; that of the parameters
            by default. Needed where a process may hold no table, as with table-wise sharding.

    >>> import featherbed as fb
    >>> table = fb.AnchorTable(100, 8, anchors=4)
    >>> penalties = {table.transform: fb.NonNegativeL1(1e-6)}
    >>> optimizer = fb.Yogi(table.parameters(), penalties=penalties)
    >>> budget = Budget(penalties, nonzeros=90, steps=50, every=5)
    >>> for _ in range(50):
    ...     optimizer.zero_grad()
    ...     (table(torch.arange(100)) - 1).square().mean().backward()
    ...     optimizer.step(); budget.step()
    >>> budget.count <= 90
    True
    """

    def __init__(
        self,
        penalties: Penalties,
        nonzeros: int,
        *,
        steps: int,
        how: str = "projection",
        warmup: float = 0.2,
        until: float = 0.8,
        every: int = 20,
        group: Any = None,
    ) -> None:
        given = penalties.values() if isinstance(penalties, Mapping) else ()
        if not (given or group is not None) or not all(
            isinstance(penalty, Penalty) for penalty in given
        ):
            raise ArgumentError(
                "penalties are {parameter: penalty}, at least one, the same that the optimizer has"
            )
        if len({id(penalty) for penalty in given}) < len(given):
            raise ArgumentError(
                "one penalty is on several parameters, each with its own zeros: give every "
                "parameter a penalty"
            )
        for name, value in (("nonzeros", nonzeros), ("steps", steps), ("every", every)):
            check_integer(name, value)
        self.group = group_of(penalties) if group is None else group
        entries = int(total(torch.tensor(sum(p.numel() for p in penalties)), self.group))
        if nonzeros > entries:
            raise ArgumentError(f"nonzeros={nonzeros}: the parameters have only {entries} entries")
        check_choice("how", how, WAYS)
        if not (is_number(warmup, 0) and is_number(until, 0, 1) and warmup < until):
            raise ArgumentError(
                f"warmup={warmup!r}, until={until!r}: give shares of the steps, 0 <= warmup < "
                "until <= 1"
            )
        self.penalties, self.nonzeros, self.steps = dict(penalties), nonzeros, steps
        self.how, self.every = how, every
        self.begin, self.end = int(warmup * steps), max(1, int(until * steps))
        self.support = int(SLACK * nonzeros)
        self.done, self.first = 0, 0  # steps so far; entries when they began to become fewer

    @property
    def count(self) -> int:
        """Number of nonzero entries."""
        for parameter in self.penalties:
            settle_parameter(parameter)
        own = sum(int(torch.count_nonzero(parameter.detach())) for parameter in self.penalties)
        return int(total(torch.tensor(own), self.group))

    @property
    def reached(self) -> bool:
        """Whether the budget is met within 2 % from now on."""
        return self.done >= self.end

    def step(self) -> None:
        """Advance by one step of the optimizer."""
        self.done += 1
        if self.done == self.end:
            self._project(self.support)
            for parameter, penalty in self.penalties.items():
                penalty.freeze(parameter)
        elif self.begin <= self.done < self.end and (self.done - self.begin) % self.every == 0:
            count = self.count
            if self.done == self.begin or not self.first:
                self.first = count
            left = 1 - (self.done - self.begin) / (self.end - self.begin)
            allowed = self.support + int(max(0, self.first - self.support) * left**3)
            if self.how == "projection":
                self._project(allowed)
            else:
                self._steer(count / allowed)
        if self.done == self.steps:
            self._project(self.nonzeros)

    def finish(self) -> None:
        """Keep at most ``nonzeros`` entries of the current parameters, of whichever epoch."""
        self._project(self.nonzeros)

    def _steer(self, excess: float) -> None:
        for penalty in self.penalties.values():
            penalty.lam = max(penalty.lam, 1e-12) * min(2.0, max(0.5, excess))

    @torch.no_grad()
    def _project(self, allowed: int) -> None:
        """Keep the largest entries only."""
        if self.count <= allowed:
            return
        none = [torch.zeros(0)] if not self.penalties else []
        sizes = torch.cat([*none, *(p.detach().abs().flatten() for p in self.penalties)])
        kept = torch.zeros(len(sizes), dtype=torch.bool, device=sizes.device)
        kept[sizes.topk(share_of_largest(sizes, allowed, self.group)).indices] = True
        parts = torch.split(kept, [parameter.numel() for parameter in self.penalties])
        for (parameter, penalty), part in zip(self.penalties.items(), parts, strict=True):
            penalty.keep(parameter, part.view_as(parameter) & (parameter != 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the weights of the penalties and the entries kept at zero."""
        held = [(penalty.lam, penalty.kept) for penalty in self.penalties.values()]
        return {"done": self.done, "first": self.first, "penalties": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; load the model's state first."""
        self.done, self.first = int(state["done"]), int(state["first"])
        pairs = zip(self.penalties.items(), state["penalties"], strict=True)
        for (parameter, penalty), (lam, kept) in pairs:
            penalty.lam = lam
            penalty.keep(parameter, kept)

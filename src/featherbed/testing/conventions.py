"""PyTorch's conventions: torch.func, torch.export, parametrizations, pruning, the meta device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize, prune

from featherbed.errors import FeatherbedError
from featherbed.optim import AdamW, clip_grad_norm_
from featherbed.tables.model import auxiliary_loss
from featherbed.testing.oracle import (
    SEED,
    Make,
    assert_same,
    gradients_of,
    random_like,
    seeded,
    some_ids,
)


def check_functional(make: Make) -> None:
    """functional_call and torch.func.grad with other tensors give their rows and gradients."""
    table, other = (
        seeded(make),
        make(generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    )
    ids = some_ids(table, 7)
    state = {**table.state_dict(), **dict(other.named_parameters())}
    state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    twin = copy.deepcopy(table)
    twin.load_state_dict(table.state_dict() | state)
    found = torch.func.functional_call(table, state, (ids,))
    torch.testing.assert_close(found, twin(ids), msg=lambda m: f"functional_call: {m}")
    parameters = {name: value.detach() for name, value in table.named_parameters()}
    weights = random_like(table(ids))

    def loss(given: dict[str, Tensor]) -> Tensor:
        rows: Tensor = torch.func.functional_call(table, given, (ids,))
        return (rows * weights).sum()

    gradients = torch.func.grad(loss)(parameters)
    expected = gradients_of(table, table(ids))
    for (name, found), slow in zip(gradients.items(), expected, strict=True):
        label = f"torch.func.grad of {name}"
        torch.testing.assert_close(found, slow, msg=lambda m: f"{label}: {m}")  # noqa: B023 - called at once


def check_vmap(make: Make) -> None:
    """torch.func.vmap over ids gives the same rows and per-sample gradients."""
    table = seeded(make)
    ids = some_ids(table, 4, 5)
    torch.testing.assert_close(torch.func.vmap(table)(ids), table(ids), msg=lambda m: f"vmap: {m}")
    parameters = {name: value.detach() for name, value in table.named_parameters()}

    def loss(given: dict[str, Tensor], sample: Tensor) -> Tensor:
        rows: Tensor = torch.func.functional_call(table, given, (sample,))
        return rows.square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, ids)
    for number, sample in enumerate(ids):
        alone = torch.func.grad(loss)(parameters, sample)
        for name, value in alone.items():
            label = f"gradient of {name} for one sample"
            torch.testing.assert_close(each[name][number], value, msg=lambda m: f"{label}: {m}")  # noqa: B023


class _Doubled(torch.nn.Module):
    """A parametrization: twice the stored tensor."""

    def forward(self, stored: Tensor) -> Tensor:
        return 2 * stored


def check_parametrized(make: Make) -> None:
    """Look-ups use a parametrization of any parameter, which can be removed."""
    for name, _ in seeded(make).named_parameters():
        if "." in name:
            continue
        table, twin = seeded(make), seeded(make)
        with torch.no_grad():
            getattr(twin, name).mul_(2)
        ids = some_ids(table, 5)
        parametrize.register_parametrization(table, name, _Doubled())
        label = f"parametrized {name}"
        torch.testing.assert_close(table(ids), twin(ids), msg=lambda m: f"{label}: {m}")  # noqa: B023
        table(ids).sum().backward()
        gradient = getattr(table.parametrizations, name).original.grad
        assert gradient is None or not gradient.is_sparse, f"{label}: its gradient is dense"
        parametrize.remove_parametrizations(table, name)
        torch.testing.assert_close(table(ids), twin(ids), msg=lambda m: f"{label}, removed: {m}")  # noqa: B023


def check_pruned(make: Make) -> None:
    """Look-ups use torch.nn.utils.prune and weight_norm of any matrix."""
    for name, parameter in seeded(make).named_parameters():
        if "." in name or parameter.dim() != 2:
            continue
        table, twin = seeded(make), seeded(make)
        mask = (torch.arange(parameter.numel()) % 3 > 0).reshape(parameter.shape).double()
        with torch.no_grad():
            getattr(twin, name).mul_(mask)
        prune.custom_from_mask(table, name, mask)  # type: ignore[no-untyped-call]
        ids, label = some_ids(table, 5), f"pruned {name}"
        torch.testing.assert_close(table(ids), twin(ids), msg=lambda m: f"{label}: {m}")  # noqa: B023
        prune.remove(table, name)  # type: ignore[no-untyped-call]
        torch.testing.assert_close(table(ids), twin(ids), msg=lambda m: f"{label}, removed: {m}")  # noqa: B023
        normed, plain = seeded(make), seeded(make)
        parametrizations.weight_norm(normed, name)
        label = f"weight_norm of {name}"
        torch.testing.assert_close(normed(ids), plain(ids), msg=lambda m: f"{label}: {m}")  # noqa: B023


def check_reset(make: Make) -> None:
    """reset_parameters with a seed equals construction with this seed."""
    fresh, table = seeded(make), make(dtype=torch.float64).eval()
    table.reset_parameters(generator=torch.Generator().manual_seed(SEED))
    for (name, one), other in zip(
        fresh.state_dict().items(), table.state_dict().values(), strict=True
    ):
        if isinstance(one, Tensor):
            torch.testing.assert_close(other, one, msg=lambda m: f"reset of {name}: {m}")  # noqa: B023
    table.reset_parameters()
    assert torch.isfinite(table.weight).all()


def check_meta(make: Make) -> None:
    """A table on the meta device accepts a state by assignment, or is allocated and reset."""
    table = seeded(make, padding_idx=1)
    for where in ("argument", "context"):
        if where == "argument":
            empty = make(padding_idx=1, dtype=torch.float64, device="meta").eval()
        else:
            with torch.device("meta"):
                empty = make(padding_idx=1, dtype=torch.float64).eval()
        assert all(parameter.is_meta for parameter in empty.parameters())
        twin = copy.deepcopy(empty)
        empty.load_state_dict(copy.deepcopy(table.state_dict()), assign=True)
        assert torch.equal(empty(some_ids(table, 20)), table(some_ids(table, 20)))
        (empty(some_ids(table, 5)).sum() + auxiliary_loss(empty)).backward()
        AdamW(empty.parameters()).step()
        twin.to_empty(device="cpu").reset_parameters(generator=torch.Generator().manual_seed(SEED))
        assert torch.equal(twin(some_ids(table, 20)), table(some_ids(table, 20)))


def check_clipped(make: Make) -> None:
    """torch.nn.utils.clip_grad_norm_ clips dense gradients; ours clips row-sparse ones too."""
    table = seeded(make)
    table(some_ids(table, 9)).sum().backward()
    sparse = any(p.grad is not None and p.grad.is_sparse for p in table.parameters())
    clip: Any = clip_grad_norm_ if sparse else torch.nn.utils.clip_grad_norm_
    clip(table.parameters(), 0.5)
    parts = [p.grad.to_dense().norm() for p in table.parameters() if p.grad is not None]
    assert torch.stack(parts).norm() <= 0.5 * (1 + 1e-4)


def check_second_derivative(make: Make) -> None:
    """Gradients can be differentiated, or one error explains why not."""
    table = seeded(make)
    rows = table(some_ids(table, 6))
    wanted = [p for p in table.parameters() if p.requires_grad]
    first = torch.autograd.grad(rows.square().sum(), wanted, create_graph=True, allow_unused=True)
    used = [gradient.to_dense() for gradient in first if gradient is not None]
    try:
        total = torch.stack([gradient.square().sum() for gradient in used]).sum()
        torch.autograd.grad(total, wanted, allow_unused=True)
    except FeatherbedError as error:
        assert any(getattr(module, "sparse", False) for module in table.modules()), error
        assert "sparse=False" in str(error), error


def check_pretrained(make: Make) -> None:
    """from_pretrained equals from_dense, frozen by default like nn.Embedding."""
    table = seeded(make)
    target = table.weight.detach()
    settings = table.settings() | {"padding_idx": None}
    frozen = type(table).from_pretrained(target, **settings)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    free = type(table).from_pretrained(target, freeze=False, **settings)
    assert any(parameter.requires_grad for parameter in free.parameters())
    assert free.weight.shape == target.shape


def check_computed_weight(make: Make) -> None:
    """Writing to ``weight`` changes the table or raises an error."""
    table = seeded(make)
    with torch.no_grad():
        try:
            table.weight[3] = 0
        except FeatherbedError:
            return
        assert not table(torch.tensor([3])).any(), "table.weight[3] = 0 must not be without effect"


def check_exported(make: Make) -> None:
    """torch.export with a dynamic batch gives the same rows and checks ids."""
    table = seeded(make, dtype=torch.float32, padding_idx=2)
    batch = torch.export.Dim("batch", min=2, max=4096)
    for strict in (False, True):
        torch._dynamo.reset()
        program = torch.export.export(
            table, (some_ids(table, 6, 3),), dynamic_shapes=({0: batch},), strict=strict
        ).module()
        for count in (2, 11):
            ids = some_ids(table, count, 3)
            torch.testing.assert_close(program(ids), table(ids), msg=lambda m: f"exported: {m}")
        try:
            program(torch.full((2, 3), table.num_embeddings))
        except IndexError:
            continue
        raise AssertionError("exported: an id beyond the table was accepted")


def check_compiled(make: Make) -> None:
    """torch.compile(fullgraph=True) with inductor gives the same rows, gradients and id errors."""
    torch._dynamo.reset()  # one code object serves all tables: start its cache anew
    table = seeded(make, padding_idx=2)

    @torch.compile(fullgraph=True)
    def rows(ids: Tensor) -> Tensor:
        found: Tensor = table(ids)
        return found

    ids = some_ids(table, 6, 9)
    assert_same(table, rows(ids), table(ids), "compiled forward")
    for bad in (
        torch.tensor([[table.num_embeddings]]),
        torch.tensor([[-1]]),
        torch.tensor([[0.5]]),
    ):
        try:
            rows(bad)
        except IndexError as error:
            assert isinstance(error, FeatherbedError), error
        else:
            raise AssertionError(f"compiled: ids {bad.tolist()} were accepted")

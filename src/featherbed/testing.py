"""The conformance suite: every table is compared with the dense table it represents.

fb.testing.check_table(lambda **settings: MyTable(50, 8, **settings))
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize, prune

from featherbed.errors import ArgumentError, FeatherbedError, NotPackable
from featherbed.optim import AdamW, clip_grad_norm_
from featherbed.packed.file import check, load, save
from featherbed.tables.table import Table, auxiliary_loss

Make = Callable[..., Table]
SEED = 17


def seeded(make: Make, **settings: Any) -> Table:
    """Create a table from a fixed seed, in evaluation mode."""
    settings.setdefault("dtype", torch.float64)
    return make(generator=torch.Generator().manual_seed(SEED), **settings).eval()


def oracle(table: Table) -> Tensor:  # [V, d]
    """Return the dense table defined by the codes, with gradients to every parameter."""
    ids = torch.arange(table.num_embeddings)
    return table.mask_padding(ids, table.codes(ids).rows())


def some_ids(table: Table, *shape: int) -> Tensor:
    """Return seeded ids with repeats, including the first and the last id if possible."""
    ids = torch.randint(table.num_embeddings, shape, generator=torch.Generator().manual_seed(3))
    if ids.numel() > 2:
        ids.view(-1)[0], ids.view(-1)[1] = 0, table.num_embeddings - 1
    return ids


def random_like(rows: Tensor) -> Tensor:
    """Return seeded normal numbers of the shape of ``rows``."""
    return torch.randn(rows.shape, dtype=rows.dtype, generator=torch.Generator().manual_seed(5))


def gradients_of(
    table: Table, rows: Tensor, extra: tuple[Tensor, ...] = (), keep: bool = False
) -> list[Tensor]:
    """Return dense gradients of a seeded sum of ``rows``: of all parameters, then of ``extra``."""
    wanted = [*table.parameters(), *extra]
    found = torch.autograd.grad(
        rows, wanted, random_like(rows), allow_unused=True, retain_graph=keep
    )
    return [
        torch.zeros_like(w) if g is None else g.to_dense()
        for w, g in zip(wanted, found, strict=True)
    ]


def assert_close(found: Tensor, expected: Tensor, label: str) -> None:
    """Assert that two tensors agree; ``label`` names them in the message."""
    torch.testing.assert_close(found, expected, msg=lambda message: f"{label}: {message}")


def assert_same(
    table: Table, fast: Tensor, slow: Tensor, what: str, extra: tuple[Tensor, ...] = ()
) -> None:
    """Assert that two computations of rows agree, including all gradients."""
    assert_close(fast, slow, what)
    names = [name for name, _ in table.named_parameters()] + ["per_sample_weights"] * len(extra)
    pairs = zip(
        names,
        gradients_of(table, fast, extra),
        gradients_of(table, slow, extra, keep=True),
        strict=True,
    )
    for name, mine, dense in pairs:
        assert_close(mine, dense, f"gradient of {name}, {what}")


def check_forward(make: Make) -> None:
    """Forward equals the dense oracle for ids of any shape and integer type."""
    table = seeded(make)
    dense = oracle(table)
    torch.testing.assert_close(table.weight, dense)
    for shape in ((), (7,), (3, 4), (2, 3, 5), (0,), (4, 0)):
        ids = some_ids(table, *shape)
        expected = dense[ids.reshape(-1)].reshape(*shape, table.embedding_dim)
        torch.testing.assert_close(table(ids), expected)
        torch.testing.assert_close(table(ids.int()), expected)


def check_gradients(make: Make) -> None:
    """Every parameter's gradient equals the oracle's, repeated ids included."""
    for padding in (None, 2):
        table = seeded(make, padding_idx=padding)
        ids = some_ids(table, 6, 9)
        assert_same(table, table(ids), F.embedding(ids, oracle(table)), "forward")


def check_bags(make: Make) -> None:
    """Bags equal F.embedding_bag of the oracle: sum, mean, offsets, 2-D, weights, padding, empty
    bags.
    """
    for padding in (None, 2):
        table = seeded(make, padding_idx=padding)
        ids, offsets = some_ids(table, 11), torch.tensor([0, 4, 4, 9])
        weights = torch.rand(
            11, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        last = torch.cat([offsets, torch.tensor([11])])
        for mode in ("sum", "mean"):
            settings: dict[str, Any] = {"mode": mode}
            expect: dict[str, Any] = {"mode": mode, "padding_idx": padding}
            dense = F.embedding_bag(ids, oracle(table), offsets, **expect)
            assert_same(table, table.bag(ids, offsets, **settings), dense, f"bag {mode}")
            assert_same(
                table,
                table.bag(ids, last, include_last_offset=True, **settings),
                dense,
                f"bag {mode}, last offset",
            )
            flat = some_ids(table, 4, 5)
            assert_same(
                table,
                table.bag(flat, **settings),
                F.embedding_bag(flat, oracle(table), **expect),
                f"2-D bag {mode}",
            )
        dense = F.embedding_bag(
            ids, oracle(table), offsets, mode="sum", per_sample_weights=weights, padding_idx=padding
        )
        assert_same(table, table.bag(ids, offsets, weights), dense, "weighted bag", (weights,))
        assert table.bag(ids[:0], torch.tensor([0, 0])).shape == (2, table.embedding_dim), (
            "bags of nothing are zero"
        )


def check_logits(make: Make) -> None:
    """Logits equal hidden @ weight.T with all gradients, for few and for many hidden vectors."""
    for padding in (None, 2):
        table = seeded(make, padding_idx=padding)
        for shape in ((), (3,), (2, 2), (table.embedding_dim + 5,)):
            hidden = random_like(
                torch.empty(*shape, table.embedding_dim, dtype=torch.float64)
            ).requires_grad_()
            assert_same(
                table,
                table.logits(hidden),
                hidden @ oracle(table).T,
                f"logits of {shape}",
                (hidden,),
            )


def check_padding(make: Make) -> None:
    """The padding row is zero, also for a negative padding_idx, and has no gradient."""
    for given, meant in ((0, 0), (2, 2), (-1, -1)):
        table = seeded(make, padding_idx=given)
        meant %= table.num_embeddings
        assert table.padding_idx == meant
        rows = table(torch.tensor([meant, meant]))
        assert not rows.any(), "the padding row must be zero"
        assert not any(g.any() for g in gradients_of(table, rows)), (
            "the padding row must give no gradient"
        )


def check_dtypes(make: Make) -> None:
    """Parameters and rows have the given dtype; autocast gives finite rows."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        table = seeded(make, dtype=dtype)
        assert table(some_ids(table, 5)).dtype == dtype == table.dtype
    table = seeded(make, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = table(some_ids(table, 5))
        rows.float().sum().backward()
    torch.testing.assert_close(rows.float(), table(some_ids(table, 5)), rtol=0.05, atol=0.05)


def check_bad_ids(make: Make) -> None:
    """Ids that are out of range or no integers raise an error with the id and the range."""
    table = seeded(make)
    most = table.num_embeddings - 1
    for ids, named in (([0, most + 1], most + 1), ([-1], -1), ([0.5], "float")):
        for call in (table, lambda x: table.bag(x, torch.tensor([0]))):
            try:
                call(torch.tensor(ids))
            except IndexError as error:
                assert isinstance(error, FeatherbedError), error
                assert str(named) in str(error), error
                assert str(most) in str(error), error
            else:
                raise AssertionError(f"ids {ids} were accepted")


def check_seed(make: Make) -> None:
    """Equal seeds give equal tables, others different ones; initial rows have an ordinary scale."""
    other = make(generator=torch.Generator().manual_seed(SEED + 1), dtype=torch.float64)
    assert torch.equal(seeded(make).weight, seeded(make).weight), "a seed must reproduce the table"
    assert not torch.equal(seeded(make).weight, other.weight), (
        "another seed must give another table"
    )
    assert 1e-3 < float(other.weight.detach().abs().mean()) < 10, (
        "fresh rows must be neither dust nor boulders"
    )


def check_copies(make: Make) -> None:
    """state_dict, deepcopy and pickle round trips keep every row; eval mode is deterministic."""
    table = seeded(make, padding_idx=1)
    fresh = make(padding_idx=1, dtype=torch.float64).eval()
    fresh.load_state_dict(table.state_dict())
    for twin in (fresh, copy.deepcopy(table), pickle.loads(pickle.dumps(table)), table.eval()):
        assert torch.equal(twin(some_ids(table, 20)), table(some_ids(table, 20)))


def check_parts(make: Make) -> None:
    """Parts of a table that can be divided have its rows, and its gradients in sum."""
    table = seeded(make, padding_idx=2)
    if not table.row_tensors:
        return
    count, middle = table.num_embeddings, table.num_embeddings // 3
    parts = [table.part(0, middle), table.part(middle, count)]
    assert torch.equal(torch.cat([part.weight for part in parts]), table.weight)
    missing = set(table.row_tensors) - set(dict(table.named_parameters()))
    assert missing <= set(table._buffers), f"row_tensors names {missing}, which it has not"
    whole = gradients_of(table, table.weight)
    seeds = torch.split(random_like(table.weight), [middle, count - middle])
    each = [
        torch.autograd.grad(part.weight, [*part.parameters()], seed, allow_unused=True)
        for part, seed in zip(parts, seeds, strict=True)
    ]
    for (name, _), dense, *some in zip(table.named_parameters(), whole, *each, strict=True):
        if any(one is None for one in some):
            continue  # only used in training
        wide = [one.to_dense() for one in some]
        found = torch.cat(wide) if name in table.row_tensors else torch.stack(wide).sum(0)
        assert_close(found, dense, f"gradient of {name}")


def check_sizes(make: Make) -> None:
    """The sizes are those of the written file and of the tensors in memory."""
    table = seeded(make, dtype=torch.float32).train()
    optimizer = AdamW(table.parameters())
    (table(some_ids(table, 9)).sum() + auxiliary_loss(table)).backward()
    optimizer.step()
    sizes = table.sizes(optimizer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.safetensors"
        if table.packable:
            save(table, path)
            stored = path.stat().st_size
            assert sizes.file == stored, f"sizes say {sizes.file} bytes, the file has {stored}"
    held = sum(p.nbytes for p in table.parameters())
    dense = sum(p.nbytes for p in table.parameters() if p.grad is None or not p.grad.is_sparse)
    assert sizes.training is not None
    assert sizes.training >= 3 * held + dense, (
        "training holds parameters, gradients and both of Adam's moments"
    )
    assert table.sizes().training is None
    assert 0 < sizes.parameters <= sum(p.numel() for p in table.parameters())
    assert sizes.dense == table.num_embeddings * table.embedding_dim * 4


def check_packed(make: Make) -> None:
    """Packed, saved and loaded rows, bags, logits and searches equal the table's, or packing
    raises.
    """
    if not seeded(make).packable:
        _refuses_to_pack(seeded(make))
        return
    for padding in (None, 2):
        table = seeded(make, dtype=torch.float32, padding_idx=padding).eval()
        dense = table.weight.detach().numpy()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "table.safetensors"
            save(table, path)
            check(path)
            packed = load(path)
            assert len(packed) == table.num_embeddings
            assert packed.dim == table.embedding_dim
            np.testing.assert_allclose(packed[np.arange(len(packed))], dense, rtol=1e-5, atol=1e-6)
            queries = random_like(torch.empty(3, packed.dim)).numpy()
            np.testing.assert_allclose(
                packed.logits(queries), queries @ dense.T, rtol=1e-4, atol=1e-5
            )
            ids, offsets = some_ids(table, 11), torch.tensor([0, 4, 4, 9])
            for mode in ("sum", "mean"):
                pooled = table.bag(ids, offsets, mode=mode).detach().numpy()
                mine = packed.bag(ids.numpy(), offsets.numpy(), mode=mode)
                np.testing.assert_allclose(mine, pooled, rtol=1e-4, atol=1e-5)
            scores = packed.search(queries, k=5)[1]
            expected = -np.sort(-(queries @ dense.T), axis=1)[:, :5]
            np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


def _refuses_to_pack(table: Table) -> None:
    try:
        table.pack()
    except NotPackable as error:
        assert type(table).__name__ in str(error), error
        return
    raise AssertionError(f"{type(table).__name__} says packable = False and packs")


def check_fit(make: Make) -> None:
    """from_dense of a table's own rows is at least as close to them as a fresh table."""
    table = seeded(make)
    target = table.weight.detach()
    settings = table.settings() | {"padding_idx": None}
    fitted = type(table).from_dense(target, **settings)
    fresh = make(generator=torch.Generator().manual_seed(SEED + 1), dtype=torch.float64)
    error, start = ((t.weight - target).square().sum() for t in (fitted, fresh))
    assert error <= start, "from_dense must come nearer to the matrix than a random table"
    try:
        type(table).from_dense(target[0], **settings)
    except ArgumentError:
        return
    raise AssertionError("from_dense must refuse anything but a matrix")


def check_capabilities(make: Make) -> None:
    """The capabilities of a table agree with its parameters, its rows and each other."""
    table = seeded(make)
    owned = {id(parameter) for parameter in table.parameters()}
    named = [
        *table.penalized,
        *table.penalized_rows,
        *(p for p in table.factors or () if p is not None),
    ]
    assert all(id(parameter) in owned for parameter in named), "a capability names other parameters"
    ids = torch.arange(table.num_embeddings)
    codes = table.codes(ids)
    if table.weighted_codes:
        assert codes.indices is None
        assert codes.values is not None
        assert codes.dictionary is not None
        torch.testing.assert_close(codes.values @ codes.dictionary, table.weight)
    if table.factors is not None:
        rows, atoms = table.factors
        torch.testing.assert_close(rows if atoms is None else rows @ atoms, table.weight)
    assert table.has_anchors == (table.anchor_count > 0)
    assert table.has_anchors or not (table.sparse_codes or table.grows or table.penalized)
    assert table.pruned_parameter_count() <= table.parameter_count()
    if table.packable:
        torch.testing.assert_close(table.pruned().weight, table.weight)
    for scheduler in table.schedulers(4):
        for _ in range(4):
            scheduler.step()
        assert scheduler.reached
        scheduler.load_state_dict(scheduler.state_dict())
    before = float(table.weight.detach().std())
    table.scale_initial_rows(0.5 * before)
    after = float(table.weight.detach().std())
    assert 0.4 < after / before < 1.05, (
        f"scale_initial_rows changed the standard deviation from {before:.3g} to {after:.3g}"
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
    assert_close(found, twin(ids), "functional_call")
    parameters = {name: value.detach() for name, value in table.named_parameters()}
    weights = random_like(table(ids))

    def loss(given: dict[str, Tensor]) -> Tensor:
        rows: Tensor = torch.func.functional_call(table, given, (ids,))
        return (rows * weights).sum()

    gradients = torch.func.grad(loss)(parameters)
    expected = gradients_of(table, table(ids))
    for (name, found), slow in zip(gradients.items(), expected, strict=True):
        assert_close(found, slow, f"torch.func.grad of {name}")


def check_vmap(make: Make) -> None:
    """torch.func.vmap over ids gives the same rows and per-sample gradients."""
    table = seeded(make)
    ids = some_ids(table, 4, 5)
    assert_close(torch.func.vmap(table)(ids), table(ids), "vmap")
    parameters = {name: value.detach() for name, value in table.named_parameters()}

    def loss(given: dict[str, Tensor], sample: Tensor) -> Tensor:
        rows: Tensor = torch.func.functional_call(table, given, (sample,))
        return rows.square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, ids)
    for number, sample in enumerate(ids):
        alone = torch.func.grad(loss)(parameters, sample)
        for name, value in alone.items():
            assert_close(each[name][number], value, f"gradient of {name} for one sample")


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
        assert_close(table(ids), twin(ids), label)
        table(ids).sum().backward()
        gradient = getattr(table.parametrizations, name).original.grad
        assert gradient is None or not gradient.is_sparse, f"{label}: its gradient is dense"
        parametrize.remove_parametrizations(table, name)
        assert_close(table(ids), twin(ids), f"{label}, removed")


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
        assert_close(table(ids), twin(ids), label)
        prune.remove(table, name)  # type: ignore[no-untyped-call]
        assert_close(table(ids), twin(ids), f"{label}, removed")
        normed, plain = seeded(make), seeded(make)
        parametrizations.weight_norm(normed, name)
        label = f"weight_norm of {name}"
        assert_close(normed(ids), plain(ids), label)


def check_reset(make: Make) -> None:
    """reset_parameters with a seed equals construction with this seed."""
    fresh, table = seeded(make), make(dtype=torch.float64).eval()
    table.reset_parameters(generator=torch.Generator().manual_seed(SEED))
    for (name, one), other in zip(
        fresh.state_dict().items(), table.state_dict().values(), strict=True
    ):
        if isinstance(one, Tensor):
            assert_close(other, one, f"reset of {name}")
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
            assert_close(program(ids), table(ids), "exported")
        try:
            program(torch.full((2, 3), table.num_embeddings))
        except IndexError:
            continue
        raise AssertionError("exported: an id beyond the table was accepted")


CHECKS = tuple(value for name, value in vars().items() if name.startswith("check_"))


def check_table(make: Make, *, compiled: bool = False) -> None:
    """Run all checks on a table; ``make(**settings)`` takes padding_idx, dtype, device, generator.

    The checks cover the table's own promises (rows, bags, logits, packed form, capabilities) and
    PyTorch's conventions (``torch.func``, ``torch.export``, parametrizations, pruning, the meta
    device, ``reset_parameters``). ``compiled=True`` adds torch.compile (slow, needs a C++
    compiler). Raises AssertionError at the first difference.

    >>> import featherbed as fb
    >>> check_table(lambda **settings: fb.AnchorTable(50, 8, anchors=5, **settings))
    """
    for check_promise in CHECKS:
        check_promise(make)
    if compiled:
        check_compiled(make)


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

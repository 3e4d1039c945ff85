"""Codes of an existing matrix: additive quantisation finds them, least squares or gradient steps fit the composer to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from featherbed.coding import LONGEST, Floats, leading, learn_additive, learn_shared
from featherbed.errors import ArgumentError, MissingExtra
from featherbed.tables.table import to_numpy

if TYPE_CHECKING:
    from featherbed.tables.kd import KDTable

STEPS = 600  # of the composer's fit, where it is no least-squares problem
BATCH = 2048
RATE = 1e-2
SMALL = 1 << 18  # numbers of a step below which one thread is faster
ROUNDS = 8


def rows_to_code(matrix: Tensor, what: str) -> Floats:  # [V, d]
    """Return the rows of a matrix that codes are learnt from; say which extra that takes, and refuse rows too long for it."""
    try:
        import faiss  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra("faiss", "compress", what) from None
    rows: Floats = np.ascontiguousarray(to_numpy(matrix), dtype=np.float32)
    lengths = np.sqrt(np.einsum("vd,vd->v", rows, rows, dtype=np.float64))
    if lengths.max() > LONGEST:
        worst = int(lengths.argmax())
        raise ArgumentError(
            f"row {worst} is {lengths[worst]:.0e} long, codes are learnt of at most {LONGEST:.0e}: scale it down"
        )
    return rows


@torch.no_grad()
def autoencode(table: KDTable, matrix: Tensor, seed: int = 0) -> None:  # [V, d]
    """Set codes, code vectors and composer of ``table`` so that its rows come near ``matrix``."""
    target = rows_to_code(matrix, "KDTable.from_dense")
    mean = target.mean(0)
    inside, basis = (
        _basis(target - mean, table.code_dim)
        if table.composer == "linear"
        else (target - mean, None)
    )
    learn = learn_shared if table.shared else learn_additive
    atoms, codes = learn(np.ascontiguousarray(inside), table.parts, table.choices, seed, ROUNDS)
    ids = torch.arange(table.num_embeddings, device=table.device)
    table.assign(ids, torch.from_numpy(codes.astype(np.int64)).to(table.device))
    set_composer(table, atoms, mean, basis)
    if table.composer != "linear":
        fit_composer(table, matrix, table.codes_of(), seed)


@torch.no_grad()
def set_composer(table: KDTable, atoms: Floats, mean: Floats, basis: Floats | None) -> None:
    """Give a table the code vectors of additive codes, atoms [D, K, .] in ``basis`` around ``mean``; cells stay as they are."""
    if table.last is not None:
        table.last.reset()
    if table.composer == "linear" or starts_linear(table):
        scale = table.parts if table.pool == "mean" or table.composer == "mlp" else 1
        spread = np.zeros((table.atoms.shape[0], table.code_dim), dtype=np.float32)
        spread[:, : atoms.shape[2]] = scale * atoms.reshape(-1, atoms.shape[2])
        if table.projection is None:
            spread += scale * mean / table.parts
        table.atoms.copy_(torch.from_numpy(spread))
    if table.projection is not None and table.bias is not None:
        table.bias.copy_(torch.from_numpy(mean))
        if basis is not None:
            wide = np.zeros((table.code_dim, table.embedding_dim), dtype=np.float32)
            wide[: len(basis)] = basis
            table.projection.copy_(torch.from_numpy(wide))


def _basis(rows: Floats, width: int) -> tuple[Floats, Floats | None]:
    """Return rows in their ``width`` principal directions and these, [width, d]; all of them as they are where they fit."""
    dim = rows.shape[1]
    if width >= dim:
        return rows, None if width == dim else np.eye(dim, dtype=np.float32)
    basis = leading(rows.T.astype(np.float64) @ rows, width)
    return rows @ basis.T, basis


@torch.enable_grad()
def fit_composer(
    table: KDTable, matrix: Tensor, codes: Tensor, seed: int, steps: int = STEPS
) -> None:
    """Fit code vectors and composer to the rows by Adam, the codes as they are."""
    if starts_linear(table):
        begin_linear(table)
    threads = torch.get_num_threads()
    if min(BATCH, len(matrix)) * table.code_dim < SMALL:
        torch.set_num_threads(1)  # small steps: a second thread only waits for a busy core
    try:
        _descend(table, matrix, codes, seed, steps)
    finally:
        torch.set_num_threads(threads)


def starts_linear(table: KDTable) -> bool:
    """Whether the composer is one that can begin as a sum."""
    return table.composer == "mlp" and table.code_dim == table.embedding_dim


def begin_linear(table: KDTable) -> None:
    """Start an mlp as the sum it comes from: relu(x + c) - c, with c beyond what x falls below 0."""
    assert table.cell is not None
    assert table.projection is not None
    assert table.bias is not None
    with torch.no_grad():
        eye, above = (
            torch.eye(table.code_dim, dtype=table.dtype, device=table.device),
            float(4 * table.atoms.std()),
        )
        table.cell.weight.copy_(eye)
        table.projection.copy_(eye)
        table.cell.bias.fill_(above)
        table.bias.sub_(above)


def _descend(table: KDTable, matrix: Tensor, codes: Tensor, seed: int, steps: int) -> None:
    learnt = [
        p
        for name, p in table.named_parameters()
        if name.split(".")[0] in ("atoms", "cell", "projection", "bias")
    ]
    optimizer = torch.optim.Adam(learnt, lr=RATE / 10 if starts_linear(table) else RATE)
    cooling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    parts = torch.arange(table.parts, device=codes.device)
    for _ in range(steps):
        picked = torch.randint(len(matrix), (min(BATCH, len(matrix)),), generator=generator).to(
            matrix.device
        )
        rows = table.compose(table.dictionary[parts, codes[picked]])
        loss = F.mse_loss(rows, matrix[picked])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        cooling.step()
    for parameter in learnt:
        parameter.grad = None

"""The demo: four tables on generated ratings, each stored in a file, read back without torch, and compared."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table as Grid

from featherbed.anchors import HalfNormal
from featherbed.optim import NonNegativeL1, Yogi
from featherbed.packed.file import load, save
from featherbed.packed.table import PackedTable
from featherbed.tables import AnchorTable, DenseTable, QuantizedTable, Table
from featherbed.tasks.data import Ratings, planted_ratings
from featherbed.tasks.ratings import MatrixFactorization, train

DIM = 16
_CHECK = """
import sys
sys.modules["torch"] = None                      # from here on torch cannot be imported
import numpy as np, featherbed as fb
for name in sys.argv[1:]:
    packed, rows = fb.load(name + ".safetensors"), np.load(name + ".npy")
    difference = float(np.abs(packed[np.arange(len(packed))] - rows).max())
    assert difference < 1e-5, (name, difference)
print(len(sys.argv) - 1)
"""


@dataclass(frozen=True)
class Line:
    """One line of the printed comparison; sizes are those of both tables together."""

    name: str
    error: float
    file: int
    resident: int
    training: int | None
    parameters: int
    nanoseconds: float


def run(seed: int = 0, folder: Path | None = None) -> list[Line]:
    """Train, store, reload, print; return the lines."""
    console = Console()
    ratings = planted_ratings(seed=seed)
    parts = ratings.split(seed)
    console.print(
        f"[bold]featherbed demo[/]: {len(ratings):,} generated ratings, {ratings.num_users:,} users,"
        f" {ratings.num_items:,} items, rows of width {DIM}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        keep = Path(temporary) if folder is None else folder
        keep.mkdir(parents=True, exist_ok=True)
        lines = []
        for name, model, optimizer in _trained(ratings, parts, seed):
            lines.append(_measure(name, model, optimizer, {}, parts, keep))
            if isinstance(model.users, AnchorTable):
                low = {"values": "int8", "dictionary": "float16"}
                lines.append(_measure("the same, weights int8", model, None, low, parts, keep))
        stems = [str(path.with_suffix("")) for path in sorted(keep.glob("*.safetensors"))]
        proof = subprocess.run(
            [sys.executable, "-c", _CHECK, *stems], capture_output=True, text=True, check=False
        )
        for stem in stems:
            Path(stem + ".npy").unlink()
    console.print(_grid(lines))
    if proof.returncode:
        console.print(f"[red]the files read back without torch differ:[/]\n{proof.stderr}")
        raise SystemExit(1)
    console.print(
        f"{proof.stdout.strip()} files were read back by a process that cannot import torch: every row is equal."
    )
    console.print(_verdict(lines))
    if folder is not None:
        console.print(f"Packed files: {folder}")
    return lines


def _tables(method: str, ratings: Ratings, seed: int) -> tuple[Table, Table]:
    generator = torch.Generator().manual_seed(seed)
    counts = (ratings.num_users, ratings.num_items)
    if method == "anchor":
        start = HalfNormal(transform_std=0.3)
        users, items = (
            AnchorTable(n, DIM, anchors=12, init=start, generator=generator) for n in counts
        )
        return users, items
    dim = 4 if method == "small" else DIM
    users_, items_ = (DenseTable(n, dim, generator=generator) for n in counts)
    for table in (users_, items_):
        with torch.no_grad():
            table.weight.mul_(0.2)
    return users_, items_


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: tensors this small gain nothing by two, and lose a lot where the second core is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _trained(
    ratings: Ratings, parts: tuple[Ratings, Ratings, Ratings], seed: int
) -> list[tuple[str, MatrixFactorization, torch.optim.Optimizer | None]]:
    mean = float(parts[0].values.mean())
    made: list[tuple[str, MatrixFactorization, torch.optim.Optimizer | None]] = []
    for name, method in (
        (f"dense d={DIM}", "dense"),
        ("dense d=4", "small"),
        ("12 anchors", "anchor"),
    ):
        users, items = _tables(method, ratings, seed)
        model = MatrixFactorization(users, items, mean=mean)
        penalties = {
            t.transform: NonNegativeL1(5e-5) for t in (users, items) if isinstance(t, AnchorTable)
        }
        optimizer = Yogi(
            model.parameters(),
            lr=0.03,
            weight_decay=0.0 if penalties else 3e-5,
            penalties=penalties,
        )
        with one_thread():
            train(
                model,
                optimizer,
                parts[0],
                parts[1],
                epochs=20,
                batch=1024,
                seed=seed,
                name=f"{name:<12}",
            )
        made.append((name, model, optimizer))
    dense = made[0][1]
    rows = (
        QuantizedTable.from_dense(table.weight.detach(), bits=4, scales="column")
        for table in (dense.users, dense.items)
    )
    low = MatrixFactorization(*rows, mean=mean)
    made.insert(2, (f"dense d={DIM} as int4", low, None))
    return made


def _measure(
    name: str,
    model: MatrixFactorization,
    optimizer: torch.optim.Optimizer | None,
    storage: dict[str, str],
    parts: tuple[Ratings, Ratings, Ratings],
    folder: Path,
) -> Line:
    stem = name.replace(",", "").replace(" ", "-").replace("=", "")
    packed = {}
    for side, table in (("users", model.users), ("items", model.items)):
        path = folder / f"{stem}-{side}.safetensors"
        save(table.pack(**storage), path)
        packed[side] = load(path)
        np.save(
            path.with_suffix(".npy"),
            table.weight.detach().numpy() if not storage else packed[side][:],
        )
    sizes = [table.sizes(optimizer) for table in (model.users, model.items)]
    return Line(
        name,
        _packed_error(packed["users"], packed["items"], float(model.get_buffer("mean")), parts[2]),
        file=sum((folder / f"{stem}-{side}.safetensors").stat().st_size for side in packed),
        resident=sum(table.nbytes for table in packed.values()),
        training=None if optimizer is None else sum(size.training or 0 for size in sizes),
        parameters=sum(size.parameters for size in sizes),
        nanoseconds=_lookup_time(packed["users"]),
    )


def _packed_error(users: PackedTable, items: PackedTable, mean: float, ratings: Ratings) -> float:
    """Return the test error of what is in the files, not of what was trained."""
    scores = mean + np.einsum("nd,nd->n", users[ratings.users], items[ratings.items])
    return float(np.mean((scores - ratings.values) ** 2))


def _lookup_time(packed: PackedTable) -> float:
    ids = np.random.default_rng(0).integers(len(packed), size=8192)
    packed[ids]
    times = []
    for _ in range(9):
        start = time.perf_counter_ns()
        packed[ids]
        times.append((time.perf_counter_ns() - start) / len(ids))
    return float(np.median(times))


def _verdict(lines: list[Line]) -> str:
    best = min(line.error for line in lines)
    near = min((line for line in lines if line.error <= 1.1 * best), key=lambda line: line.file)
    size = (
        f"{near.file / 1000:.0f} KB, {lines[0].file / near.file:.1f}x smaller than {lines[0].name}"
    )
    return f"Smallest file within 10 % of the best error here: {near.name}, {size}."


def _grid(lines: list[Line]) -> Grid:
    # narrow enough for 80 columns
    title = (
        "both tables together; error on ratings never trained on; sizes in KB, look-ups in ns a row"
    )
    grid = Grid(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in ("table", "test MSE", "file", "resident", "training", "parameters", "ns"):
        grid.add_column(column, justify="left" if column == "table" else "right", no_wrap=True)
    for line in lines:
        training = "-" if line.training is None else f"{line.training / 1000:,.0f}"
        sizes = (
            f"{line.file / 1000:,.1f}",
            f"{line.resident / 1000:,.1f}",
            training,
            f"{line.parameters:,}",
        )
        grid.add_row(line.name, f"{line.error:.4f}", *sizes, f"{line.nanoseconds:.0f}")
    return grid

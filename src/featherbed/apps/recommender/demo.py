"""The demo: tables trained on generated ratings, stored, read back without torch, and compared."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table as Grid

from featherbed.anchors import HalfNormal
from featherbed.apps.recommender.model import MatrixFactorization, fit_model
from featherbed.apps.recommender.train import PackedFactors
from featherbed.io.records import Ratings, make_ratings
from featherbed.optim import NonNegativeL1, Yogi
from featherbed.packed import PackedTable, load, save
from featherbed.tables import AnchorTable, DenseTable, QuantizedTable, Table

DIM = 16
CHECK = """
import sys
sys.modules["torch"] = None                      # from here on torch cannot be imported
import numpy as np, featherbed as fb
for name in sys.argv[1:]:
    packed, rows = fb.load(name + ".safetensors"), np.load(name + ".npy")
    difference = float(np.abs(packed[np.arange(len(packed))] - rows).max())
    assert difference < 1e-5, (name, difference)
print(len(sys.argv) - 1)
"""
Parts = tuple[Ratings, Ratings, Ratings]
Trained = tuple[str, MatrixFactorization, torch.optim.Optimizer | None]


@dataclass(frozen=True)
class ComparisonLine:
    """One line of the printed comparison; sizes are of both tables together."""

    name: str
    error: float
    file: int
    resident: int
    training: int | None
    parameters: int
    nanoseconds: float


def run_demo(seed: int = 0, folder: Path | None = None) -> list[ComparisonLine]:
    """Train, store, reload and print; return the lines of the comparison."""
    console = Console()
    ratings = make_ratings(seed=seed)
    parts = ratings.split(seed)
    console.print(
        f"[bold]featherbed demo[/]: {len(ratings):,} generated ratings, {ratings.num_users:,} "
        f"users, {ratings.num_items:,} items, rows of width {DIM}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary) if folder is None else folder
        target.mkdir(parents=True, exist_ok=True)
        lines = []
        for name, model, optimizer in _train_all(ratings, parts, seed):
            lines.append(_measure(name, model, optimizer, {}, parts, target))
            if model.users.sparse_codes:
                low = {"values": "int8", "dictionary": "float16"}
                lines.append(_measure("the same, weights int8", model, None, low, parts, target))
        stems = [str(path.with_suffix("")) for path in sorted(target.glob("*.safetensors"))]
        command = [sys.executable, "-c", CHECK, *stems]
        proof = subprocess.run(command, capture_output=True, text=True, check=False)
        for stem in stems:
            Path(stem + ".npy").unlink()
    console.print(_to_grid(lines))
    if proof.returncode:
        console.print(f"[red]the files read back without torch differ:[/]\n{proof.stderr}")
        raise SystemExit(1)
    console.print(
        f"{proof.stdout.strip()} files were read back by a process that cannot import torch: "
        "every row is equal."
    )
    console.print(_conclude(lines))
    if folder is not None:
        console.print(f"Packed files: {folder}")
    return lines


def _new_tables(method: str, ratings: Ratings, seed: int) -> list[Table]:
    generator = torch.Generator().manual_seed(seed)
    tables: list[Table] = []
    for count in (ratings.num_users, ratings.num_items):
        if method == "anchor":
            init = HalfNormal(transform_std=0.3)
            tables.append(AnchorTable(count, DIM, anchors=12, init=init, generator=generator))
        else:
            dense = DenseTable(count, 4 if method == "small" else DIM, generator=generator)
            with torch.no_grad():
                dense.weight.mul_(0.2)
            tables.append(dense)
    return tables


def _train_all(ratings: Ratings, parts: Parts, seed: int) -> list[Trained]:
    mean = float(parts[0].values.mean())
    trained: list[Trained] = []
    methods = {f"dense d={DIM}": "dense", "dense d=4": "small", "12 anchors": "anchor"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors gain nothing from a second, possibly busy core
    try:
        for name, method in methods.items():
            model = MatrixFactorization(*_new_tables(method, ratings, seed), mean=mean)
            penalties = {p: NonNegativeL1(5e-5) for one in model.tables for p in one.penalized}
            decay = 0.0 if penalties else 3e-5
            optimizer = Yogi(model.parameters(), lr=0.03, weight_decay=decay, penalties=penalties)
            fit_model(model, optimizer, parts[0], parts[1], seed=seed, name=f"{name:<12}")
            trained.append((name, model, optimizer))
    finally:
        torch.set_num_threads(threads)
    rows = (
        QuantizedTable.from_dense(table.weight.detach(), bits=4, scales="column")
        for table in trained[0][1].tables
    )
    trained.insert(2, (f"dense d={DIM} as int4", MatrixFactorization(*rows, mean=mean), None))
    return trained


def _measure(
    name: str,
    model: MatrixFactorization,
    optimizer: torch.optim.Optimizer | None,
    storage: dict[str, str],
    parts: Parts,
    folder: Path,
) -> ComparisonLine:
    stem = name.replace(",", "").replace(" ", "-").replace("=", "")
    paths = [folder / f"{stem}-{side}.safetensors" for side in ("users", "items")]
    packed = []
    for path, table in zip(paths, model.tables, strict=True):
        save(table.pack(**storage), path)
        packed.append(load(path))
        rows = packed[-1][:] if storage else table.weight.detach().numpy()
        np.save(path.with_suffix(".npy"), rows)
    sizes = [table.sizes(optimizer) for table in model.tables]
    mean = float(model.get_buffer("mean"))
    return ComparisonLine(
        name,
        PackedFactors(packed[0], packed[1], mean, "none").error(
            parts[2]
        ),  # of the files, not of the model
        file=sum(path.stat().st_size for path in paths),
        resident=sum(table.nbytes for table in packed),
        training=None if optimizer is None else sum(size.training or 0 for size in sizes),
        parameters=sum(size.parameters for size in sizes),
        nanoseconds=_lookup_time(packed[0]),
    )


def _lookup_time(packed: PackedTable) -> float:
    ids = np.random.default_rng(0).integers(len(packed), size=8192)
    packed[ids]
    times = []
    for _ in range(9):
        start = time.perf_counter_ns()
        packed[ids]
        times.append((time.perf_counter_ns() - start) / len(ids))
    return float(np.median(times))


def _conclude(lines: list[ComparisonLine]) -> str:
    lowest = min(line.error for line in lines)
    small = min((line for line in lines if line.error <= 1.1 * lowest), key=lambda line: line.file)
    ratio = lines[0].file / small.file
    return (
        f"Smallest file within 10 % of the best error here: {small.name}, "
        f"{small.file / 1000:.0f} KB, {ratio:.1f}x smaller than {lines[0].name}."
    )


def _to_grid(lines: list[ComparisonLine]) -> Grid:
    # narrow enough for 80 columns
    title = "both tables together; error on held-out ratings; sizes in KB, look-ups in ns per row"
    grid = Grid(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in ("table", "test MSE", "file", "resident", "training", "parameters", "ns"):
        grid.add_column(column, justify="left" if column == "table" else "right", no_wrap=True)
    for line in lines:
        grid.add_row(
            line.name,
            f"{line.error:.4f}",
            f"{line.file / 1000:,.1f}",
            f"{line.resident / 1000:,.1f}",
            "-" if line.training is None else f"{line.training / 1000:,.0f}",
            f"{line.parameters:,}",
            f"{line.nanoseconds:.0f}",
        )
    return grid

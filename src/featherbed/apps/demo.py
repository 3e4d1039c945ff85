"""The demo: three jobs on generated data, each beside its alternatives at the same bytes.

A recommender within a byte budget, a matrix at a sixteenth of its bytes, an anchor table inside a
model. An alternative at the same bytes is the smallest one that is not smaller than ours, or, for
methods that take a budget, what they make of ours. Nothing is known beforehand: the last lines are
computed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from torch import Tensor, nn

from featherbed import compress
from featherbed.apps.compression import compress_file
from featherbed.apps.recommender import (
    RecommenderSettings,
    Split,
    fit_tables,
    train_recommender,
)
from featherbed.apps.recommender.train import PackedFactors, fit_recommender
from featherbed.files import write_file
from featherbed.io.records import make_ratings
from featherbed.optim import AdamW, NonNegativeL1, Yogi
from featherbed.packed import PackedTable, file_size, load, objects_of, purity, save
from featherbed.progress import show_progress
from featherbed.report import CurvePanel, draw_curves
from featherbed.tables import AnchorTable, DenseTable, QuantizedTable, Table

BUDGET, BUDGETS = "12KB", ("8KB", "20KB")  # of the recommender; further ones for the picture
USERS, ITEMS, RATINGS = 1500, 700, 130_000
DIMS = (2, 4, 7, 10, 20)  # widths of plain rows
BITS = {None: "float32 rows", 4: "int4 rows", 2: "int2 rows"}  # how plain rows are stored
VECTORS = 4000
RATIO, RATIOS = 16, (8, 32)  # of the matrix; further ones for the picture
INTEGERS, QUANTIZERS = {"int4": 7.5, "int2": 14.5}, ("opq", "rq")
THEME_NAMES = (
    "music", "sports", "cooking", "finance", "health", "travel", "science", "film",
    "history", "gardens", "weather", "cars", "chess", "sailing", "poetry", "law",
    "dogs", "birds", "bread", "wine", "tea", "maps", "trains", "ships",
    "stars", "stones", "rivers", "radio", "dance", "theatre", "toys", "shoes",
)  # fmt: skip
THEMES, ADS, PAGES = len(THEME_NAMES), 12_000, 400  # of the generated clicks
TRAIN, TEST, EPOCHS, BATCH = 120_000, 20_000, 3, 512
AD_DIMS, HITS = (1, 3, 6, 16), 10
ANCHORS = (40, 20, 80)  # the first one is compared
READ = """
import json, sys, time
sys.modules["torch"] = None                      # from here on torch cannot be imported
import numpy as np, featherbed as fb
found = {}
for path in sys.argv[1:]:
    packed, rows = fb.load(path), np.load(path + ".npy")
    assert float(np.abs(packed[np.arange(len(packed))] - rows).max()) < 1e-5, path
    ids, times = np.random.default_rng(0).integers(len(packed), size=8192), []
    for _ in range(9):
        start = time.perf_counter_ns()
        packed[ids]
        times.append((time.perf_counter_ns() - start) / len(ids))
    found[path] = sorted(times)[4]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class StoredModel:
    """One way to store a model: bytes of its tables without keys, the figure on the test data."""

    name: str
    family: str  # its line in the picture
    size: int
    figure: float


@dataclass(frozen=True)
class DemoPart:
    """The results of one part of the demo; ``models[0]`` is featherbed's, at its size."""

    title: str
    measure: str
    higher: bool  # is better
    models: Sequence[StoredModel]
    files: Sequence[Path]
    report: Path
    notes: Sequence[str] = ()

    @property
    def ours(self) -> StoredModel:
        """The model that featherbed stores."""
        return self.models[0]

    def rivals(self) -> list[StoredModel]:
        """Return of each other family the smallest model that has no fewer bytes than ours.

        Of equal bytes the better one counts; a family without one is represented by its largest.

        >>> sizes = {"ours": (10, 0.9), "int4-4": (9, 0.99), "int4-8": (11, 0.8), "opq": (8, 0.7)}
        >>> models = [StoredModel(name, name[:4], *rest) for name, rest in sizes.items()]
        >>> [one.name for one in DemoPart("a", "recall", True, models, [], Path("r")).rivals()]
        ['int4-8', 'opq']
        """
        sign = 1 if self.higher else -1
        families: dict[str, list[StoredModel]] = {}
        for one in self.models:
            families.setdefault(one.family, []).append(one)
        del families[self.ours.family]
        found = []
        for models in families.values():
            enough = [one for one in models if one.size >= self.ours.size]
            size = min(map(_size, enough)) if enough else max(map(_size, models))
            found.append(max((m for m in models if m.size == size), key=lambda m: sign * m.figure))
        return found

    def verdict(self) -> list[str]:
        """Return lines that say who is ahead of whom, by how much, and whose file is smaller."""
        ours, lines = self.ours, []
        for one in self.rivals():
            gain = (ours.figure - one.figure) * (1 if self.higher else -1)
            word = "ahead of" if gain > 0 else "level with" if gain == 0 else "BEHIND"
            by = f", by {100 * abs(gain) / abs(one.figure):.1f} %" if gain else ""
            less = f" ({1 - one.size / ours.size:.1%} fewer)" if one.size < ours.size else ""
            lines.append(f"{word} {one.name}: {one.figure:.4f} in {one.size:,} bytes{less}{by}")
        return [
            f"{self.title}: {ours.name}, {self.measure} {ours.figure:.4f} in {ours.size:,} bytes",
            *(f"  {line}" for line in lines),
        ]

    def panel(self) -> CurvePanel:
        """Return the panel of the picture."""
        lines: dict[str, list[tuple[float, float]]] = {}
        for one in self.models:
            lines.setdefault(one.family, []).append((one.size, one.figure))
        better = "higher" if self.higher else "lower"
        return CurvePanel(self.title, f"{self.measure}, {better} is better", lines)


def run_demo(
    seed: int = 0, folder: str | Path = "demo", *, progress: bool = True
) -> list[DemoPart]:
    """Run the three parts, write files, reports and a picture to ``folder``, print a comparison."""
    console, folder, started = Console(), Path(folder), time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors gain nothing from a second, possibly busy core
    parts = []
    try:
        for number, make in enumerate((recommender_part, matrix_part, anchor_part), 1):
            part = make(folder, seed, progress)
            parts.append(part)
            console.print(f"\n[bold]{number} of 3: {part.title}[/]")
            console.print(_grid(part))
            console.print(*part.notes, sep="\n", highlight=False)
    finally:
        torch.set_num_threads(threads)
    times = read_without_torch([path for part in parts for path in part.files])
    picture = folder / "quality.svg"
    write_file(picture, draw_curves([part.panel() for part in parts]))
    console.print("\n[bold]Read by a process that cannot import torch[/]: every row is equal")
    for path, nanoseconds in times.items():
        console.print(f"  {path}: {nanoseconds:.0f} ns a row", highlight=False)
    console.print("\n[bold]Comparison[/] at the same bytes")
    for line in [line for part in parts for line in part.verdict()]:
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    reports = ", ".join(str(part.report) for part in parts)
    console.print(f"\nreports  {reports}\npicture  {picture}", highlight=False, soft_wrap=True)
    served = " ".join(str(path) for path in (folder / "recommender", *parts[1].files))
    console.print(f"server   featherbed serve {served}", highlight=False, soft_wrap=True)
    console.print(f"{time.perf_counter() - started:.0f} seconds", highlight=False)
    return parts


def read_without_torch(paths: Sequence[Path]) -> dict[str, float]:
    """Return nanoseconds a row of packed files, read and checked by a process without torch."""
    for path in paths:
        np.save(f"{path}.npy", load(path)[:])
    command = [sys.executable, "-c", READ, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for path in paths:
        Path(f"{path}.npy").unlink()
    if done.returncode:
        raise SystemExit(f"the files read back without torch differ:\n{done.stderr}")
    times: dict[str, float] = json.loads(done.stdout)
    return times


def recommender_part(folder: Path, seed: int, progress: bool) -> DemoPart:
    """Train a recommender within a byte budget, and plain rows of several widths."""
    ratings = make_ratings(USERS, ITEMS, RATINGS, seed=seed)
    source = folder / "ratings.csv"
    triples = zip(ratings.users, ratings.items, ratings.values, strict=True)
    source.write_text("user,item,rating\n" + "".join(f"{u},{i},{r:.2f}\n" for u, i, r in triples))
    options: dict[str, Any] = {"seed": seed, "overwrite": True, "progress": progress}
    out = folder / "recommender"
    outcome = train_recommender(source, out, {"table.budget": BUDGET}, **options)
    split: Split = outcome.data.split
    size, error = outcome.metrics["sizes"]["file"], outcome.metrics["test"]["mse"]
    models = [StoredModel("graded rows", "featherbed", size, error)]
    with show_progress("plain rows", len(DIMS) + len(BUDGETS), shown=progress) as shown:
        for budget in BUDGETS:
            settings = RecommenderSettings.from_values({"table.budget": budget})
            fitted = fit_recommender(settings, split, seed=seed, progress=False).model
            found = file_size(fitted.users) + file_size(fitted.items), fitted.error(split.test)
            models.append(StoredModel("graded rows", "featherbed", *found))
            shown.update(advance=1)
        for dim in DIMS:
            models += plain_factors(split, dim, seed)
            shown.update(advance=1)
    files = [out / "users.safetensors", out / "items.safetensors"]
    note = f"{len(ratings):,} ratings of {ratings.num_items:,} items by {ratings.num_users:,} users"
    title = f"a recommender in {BUDGET}"
    return DemoPart(title, "test MSE", False, models, files, out / "report.html", [note])


def plain_factors(split: Split, dim: int, seed: int) -> Iterator[StoredModel]:
    """Yield plain rows of one width, trained once, as float32, int4 and int2."""
    values = {"table.users": "dense", "table.items": "dense", "table.dim": dim}
    fitted = fit_tables(RecommenderSettings.from_values(values), split, seed=seed, progress=False)
    mean = float(fitted.model.get_buffer("mean"))
    for bits, family in BITS.items():
        users, items = (plain_rows(table, bits) for table in fitted.model.tables)
        error = PackedFactors(users, items, mean).error(split.test)
        size = file_size(users) + file_size(items)
        yield StoredModel(f"{family}, d = {dim}", family, size, error)


def plain_rows(table: Table, bits: int | None) -> PackedTable:
    """Pack the rows of a dense table as float32, or as integers with a scale per column."""
    if bits is None:
        return table.pack()
    return QuantizedTable.from_dense(table.weight.detach(), bits=bits, scales="column").pack()


def make_vectors(rows: int, dim: int = 32, topics: int = 60, seed: int = 0) -> NDArray[Any]:
    """Generate rows like word vectors: mixtures of two of 60 topics, noise, a falling spectrum."""
    rng = np.random.default_rng(seed)
    spectrum = np.arange(1, dim + 1) ** -0.5
    centers = rng.normal(size=(topics, dim)) * spectrum
    share = rng.beta(0.4, 0.4, size=(rows, 1))
    first, second = rng.integers(topics, size=(2, rows))
    mixed = share * centers[first] + (1 - share) * centers[second]
    noisy = mixed + 0.35 * rng.normal(size=(rows, dim)) * spectrum
    turn = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    vectors: NDArray[Any] = (noisy @ turn).astype(np.float32)
    return vectors


def matrix_part(folder: Path, seed: int, progress: bool) -> DemoPart:
    """Compress a matrix to a sixteenth, and by integers and the quantizers of faiss."""
    matrix = make_vectors(VECTORS, seed=seed)
    out, source = folder / "vectors.safetensors", folder / "vectors.npy"
    report = folder / "vectors.html"
    np.save(source, matrix)
    options: dict[str, Any] = {"generator": seed, "effort": "quick"}
    table = compress_file(source, out, ratio=RATIO, report=report, progress=progress, **options)
    quality = table.report.quality
    models = [StoredModel("fb.compress", "featherbed", file_size(table), quality["recall"])]
    jobs: list[tuple[str, float]] = [("auto", ratio) for ratio in RATIOS]
    jobs += [*INTEGERS.items(), *((method, RATIO) for method in QUANTIZERS)]
    jobs += [(QUANTIZERS[0], ratio) for ratio in RATIOS]
    with show_progress("other methods", len(jobs), shown=progress) as shown:
        for method, ratio in jobs:
            found = compress(matrix, ratio=ratio, method=method, **options)
            family = "integer rows" if method in INTEGERS else f"faiss {method.upper()}"
            family = "featherbed" if method == "auto" else family
            name = {"featherbed": "fb.compress", "integer rows": f"{method} rows"}.get(
                family, family
            )
            recall = found.report.quality["recall"]
            models.append(StoredModel(name, family, file_size(found), recall))
            shown.update(advance=1)
    notes = [
        f"{len(matrix):,} x {matrix.shape[1]}, {matrix.nbytes:,} bytes as float32",
        f"at 1/{RATIO}: {quality['recall']:.1%} of the ten nearest neighbors are "
        f"preserved, relative error {quality['error']:.4f}, cosine {quality['cosine']:.4f}",
    ]
    return DemoPart(f"a matrix at 1/{RATIO}", "recall@10", True, models, [out], report, notes)


def make_clicks(seed: int = 0) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Generate clicks: the ads [N], the pages they are clicked on [N], the theme of every ad [V].

    An ad has a dozen clicks, 30 % of them anywhere, the others as often on each page as its theme
    is; a fifth of the ads have two themes. Ads of one theme share their pages, which is what an
    anchor can learn from all of them and a row from its own clicks alone.
    """
    rng = np.random.default_rng(seed)
    theme = rng.integers(THEMES, size=ADS)
    second = np.where(rng.random(ADS) < 0.2, rng.integers(THEMES, size=ADS), theme)
    popularity = rng.permutation(np.arange(1, ADS + 1) ** -0.5)
    ads = rng.choice(ADS, size=TRAIN + TEST, p=popularity / popularity.sum())
    pages = rng.integers(PAGES, size=len(ads))
    source = np.where(rng.random(len(ads)) < 0.5, theme[ads], second[ads])
    on_theme = rng.random(len(ads)) < 0.7
    for number in range(THEMES):
        places = on_theme & (source == number)
        law = rng.dirichlet(np.full(PAGES, 0.05))
        pages[places] = rng.choice(PAGES, size=int(places.sum()), p=law)
    return torch.from_numpy(ads), torch.from_numpy(pages), theme


class PageModel(nn.Module):
    """Scores of the pages an ad may be clicked on: a linear layer over the row of the ad."""

    def __init__(self, ads: Table, head: nn.Linear) -> None:
        super().__init__()
        self.ads = ads  # was nn.Embedding
        self.head = head

    def forward(self, ads: Tensor) -> Tensor:  # int64 [B] -> [B, pages]
        """Return the scores of the pages."""
        scores: Tensor = self.head(self.ads(ads))
        return scores


def train_pages(
    model: PageModel, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor], seed: int
) -> None:
    """Train a model of pages on the first clicks of the data."""
    ads, pages = data
    generator = torch.Generator().manual_seed(seed)
    steps = EPOCHS * -(-TRAIN // BATCH)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(EPOCHS):
        for batch in torch.split(torch.randperm(TRAIN, generator=generator), BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ads[batch]), pages[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()


@torch.no_grad()
def stored_pages(
    model: PageModel, name: str, family: str, rows: PackedTable, data: tuple[Tensor, Tensor]
) -> StoredModel:
    """Return a stored model with its hit rate: test clicks on one of the ten best pages."""
    ads, pages = (part[TRAIN:] for part in data)
    top = model.head(torch.from_numpy(rows[ads.numpy()])).topk(HITS, 1).indices
    rate = float((top == pages[:, None]).any(1).float().mean())
    return StoredModel(name, family, file_size(rows), rate)


def plain_pages(
    dim: int, data: tuple[Tensor, Tensor], seed: int, generator: torch.Generator
) -> tuple[list[StoredModel], PageModel]:
    """Train plain rows; return them as float32, int4 and int2, and the model halfway.

    They train as long as anchors and the rows these start from; of halfway and end the better
    counts.
    """
    table = DenseTable(ADS, dim, generator=generator)
    with torch.no_grad():
        table.weight.mul_(0.1)
    model, stages = PageModel(table, nn.Linear(dim, PAGES)), []
    for stage in range(2):
        optimizer = AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        train_pages(model, optimizer, data, seed)
        if stage == 0:
            halfway = deepcopy(model)
        stages.append(
            [
                stored_pages(model, f"{kind}, d = {dim}", kind, plain_rows(table, bits), data)
                for bits, kind in BITS.items()
            ]
        )
    return [max(pair, key=_figure) for pair in zip(*stages, strict=True)], halfway


def anchored_pages(
    start: PageModel,
    count: int,
    data: tuple[Tensor, Tensor],
    seed: int,
    generator: torch.Generator,
) -> tuple[StoredModel, PackedTable]:
    """Fit anchors to trained rows, one for each row, and train on."""
    rows = start.ads.weight
    table = AnchorTable.from_dense(rows, anchors=count, slots=1, generator=generator)
    model = PageModel(table, deepcopy(start.head))
    penalties = {table.transform: NonNegativeL1(1e-6)}
    train_pages(model, Yogi(model.parameters(), lr=0.03, penalties=penalties), data, seed)
    packed = table.pack(values="int4", dictionary="int8")
    return stored_pages(model, f"{count} anchors", "featherbed", packed, data), packed


def anchor_part(folder: Path, seed: int, progress: bool) -> DemoPart:
    """Train plain rows of several widths, and anchors that start from the widest of them."""
    ads, pages, theme = make_clicks(seed)
    data, generator = (ads, pages), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    plain, anchored = [], []
    with show_progress("clicks", len(AD_DIMS) + len(ANCHORS), shown=progress) as shown:
        for dim in AD_DIMS:
            models, start = plain_pages(dim, data, seed, generator)
            plain += models
            shown.update(advance=1)
        for count in ANCHORS:
            anchored.append(anchored_pages(start, count, data, seed, generator))
            shown.update(advance=1)
    keys = [f"{THEME_NAMES[kind]}-{number}" for number, kind in enumerate(theme)]
    out, report = folder / "ads.safetensors", folder / "anchors.txt"
    save(anchored[0][1], out, keys=keys)
    packed = load(out)
    pure = purity(packed, theme.tolist())
    notes = [f"anchor {number}: {_top(packed, number)}" for number in range(ANCHORS[0])]
    notes.append(
        f"{pure.share:.0%} of the ads have the main theme of their anchor ({pure.baseline:.0%} "
        "with one cluster)"
    )
    write_file(report, "\n".join(notes) + "\n")
    told = [
        f"{ADS:,} ads of {THEMES} themes with {TRAIN // ADS} clicks each: which of {PAGES} pages?",
        *notes[:4],
        f"... all {ANCHORS[0]}: {report}",
        notes[-1],
    ]
    models = [*(model for model, _ in anchored), *plain]
    title = "an anchor table in a model"
    return DemoPart(title, f"hit rate@{HITS}", True, models, [out], report, told)


def _size(model: StoredModel) -> int:
    return model.size


def _figure(model: StoredModel) -> float:
    return model.figure


def _top(packed: PackedTable, anchor: int) -> str:
    return ", ".join(str(entry.key) for entry in objects_of(packed, anchor, count=6))


def _grid(part: DemoPart) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("stored as", part.measure, "bytes"):
        grid.add_column(column, justify="left" if column == "stored as" else "right", no_wrap=True)
    for one in sorted(part.models, key=lambda one: one.size):
        mark = "[bold]" if one is part.ours else "" if one in part.rivals() else "[dim]"
        grid.add_row(f"{mark}{one.name}", f"{mark}{one.figure:.4f}", f"{mark}{one.size:,}")
    return grid

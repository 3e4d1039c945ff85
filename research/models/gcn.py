"""Graph convolutions over learned node embeddings in compact tables: who cites whom, and what about.

    Z = softmax(Â ReLU(Â X W0) W1),   Â = D^-1/2 (A + I) D^-1/2,   loss = -Σ_labelled ln Z

Kipf and Welling 2016 (arXiv:1609.02907); with KD codes: Chen, Min and Sun 2018, supplement,
section 3. X is a table of nodes, learned from the labels of a few of them; or ``features``: X W0 =
B T, where B are bags of words and the rows of T those of a table of words (the weights of Kipf and
Welling's first layer).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_array
from torch import Tensor, nn

import featherbed as fb
from featherbed.errors import DataError
from featherbed.progress import show_progress
from featherbed.sharing import bare
from featherbed.tables.spec import parse_spec
from research.harness.records import Outcome, Run
from research.sources.citations import CitationGraph, Planetoid

EVERY = 4  # epochs between two measures of the validation part


def sparse_tensor(matrix: csr_array) -> Tensor:
    """Return a sparse matrix as a tensor."""
    found = matrix.tocoo()
    places = torch.from_numpy(np.stack(found.coords).astype(np.int64))
    values = torch.from_numpy(found.data.astype(np.float32))
    return torch.sparse_coo_tensor(places, values, found.shape, check_invariants=True).coalesce()


def propagation(graph: CitationGraph) -> Tensor:  # [V, V]
    """Return Â, the adjacency matrix with self-loops, normalized on both sides.

    >>> from research.sources.citations import generated_graph
    >>> a = propagation(generated_graph()).to_dense()
    >>> bool((a == a.T).all()), round(float(torch.linalg.eigvalsh(a)[-1]), 3)
    (True, 1.0)
    """
    loops = np.repeat(np.arange(graph.nodes), 2).reshape(-1, 2)
    rows, columns = np.concatenate([graph.arcs, loops]).T
    scale = 1 / np.sqrt(np.bincount(rows, minlength=graph.nodes))
    shape = graph.nodes, graph.nodes
    return sparse_tensor(csr_array((scale[rows] * scale[columns], (rows, columns)), shape=shape))


class GraphNetwork(nn.Module):
    """Two graph convolutions over the rows of a table, of nodes or (with ``bags``) of words."""

    def __init__(self, table: Any, graph: CitationGraph, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.table, self.spread, self.drop = table, propagation(graph), settings["dropout"]
        self.bags = sparse_tensor(graph.features) if settings["features"] else None
        self.ids = torch.arange(table.num_embeddings)
        hidden, classes = settings["hidden"], int(graph.labels.max()) + 1
        width = hidden if self.bags is not None else settings["dim"]
        self.first = (
            nn.Identity() if self.bags is not None else nn.Linear(width, hidden, bias=False)
        )
        self.last = nn.Linear(hidden, classes, bias=False)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)

    def rows(self) -> Tensor:  # [nodes or words, d]
        """Return all rows of the table."""
        found: Tensor = self.table(self.ids)
        return found

    def forward(self, rows: Tensor) -> Tensor:  # [nodes or words, d] -> [nodes, classes]
        """Return the class scores of all nodes from the rows of the table."""
        if self.bags is None:
            inputs = self.first(F.dropout(rows, self.drop, self.training))
        else:
            values = F.dropout(self.bags.values(), self.drop, self.training)
            bags = torch.sparse_coo_tensor(
                self.bags.indices(),
                values,
                self.bags.shape,
                is_coalesced=True,
                check_invariants=False,
            )
            inputs = torch.sparse.mm(bags, rows)
        hidden = F.dropout(torch.sparse.mm(self.spread, inputs).relu(), self.drop, self.training)
        scores: Tensor = torch.sparse.mm(self.spread, self.last(hidden))
        return scores


def make_table(
    graph: CitationGraph, settings: Mapping[str, Any], seed: int, rows: Tensor | None = None
) -> Any:
    """Return the table of nodes or words, in front of it SSE (``p``; ``rho``: over the citations).

    ``rows`` are those of a dense table trained before: with ``after = "fit"`` the table is fitted to
    them, with ``after = "guide"`` they guide its codes.
    """
    count, width = shape_of(graph, settings)
    generator = torch.Generator().manual_seed(seed)
    method: Any
    method, given = parse_spec(settings["table"])
    if rows is not None and settings["after"] == "fit":
        return method.from_dense(rows, generator=generator, **given)
    if rows is not None:
        given["guide"] = fb.Pretrained(rows, **settings["guide"])
    table = method(count, width, generator=generator, **given)
    table.scale_initial_rows(settings.get("init_std", math.sqrt(2 / (count + width))))  # Glorot
    if settings.get("alike"):
        table.assign(table.all_ids(), torch.zeros(count, table.parts, dtype=torch.int64))
    if not settings.get("p"):
        return table
    related = fb.Graph.from_edges(count, graph.arcs) if "rho" in settings else None
    rho = settings.get("rho", 1.0)
    return fb.SSE(table, settings["p"], graph=related, rho=rho, generator=generator)


def shape_of(graph: CitationGraph, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of rows of the table and their width."""
    if not settings["features"]:
        return graph.nodes, settings["dim"]
    if graph.features is None:
        raise DataError(graph.absent)
    return graph.features.shape[1], settings["hidden"]


def make_optimizer(model: GraphNetwork, settings: Mapping[str, Any]) -> Any:
    """Return Adam, weight decay on the first layer and the table; a penalty where the table has one."""
    codes, others = fb.split_codes(model)
    last = [*model.last.parameters()]
    first = [p for p in others if all(p is not own for own in last)]
    decayed = {"params": first, "weight_decay": settings["weight_decay"]}
    groups: list[dict[str, Any]] = [decayed, {"params": last}]
    if codes:
        groups.append({"params": codes, "lr": settings["code_lr"]})
    step = torch.optim.Adam(groups, lr=settings["lr"])
    if "lam" not in settings:
        return step
    penalized = bare(model.table).penalized
    return fb.Proximal(step, {one: fb.NonNegativeL1(settings["lam"]) for one in penalized})


def train(
    model: GraphNetwork, graph: CitationGraph, settings: Mapping[str, Any], run: Run
) -> list[dict[str, Any]]:
    """Train until the validation part is no better for ``patience`` epochs; return to the best one."""
    optimizer, labels = make_optimizer(model, settings), torch.from_numpy(graph.labels)
    nodes, validation = torch.from_numpy(graph.train), torch.from_numpy(graph.validation)
    best, state, number = (math.inf, 0.0), model.state_dict(), 0
    history: list[dict[str, Any]] = []
    with show_progress(run.title, settings["epochs"], shown=run.shown) as shown:
        for epoch in range(1, settings["epochs"] + 1):
            model.train()
            loss = F.cross_entropy(model(model.rows())[nodes], labels[nodes])
            optimizer.zero_grad()
            torch.autograd.backward(loss + fb.auxiliary_loss(model))
            optimizer.step()
            shown.update(advance=1)
            if epoch % EVERY:
                continue
            model.eval()
            with torch.no_grad():
                scores = model(model.rows())
            missed = float(F.cross_entropy(scores[validation], labels[validation]))
            right = accuracy(scores, labels, validation)
            entry = {"epoch": epoch, "train": float(loss.detach()), "validation": missed}
            history.append(entry | {"accuracy": right})
            shown.update(note=f"validation {right:.3f}")
            if (-right, missed) < best:
                best, state, number = (-right, missed), copy.deepcopy(model.state_dict()), epoch
            elif epoch - number >= settings["patience"]:
                break
    model.load_state_dict(state)
    fb.settle(model)
    return history


def run_gcn(settings: Mapping[str, Any], seed: int, source: Planetoid, run: Run) -> Outcome:
    """Train, store the table of the best epoch, and measure with the rows of the file."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    graph = source.graph(settings["graph"])
    after, plain = settings.get("after"), {**settings, "table": "dense"}
    model = GraphNetwork(make_table(graph, plain if after else settings, seed), graph, settings)
    history = train(model, graph, plain if after else settings, run)
    if after:
        rows = bare(model.table).weight.detach().clone()
        table = make_table(graph, settings, seed, rows)
        if after == "fit":
            model.table = table
        else:
            model = GraphNetwork(table, graph, settings)
        if after == "guide" or settings.get("tune"):
            history = train(model, graph, settings, run)
    model.eval()
    path = run.work / f"{run.row or 'table'}-seed-{seed}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    bare(model.table).pack().save(path)
    with torch.no_grad():
        scores = model(torch.from_numpy(fb.load(path)[model.ids.numpy()]))
    labels, size = torch.from_numpy(graph.labels), path.stat().st_size
    dense = 4 * len(model.ids) * settings.get("against", shape_of(graph, settings)[1])
    measures = {
        "accuracy": accuracy(scores, labels, torch.from_numpy(graph.test)),
        "validation_accuracy": accuracy(scores, labels, torch.from_numpy(graph.validation)),
        "bytes": float(size),
        "ratio": dense / size,
        "epochs": float(history[-1]["epoch"]),
    }
    health = bare(model.table).health()
    if health is not None:
        measures["duplicates"] = float(health.duplicates)
    return Outcome(measures, history)


def accuracy(scores: Tensor, labels: Tensor, nodes: Tensor) -> float:
    """Return the share of nodes whose class has the highest score."""
    return float((scores[nodes].argmax(1) == labels[nodes]).double().mean())

"""Citation networks in Planetoid's files (Yang, Cohen and Salakhutdinov 2016), and a generated one.

``ind.NAME.x``, ``y``: features and labels of the nodes to train on; ``allx``, ``ally``: of all nodes
but those of the test; ``tx``, ``ty``: of the test nodes, whose numbers are the lines of
``test.index``; ``graph``: the neighbors of each node. All but ``test.index`` are pickles of
Python 2: they are read by an unpickler that makes arrays, lists and dictionaries and nothing else.
"""

from __future__ import annotations

import io
import pickle
import tarfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from featherbed.errors import DataError
from research.sources.texts import folder_of

VALIDATION = 500  # nodes, those after the training nodes
NEEDED = ("y", "ally", "ty", "graph", "test.index")
FEATURES = ("allx", "tx")
FILES = ("x", *FEATURES, *NEEDED)
LARGEST = 1 << 28  # bytes of a file
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class CitationGraph:
    """A graph with labels: both directions of each edge, classes, nodes of each part, features.

    ``absent`` says why there are no features.
    """

    name: str
    arcs: Ids  # [n, 2], no arc of a node to itself
    labels: Ids  # [V], -1 where unknown
    train: Ids
    validation: Ids
    test: Ids
    features: csr_array | None = None
    absent: str = ""

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.labels)


class SparseRows:
    """The state of a sparse matrix in a pickle."""


def bytes_of(text: str, encoding: str) -> bytes:
    """Return the bytes of a text: Python 3 writes those of arrays so, always in latin1."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it holds bytes in {encoding}, not latin1")
    return text.encode(encoding)


ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("scipy.sparse.csr", "csr_matrix"): SparseRows,
    ("scipy.sparse._csr", "csr_matrix"): SparseRows,
    ("_codecs", "encode"): bytes_of,
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
    ("builtins", "list"): list,
}


class PlainUnpickler(pickle.Unpickler):
    """Makes arrays, lists and dictionaries; anything else is refused by name."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the allowed classes."""
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no plain data")
        return ALLOWED[module, name]


class Planetoid:
    """A folder with the files of one or more graphs, plain or as ``ind.NAME.tar.gz``."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._read: dict[str, CitationGraph] = {}

    def graph(self, name: str) -> CitationGraph:
        """Return a graph by its name, cora say."""
        if self.folder is None:
            return generated_graph()
        if name not in self._read:
            self._read[name] = read_planetoid(self.folder, name)
        return self._read[name]


def open_planetoid(name: str, data: str | Path | None = None, quick: bool = False) -> Planetoid:
    """Return the folder of graphs, below ``data`` or $FEATHERBED_DATA; ``quick``: a generated graph.

    >>> open_planetoid("planetoid", quick=True).graph("cora").nodes
    150
    """
    if quick:
        return Planetoid(None)
    return Planetoid(folder_of(name, data, "ind.cora.x and its like, plain or as ind.cora.tar.gz"))


def read_planetoid(folder: Path, name: str) -> CitationGraph:
    """Return the graph called ``name``; without features where their files are missing."""
    files = _contents(folder, name)
    missing = [kind for kind in NEEDED if kind not in files]
    if missing:
        held = sorted({path.name.split(".")[1] for path in folder.glob("ind.*.*")})
        raise DataError(
            f"{folder} holds no {', '.join(f'ind.{name}.{kind}' for kind in missing)}: "
            f"graphs it has files of are {', '.join(held) or 'none'}"
        )
    found = {kind: _unpickled(folder, name, kind, files[kind]) for kind in files}
    test, train = found["test.index"], len(found["y"])
    known, after = found["ally"], found["ty"]
    graph = found["graph"]
    if len(test) != len(after) or known.ndim != 2 or known.shape[1:] != after.shape[1:]:
        raise DataError(
            f"{folder}: ind.{name}.ally, ty and test.index do not belong together: labels of shape "
            f"{known.shape} and {after.shape}, {len(test)} numbers of test nodes"
        )
    nodes = max(len(known) + len(after), int(test.max(initial=0)) + 1, max(graph, default=0) + 1)
    hot = np.zeros((nodes, known.shape[1]))
    hot[: len(known)] = known
    hot[test] = after
    labels = np.where(hot.any(1), hot.argmax(1), -1)
    arcs = np.array([(i, j) for i, own in graph.items() for j in own], dtype=np.int64)
    if len(arcs) == 0 or arcs.min() < 0 or arcs.max() >= nodes:
        raise DataError(f"{folder}: ind.{name}.graph names nodes outside of 0 to {nodes - 1}")
    arcs = np.unique(np.concatenate([arcs, arcs[:, ::-1]]), axis=0)
    features, absent = _features(folder, name, found, test, nodes)
    stop = min(train + VALIDATION, len(known))
    return CitationGraph(
        name,
        arcs[arcs[:, 0] != arcs[:, 1]],
        labels,
        np.arange(train),
        np.arange(train, stop),
        np.sort(test[labels[test] >= 0]),
        features,
        absent,
    )


def _features(
    folder: Path, name: str, found: dict[str, Any], test: Ids, nodes: int
) -> tuple[csr_array | None, str]:
    missing = [f"ind.{name}.{kind}" for kind in FEATURES if kind not in found]
    if missing:
        return None, (
            f"{folder} holds no {', '.join(missing)}: rows with features need it, "
            "rows with learned node embeddings do not"
        )
    known, after = found["allx"].tocoo(), found["tx"].tocoo()
    rows = np.concatenate([known.coords[0], test[after.coords[0]]])
    columns = np.concatenate([known.coords[1], after.coords[1]])
    values = np.concatenate([known.data, after.data]).astype(np.float32)
    matrix = csr_array((values, (rows, columns)), shape=(nodes, known.shape[1]))
    total = np.maximum(np.asarray(matrix.sum(axis=1)), 1e-12)
    return csr_array(matrix / total[:, None]), ""  # Kipf and Welling: rows sum to 1


def _contents(folder: Path, name: str) -> dict[str, bytes]:
    """Return the bytes of the files of a graph by their kind."""
    plain = {kind: folder / f"ind.{name}.{kind}" for kind in FILES}
    found = {kind: path.read_bytes() for kind, path in plain.items() if path.is_file()}
    archive = folder / f"ind.{name}.tar.gz"
    if archive.is_file():
        try:
            with tarfile.open(archive) as packed:
                for kind in FILES:
                    members = [m for m in packed if Path(m.name).name == f"ind.{name}.{kind}"]
                    for member in members[:1]:
                        stream = packed.extractfile(member) if member.size <= LARGEST else None
                        if stream is not None:
                            found.setdefault(kind, stream.read())
        except (tarfile.TarError, OSError, EOFError) as error:
            raise DataError(f"{archive} is no archive of files: {error}") from None
    return found


def _unpickled(folder: Path, name: str, kind: str, content: bytes) -> Any:
    try:
        if kind == "test.index":
            return np.array([int(line) for line in content.split()], dtype=np.int64)
        found = PlainUnpickler(io.BytesIO(content), encoding="latin1").load()
        if isinstance(found, SparseRows):
            state = vars(found)
            parts = state["data"], state["indices"], state["indptr"]
            matrix = csr_array(parts, shape=state.get("_shape", state.get("shape")))
            matrix.check_format(full_check=True)
            return matrix
        wanted = dict if kind == "graph" else np.ndarray
        if not isinstance(found, wanted):
            raise TypeError(f"it holds {type(found).__name__}")
        return found
    except Exception as error:  # a damaged pickle raises anything
        raise DataError(f"{folder}: ind.{name}.{kind} cannot be read: {error}") from None


def generated_graph(nodes: int = 150, classes: int = 3, words: int = 30) -> CitationGraph:
    """Return a graph of communities; each class uses a third of the words more often."""
    rng = np.random.default_rng(0)
    labels = rng.integers(classes, size=nodes)
    same = labels[:, None] == labels
    upper = np.triu(rng.random((nodes, nodes)) < np.where(same, 0.08, 0.01), 1)
    arcs = np.argwhere(upper | upper.T)
    own = np.arange(words) % classes == labels[:, None]
    counts = (rng.random((nodes, words)) < np.where(own, 0.4, 0.1)).astype(np.float32)
    counts[:, 0] = 1.0
    order = rng.permutation(nodes)
    features = csr_array(counts / counts.sum(1, keepdims=True))
    return CitationGraph("generated", arcs, labels, order[:20], order[20:60], order[60:], features)

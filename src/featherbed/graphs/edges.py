"""Relations listed in a file: ConceptNet's, or two columns of names."""

from __future__ import annotations

import gzip
import json
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path

import numpy as np

from featherbed.checks import check_number
from featherbed.errors import ArgumentError, DataError
from featherbed.graphs.checks import places
from featherbed.graphs.graph import Graph

MOST_LINE = 1 << 24  # letters


def edge_file(
    path: str | Path,
    keys: Sequence[str],
    *,
    relations: Collection[str] | None = None,
    language: str | None = "en",
    min_weight: float = 0.0,
    unknown: Counter[str] | None = None,
) -> Graph:
    """Relate objects named on the same line of a file (possibly gzipped), in one of two formats.

    ConceptNet (Speer et al. 2017): URI, relation, start, end and a JSON text with a weight,
    separated by tabs; the name of the node ``/c/en/hot_dog/n`` is ``hot_dog``, compared without
    case and with underscores for spaces. Any other file: two names per line, separated by tabs,
    commas or spaces, compared exactly. The first line determines the format. Empty lines, lines
    that start with # and lines with unknown names are skipped.

    Args:
        path: the file, in UTF-8.
        keys: names of the objects, in the order of their ids.
        relations: relations to use, such as ``("Synonym", "RelatedTo")``; None for all. ConceptNet
            only.
        language: language of both nodes, None for any. ConceptNet only.
        min_weight: minimum weight. ConceptNet only.
        unknown: a Counter for names that are not among the keys.

    >>> path = getfixture("tmp_path") / "edges.csv"
    >>> _ = path.write_text("hot,cold\\nhot,tepid\\n")
    >>> missing = Counter()
    >>> edge_file(path, ["cold", "hot", "warm"], unknown=missing).pairs().tolist(), missing
    ([[0, 1]], Counter({'tepid': 1}))
    """
    if isinstance(relations, str) or (relations is not None and not relations):
        raise ArgumentError(
            f"relations={relations!r}: give a list of names such as ('Synonym',), or None for all"
        )
    check_number("min_weight", min_weight)
    lines = _lines(Path(path))
    first = next(lines, None)
    if first is None:
        raise DataError(f"{path} holds no edges")
    conceptnet = first[1].count("\t") == 4 and "\t/r/" in first[1]
    if not conceptnet and (relations is not None or min_weight > 0):
        raise ArgumentError(
            f"{path} has two columns: there are no relations or weights to choose by"
        )
    known = places(keys, lambda key: key.lower().replace(" ", "_") if conceptnet else key)
    read = _conceptnet(relations, language, min_weight) if conceptnet else _two_columns(first[1])
    wanted = "URI, relation, start, end and JSON between tabs" if conceptnet else "two names"
    pairs = array("i")  # both ends of one edge after the other: little memory for a long file
    for number, line in chain([first], lines):
        try:
            ends = read(line)
        except (ValueError, KeyError, TypeError):
            found = f"expected {wanted}, found {line[:80]!r}"
            raise DataError(f"{path}, line {number}: {found}") from None
        if unknown is not None:
            unknown.update(name for name in ends if name not in known)
        if ends:
            pairs.extend(chain.from_iterable(product(*(known.get(end, ()) for end in ends))))
    return Graph.from_edges(len(keys), np.asarray(pairs).reshape(-1, 2))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbers and texts of lines that are neither empty nor comments."""
    read = gzip.open if path.suffix == ".gz" else open
    try:
        with read(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(iter(partial(file.readline, MOST_LINE), ""), 1):
                if len(line) == MOST_LINE:
                    raise DataError(
                        f"{path}, line {number}: longer than {MOST_LINE:,} letters: give one edge "
                        "a line"
                    )
                if line.strip() and not line.startswith("#"):
                    yield number, line.rstrip("\r\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}") from None


def _two_columns(first: str) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of lines with two names, with the separator of the first line."""
    separator = next((mark for mark in "\t," if mark in first), None)

    def read(line: str) -> tuple[str, ...]:
        start, end = line.split(separator)
        return start.strip(), end.strip()

    return read


def _conceptnet(
    relations: Collection[str] | None, language: str | None, min_weight: float
) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of ConceptNet lines: the names of both nodes, or None."""

    def read(line: str) -> tuple[str, ...]:
        _, relation, *uris, about = line.split("\t")
        if not relation.startswith("/r/") or len(uris) != 2:
            raise ValueError
        if relations is not None and relation.removeprefix("/r/") not in relations:
            return ()
        if any(not uri.startswith("/c/") for uri in uris):  # ExternalURL leads out of the network
            return ()
        (one, start), (other, end) = (uri.split("/")[2:4] for uri in uris)
        if language is not None and {one, other} != {language}:
            return ()
        if min_weight > 0 and json.loads(about)["weight"] < min_weight:
            return ()
        return start.lower(), end.lower()

    return read

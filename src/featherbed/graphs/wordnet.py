"""Words related in WordNet, read from its database files."""

from __future__ import annotations

import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations, product
from pathlib import Path, PurePosixPath
from typing import IO

from featherbed.errors import ArgumentError, DataError
from featherbed.graphs.checks import places
from featherbed.graphs.graph import Graph

POINTERS = {"synonyms": (), "antonyms": ("!",), "hypernyms": ("@", "@i"), "hyponyms": ("~", "~i")}
FILES = ("data.noun", "data.verb", "data.adj", "data.adv")
MOST_BYTES = 1 << 28  # of a data file in an archive
BROKEN = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error)
_MARKER = re.compile(r"\((?:a|p|ip)\)$")  # where an adjective may stand: "galore(ip)"
Synset = list[list[int]]  # the objects behind each of its words, in order


def wordnet(
    words: Sequence[str],
    folder: str | Path | None = None,
    relations: Sequence[str] = ("synonyms", "antonyms", "hypernyms", "hyponyms"),
) -> Graph:
    """Relate words that WordNet relates directly, in any sense (Miller 1995; Liang et al. 2021,
    appendix H).

    Synonyms share a synset; words of a synset are related to those of its hypernyms (more general)
    and hyponyms, including instances; antonyms are pairs of words. A graph has no direction, so
    hypernyms and hyponyms give the same edges. Case is ignored, and spaces are underscores ("hot
    dog" is ``hot_dog``); unknown words have no neighbors.

    Args:
        words: the objects, in the order of their ids.
        folder: the folder with ``data.noun``, ``data.verb``, ``data.adj`` and ``data.adv``, a tar
            or zip file of it, or a folder with such a ``wordnet*`` file. By default
            ``$WNSEARCHDIR``, ``$WNHOME/dict``, ``$FEATHERBED_DATA/wordnet``, NLTK's
            ``corpora/wordnet``, ``/usr/share/wordnet`` and ``/usr/local/WordNet-3.0/dict`` are
            searched.
        relations: the relations to use.

    >>> folder = getfixture("tmp_path")
    >>> for name in FILES:
    ...     _ = (folder / name).write_text("")
    >>> lines = ["01 05 n 02 car 0 auto 0 001 @ 02 n 0000 | a carriage with a motor"]
    >>> lines.append("02 05 n 01 vehicle 0 000 | it moves")
    >>> _ = (folder / "data.noun").write_text("\\n".join(lines))
    >>> wordnet(["car", "vehicle", "auto", "tree"], folder).pairs().tolist()
    [[0, 1], [0, 2], [1, 2]]
    """
    unknown = [name for name in relations if name not in POINTERS]
    if isinstance(relations, str) or unknown or not relations:
        raise ArgumentError(f"relations={relations!r}: give some of {', '.join(POINTERS)}")
    known = places(words, lambda word: word.lower().replace(" ", "_"))
    symbols = {symbol for name in relations for symbol in POINTERS[name]}
    synsets: dict[str, Synset] = {}
    pointers: list[tuple[str, str, int, int]] = []
    for name, lines in _read(_find(folder)):
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("  "):  # lines of the license
                continue
            try:
                _parse(line, known, symbols, synsets, pointers)
            except (ValueError, IndexError):
                raise DataError(
                    f"{name}, line {number} is no WordNet synset: {line.strip()[:60]!r}"
                ) from None
    pairs: set[tuple[int, ...]] = set()
    if "synonyms" in relations:
        for synset in synsets.values():
            pairs.update(combinations(chain.from_iterable(synset), 2))
    for source, target, from_word, to_word in pointers:
        ends = (synsets[source], from_word), (synsets.get(target, []), to_word)
        pairs.update(product(*(_chosen(synset, word) for synset, word in ends)))
    return Graph.from_edges(len(words), list(pairs))


def _parse(
    line: str,
    known: dict[str, list[int]],
    symbols: set[str],
    synsets: dict[str, Synset],
    pointers: list[tuple[str, str, int, int]],
) -> None:
    """Parse a synset: offset, file number, type, number of words, words, number of pointers,
    pointers.

    Only synsets with a known word are kept. Satellite adjectives (type s) are stored as adjectives
    (a).
    """
    fields = line.split(" | ", 1)[0].split()
    after = 4 + 2 * int(fields[3], 16)
    count = int(fields[after])
    if count < 0 or len(fields) < after + 1 + 4 * count:
        raise ValueError
    synset = [known.get(_MARKER.sub("", word).lower(), []) for word in fields[4:after:2]]
    if not any(synset):
        return
    own = _key(fields[0], fields[2])
    synsets[own] = synset
    for at in range(after + 1, after + 1 + 4 * count, 4):
        symbol, offset, kind, ends = fields[at : at + 4]
        if symbol in symbols:
            pointers.append((own, _key(offset, kind), int(ends[:2], 16), int(ends[2:], 16)))


def _key(offset: str, kind: str) -> str:
    return f"{'a' if kind == 's' else kind}{int(offset):08}"


def _chosen(synset: Synset, word: int) -> list[int]:
    """Return the objects of a pointer: word 1, 2, ..., or the whole synset for 0."""
    return [*chain.from_iterable(synset if word == 0 else synset[word - 1 : word])]


def _find(folder: str | Path | None) -> Path:
    """Return the folder or archive with the data files."""
    looked = [Path(folder), Path(folder) / "dict"] if folder is not None else _usual_places()
    for place in looked:
        if all((place / name).is_file() for name in FILES) or _archive(place):
            return place
        inside = sorted(path for path in place.glob("wordnet*") if _archive(path))
        zipped = place.with_name(place.name + ".zip")  # as NLTK leaves it
        for path in [*inside, *([zipped] if zipped.is_file() else [])]:
            return path
    raise DataError(
        f"WordNet was not found: no {', '.join(FILES)} in {', '.join(map(str, looked))}; give its "
        "folder, tar or zip file"
    )


def _usual_places() -> list[Path]:
    folders = (("WNSEARCHDIR", ""), ("WNHOME", "dict"), ("FEATHERBED_DATA", "wordnet"))
    found = [Path(os.environ[name]) / inner for name, inner in folders if os.environ.get(name)]
    nltk = [*filter(None, os.environ.get("NLTK_DATA", "").split(os.pathsep))]
    nltk += ["~/nltk_data", "/usr/share/nltk_data"]
    found += [Path(place).expanduser() / "corpora" / "wordnet" for place in nltk]
    return [*found, Path("/usr/share/wordnet"), Path("/usr/local/WordNet-3.0/dict")]


def _archive(path: Path) -> bool:
    return path.is_file() and (tarfile.is_tarfile(path) or zipfile.is_zipfile(path))


def _read(place: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the lines of each data file, from a folder or an archive."""
    found = set()
    try:
        for name, content in _contents(place):
            found.add(name)
            yield f"{place}: {name}", content.decode("utf-8").split("\n")
    except (*BROKEN, EOFError, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{place} cannot be read as WordNet: {error}") from None
    if len(found) < len(FILES):
        raise DataError(
            f"{place} holds no {', '.join(name for name in FILES if name not in found)}: WordNet "
            "has all of them"
        )


def _contents(place: Path) -> Iterable[tuple[str, bytes]]:
    if place.is_dir():
        yield from ((name, (place / name).read_bytes()) for name in FILES)
    elif zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as packed:
            for path in packed.namelist():
                if PurePosixPath(path).name in FILES:
                    with packed.open(path) as file:
                        yield PurePosixPath(path).name, _limited(place, file)
    else:
        with tarfile.open(place) as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                content = tar.extractfile(member) if name in FILES else None
                if content is not None:
                    yield name, _limited(place, content)


def _limited(place: Path, file: IO[bytes]) -> bytes:
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise DataError(
            f"{place} holds a data file of more than {MOST_BYTES:,} bytes: WordNet has none of "
            "that size"
        )
    return content

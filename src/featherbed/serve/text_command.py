"""``featherbed classify DIR TEXT`` and ``featherbed continue DIR TEXT``: stored text models asked from the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from featherbed.errors import ArgumentError, DataError
from featherbed.serve.classifier import Classifier, Scored

SHOWN = 5  # classes of a single text, unless another number is asked for
MOST_LINE = 1 << 24  # bytes


def run_classify(
    folder: Path,
    text: str | None,
    k: int | None = None,
    json: bool = False,
    file: Path | None = None,
) -> None:
    """Print the classes of a text, or of every line of a file ("-": of what is typed or piped in), with probabilities."""
    if (text is None) == (file is None):
        raise ArgumentError(
            "give one text between quotes, or --file with a text on every line (--file - reads the input)"
        )
    if k is not None and k < 1:
        raise ArgumentError(f"-k {k}: ask for at least one class")
    classifier = Classifier.open(folder)
    if file is not None:
        _lines(classifier, file, k or 1, json)
        return
    assert text is not None
    if not len(classifier.encoder.ids(text)):
        raise ArgumentError(f"the text {text[:40]!r} holds no word: give some text between quotes")
    found, unknown = classifier.classify(text, k or SHOWN), classifier.unknown(text)
    typer.echo(_as_json(text, found, unknown) if json else as_lines(found))
    if unknown and not json:
        _note(unknown)


def run_continue(
    folder: Path,
    text: str,
    words: int = 30,
    seed: int = 0,
    temperature: float = 0.8,
    json: bool = False,
) -> None:
    """Print a text and what a language model goes on with."""
    from featherbed.serve.language import LanguageServer

    server = LanguageServer.open(folder)
    found, unknown = server.continue_text(text, words, seed, temperature), server.unknown(text)
    if json:
        from json import dumps

        settings = {"words": words, "seed": seed, "temperature": temperature}
        typer.echo(
            dumps(
                {"text": text, "continued": found, **settings, "unknown": unknown},
                ensure_ascii=False,
            )
        )
        return
    typer.echo("\n".join(_plain(line) for line in found.split("\n")))
    if unknown:
        _note(unknown)


def as_lines(found: list[Scored]) -> str:
    """Lay classes out in columns; what could act on a terminal is shown as a question mark.

    >>> print(as_lines([Scored("Sports", 0.9312), Scored("World", 0.0688)]))
    0.9312  Sports
    0.0688  World
    """
    return "\n".join(f"{item.probability:.4f}  {_plain(item.label)}" for item in found)


def _lines(classifier: Classifier, file: Path, k: int, json: bool) -> None:
    """Answer line by line; a line without a word has no class, which is said at the end."""
    count, empty = 0, list[int]()
    for count, text in enumerate(_texts(file), 1):
        there = len(classifier.encoder.ids(text)) > 0
        found = classifier.classify(text, k) if there else []
        if not there:
            empty.append(count)
        cells = [f"{_plain(item.label)}\t{item.probability:.4f}" for item in found]
        typer.echo(_as_json(text, found, classifier.unknown(text)) if json else "\t".join(cells))
    if not count:
        raise DataError(f"{file}: holds no text")
    if empty:
        raise DataError(
            f"{file}, line {empty[0]}: the text holds no word; {len(empty):,} of {count:,} lines have no class"
        )


def _texts(file: Path) -> Iterator[str]:
    stream = sys.stdin.buffer if str(file) == "-" else file.open("rb")
    with stream:
        number = 0
        while line := stream.readline(MOST_LINE):
            number += 1
            if len(line) == MOST_LINE:
                raise DataError(
                    f"{file}, line {number}: longer than {MOST_LINE:,} bytes: give one text a line"
                )
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file}, line {number}: byte {error.start + 1} is not UTF-8: convert the file first"
                ) from None


def _as_json(text: str, found: list[Scored], unknown: list[str]) -> str:
    from json import dumps

    return dumps(
        {"text": text, "classes": [item._asdict() for item in found], "unknown": unknown},
        ensure_ascii=False,
    )


def _note(unknown: list[str]) -> None:
    named = ", ".join(_plain(word) for word in unknown[:10])
    more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
    typer.echo(f"note: not known to the model: {named}{more}", err=True)


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)

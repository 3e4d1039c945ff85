"""What a trained text classifier is stored as: the packed table, the other weights, their sizes, and the page about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featherbed.errors import NotPackable
from featherbed.packed.report import compare_sizes, file_size
from featherbed.packed.table import PackedTable
from featherbed.serve.bundle import LIST, TOKENIZER, WORDS, bytes_of
from featherbed.serve.classifier import Classifier, write_classifier
from featherbed.tables import DenseTable, Table
from featherbed.tables.selected import selected_rows
from featherbed.tasks.classifiers import BagClassifier, TextCNN
from featherbed.tasks.documents import Documents, Prepared
from featherbed.tasks.text import TextFitted, parameter_count, predictions
from featherbed.tasks.word_insight import answers, word_insight
from featherbed.version import __version__

Scores = dict[str, dict[str, Any]]  # by part: accuracy, texts, the answers and how sure they are


def arrays_of(model: TextCNN | BagClassifier) -> dict[str, NDArray[np.float32]]:
    """Return the weights of a classifier besides its table, as ``write_classifier`` takes them; batch norms are folded."""
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        if isinstance(model, TextCNN):
            for width, window in zip(model.widths, model.windows, strict=True):
                assert isinstance(window, nn.Conv1d) and window.bias is not None
                found[f"width{width}.weight"] = window.weight.permute(0, 2, 1).flatten(1)
                found[f"width{width}.bias"] = window.bias
            layers = [model.output]
        else:
            layers = [model.output]
            if len(model.between):
                first, _, middle, second, _ = model.between
                scale, shift = _folded(first)
                found |= {"norm.scale": scale, "norm.shift": shift}
                layers = [_normed(middle, second), model.output]
        for number, layer in enumerate(layers):
            found |= {f"layer{number}.weight": layer.weight, f"layer{number}.bias": layer.bias}
        return {name: value.detach().float().numpy().copy() for name, value in found.items()}


def _folded(norm: Any) -> tuple[Tensor, Tensor]:  # -> [d], [d]
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    return scale, norm.bias - scale * norm.running_mean


def _normed(layer: Any, norm: Any) -> nn.Linear:
    """Return the linear layer that does what ``layer`` and the norm behind it do."""
    scale, shift = _folded(norm)
    made = nn.Linear(layer.in_features, layer.out_features)
    made.weight.copy_(layer.weight * scale[:, None])
    made.bias.copy_(layer.bias * scale + shift)
    return made


def pack_words(table: Table, stored: dict[str, str]) -> PackedTable | None:
    """Return the packed form of a table of words, None if it has none; rows that a lasso has emptied are not kept."""
    table.eval()
    if isinstance(table, DenseTable) and parameter_count(table) < table.parameter_count():
        table = selected_rows(table)
    try:
        return table.pack(
            values=stored.get("values", "float32"), dictionary=stored.get("dictionary", "float32")
        )
    except NotPackable:
        return None


def store(
    folder: Path,
    fitted: TextFitted,
    prepared: Prepared,
    stored: dict[str, str],
    about: dict[str, Any],
) -> PackedTable | None:
    """Write what ``featherbed classify`` opens; None, and nothing written, for a table that cannot be packed."""
    packed = pack_words(fitted.made.table, stored)
    if packed is None:
        return None
    model = fitted.model.eval()
    write_classifier(
        folder,
        packed,
        arrays_of(model),
        kind="cnn" if isinstance(model, TextCNN) else "bag",
        classes=prepared.classes,
        length=prepared.length,
        widths=model.widths if isinstance(model, TextCNN) else (),
        words=None if prepared.tokenizer else prepared.words,
        tokenizer=prepared.tokenizer,
        weights=stored.get("weights", "float32"),
        about=about,
    )
    return packed


def measured(folder: Path, fitted: TextFitted, prepared: Prepared, stored: bool) -> Scores:
    """Return accuracies and answers on every part, of the model as it is stored; of the trained one where nothing is."""
    parts: dict[str, Documents] = {"train": prepared.train, "validation": prepared.validation}
    if prepared.test is not None:
        parts["test"] = prepared.test
    served = Classifier.open(folder) if stored else None
    found = {}
    for name, documents in parts.items():
        sure = None
        if served is None:
            given = predictions(fitted.model, documents, prepared.length)
        else:
            shares = served.probabilities(documents.ids, documents.offsets)
            given, sure = np.argmax(shares, axis=1), shares.max(axis=1)
        right = float((given == documents.labels).mean())
        found[name] = {"accuracy": right, "texts": len(documents), "given": given, "sure": sure}
    return found


def sizes(
    folder: Path, model: nn.Module, table: Table, packed: PackedTable | None
) -> dict[str, Any]:
    """Return the sizes: parameters as papers count them, bytes of every part of the folder that answering reads.

    ``dense_whole`` is what the same model takes with plain float32 rows and weights.
    """
    dense = table.num_embeddings * table.embedding_dim
    others = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in table.parameters())
    found: dict[str, Any] = {
        "parameters": parameter_count(table),
        "dense_parameters": dense,
        "other_parameters": others,
    }
    found |= {"float32": 4 * dense}
    if packed is None:
        return found
    names = {path.name: path.stat().st_size for path in folder.iterdir()}
    words, whole = names.get(LIST, 0) + names.get(TOKENIZER, 0), bytes_of(folder)
    found |= {
        "whole": whole,
        "table": names[WORDS],
        "words": words,
        "rest": whole - names[WORDS] - words,
    }
    found |= {"resident": packed.nbytes, "ratio": 4 * dense / file_size(packed, keys=False)}
    return found | {"dense_whole": 4 * (dense + others) + words}


def parameter_line(found: dict[str, Any]) -> str:
    """Say how many parameters the table has, and plain rows.

    >>> parameter_line({"parameters": 500, "dense_parameters": 2000})
    '500 parameters of the table, 4.0 times fewer than the 2,000 of plain rows'
    """
    times = found["dense_parameters"] / max(1, found["parameters"])
    compared = f"{times:,.1f} times fewer than" if times >= 1 else f"{1 / times:,.1f} times"
    return (
        f"{found['parameters']:,} parameters of the table, {compared} "
        f"the {found['dense_parameters']:,} of plain rows"
    )


def size_line(found: dict[str, Any]) -> str:
    """Say how large all files that answering needs are, by part, and with float32 throughout.

    >>> size_line({"whole": 100, "dense_whole": 400, "table": 50, "words": 20, "rest": 30})
    ... # doctest: +ELLIPSIS
    '100 bytes in all, 4.0 times smaller than 400 with plain float32 rows and weights: table 50, ...
    """
    compared = compare_sizes(found["whole"], found["dense_whole"])
    parts = f"table {found['table']:,}, words {found['words']:,}, the rest {found['rest']:,}"
    return (
        f"{found['whole']:,} bytes in all, {compared} with plain float32 rows and weights: {parts}"
    )


def page_sizes(found: dict[str, Any]) -> dict[str, Any]:
    """Return sizes as a page shows them."""
    shown = {name: found[name] for name in ("parameters", "dense_parameters")}
    if "whole" not in found:
        return shown
    parts = {
        "table": found["table"],
        "words": found["words"],
        "the rest of the model": found["rest"],
    }
    half = (found["dense_whole"] - found["words"]) // 2 + found["words"]
    return shown | {
        "file": found["whole"],
        "parts": parts,
        "float32": found["dense_whole"],
        "float16": half,
    }


def anchor_ids(table: Table) -> list[int] | None:
    """Return the word of each anchor, where anchors are words."""
    known = getattr(table, "anchor_ids", None)
    if known is None:
        return None
    parts = [known] if isinstance(known, Tensor) else list(known)
    return None if any(part is None for part in parts) else torch.cat(parts).tolist()


def report_of(
    fitted: TextFitted, prepared: Prepared, packed: PackedTable | None, scores: Scores, **more: Any
) -> dict[str, Any]:
    """Return what the page shows; ``more`` are entries of its own."""
    table, held = fitted.made.table, prepared.validation
    found = {
        "metrics": {part: {"accuracy": score["accuracy"]} for part, score in scores.items()},
        "history": fitted.result.history,
        "model": {
            "kind": type(fitted.model).__name__,
            "table": type(table).__name__,
            "words": len(prepared.words),
            "dim": table.embedding_dim,
        },
        "classes": list(prepared.classes),
        "part": "validation",
        "input": {part: score["texts"] for part, score in scores.items()},
        "input_notes": list(prepared.notes),
        "notes": list(fitted.made.notes),
        "interrupted": fitted.result.interrupted,
        "version": __version__,
    }
    if packed is not None:
        found["insight"] = word_insight(packed, prepared.words, prepared.counts, anchor_ids(table))
    score, texts = scores["validation"], more.pop("texts", ())
    shown = (texts, score["sure"]) if score["sure"] is not None else ((), ())
    found |= answers(held.labels, score["given"], held.lengths, prepared.classes, *shown)
    return found | more

"""Storage of trained text models: packing, sizes, summaries, and the run that both share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from featherbed.apps.bundle import LIST, MODEL, TOKENIZER, WORDS, stored_bytes
from featherbed.apps.pipeline import Application
from featherbed.apps.words.insight import word_insight
from featherbed.apps.words.table import StorageSettings
from featherbed.checks import TRAINING, Packages, require
from featherbed.errors import NotPackable
from featherbed.packed import PackedTable, compare_sizes, file_size
from featherbed.tables import DenseTable, Table

Numbers = dict[str, Any]


D = TypeVar("D", bound=Any)
F = TypeVar("F", bound=Any)
S = TypeVar("S", bound=Any)


class TextRun(Application[S, D, F]):
    """A run of a text application.

    ``served`` is the stored model, opened again; a table without packed form is stored as dense
    rows beside the folder, so that it can be measured.
    """

    files = (WORDS, MODEL, LIST, TOKENIZER)
    packed: PackedTable | None
    served: Any

    def check(self) -> None:
        """Raise an error if a package is missing."""
        require(f"training a {self.kind}", TRAINING, *self.packages())

    def packages(self) -> list[Packages]:
        """Return the optional packages that the settings need."""
        simple = self.settings.table.selection in (None, "random", "frequency")
        return [] if simple else [{"train": ["sklearn"]}]

    def store(self, folder: Path, data: D, fitted: F) -> None:
        """Write the files that serving reads, and open them."""
        storage: StorageSettings = self.settings.storage
        table = fitted.words.table.eval()
        kinds = {"values": storage.code_weights, "dictionary": storage.dictionary}
        try:
            self.packed = table.pruned().pack(**kinds)
        except NotPackable:
            self.packed = None
            rows = DenseTable.from_dense(table.weight.detach(), padding_idx=table.padding_idx)
            place = folder.with_name("rows")
            self.served = self.write(place, rows.pack(), "float32", data, fitted)
        else:
            self.served = self.write(folder, self.packed, storage.weights, data, fitted)

    @abstractmethod
    def write(self, folder: Path, packed: PackedTable, weights: str, data: D, fitted: F) -> Any:
        """Write the model over a packed table, its other weights in a precision, and open it."""

    def shared_report(
        self, name: str, words: Sequence[str], counts: Any, fitted: F, metrics: Numbers
    ) -> Numbers:
        """Return the entries that the pages of both applications have."""
        table, insight = fitted.words.table, None
        if self.packed is not None:
            anchors = table.anchor_objects()
            known = None if anchors is None else anchors.tolist()
            insight = word_insight(self.packed, words, counts, known)
        return self.report_footer(fitted, metrics) | {
            "name": name,
            "sizes": page_sizes(metrics["sizes"]),
            "model": {
                "kind": self.settings.model.kind,
                "table": type(table).__name__,
                "words": len(words),
                "dim": table.embedding_dim,
            },
            "insight": insight,
            "notes": list(fitted.notes),
        }

    def summarize(self, metrics: Numbers) -> list[str]:
        """Return the lines about size and files."""
        sizes = metrics["sizes"]
        files = sorted(path.name for path in self.out.iterdir() if path.is_file())
        packed = "the table has no packed form: no model that can be served was written"
        stored = size_line(sizes) if "whole" in sizes else packed
        lines = [parameter_line(sizes), stored, f"{self.out}: {', '.join(files)}"]
        if metrics["interrupted"]:
            lines.append("interrupted: this is the best epoch so far; --resume continues training")
        return lines


@torch.no_grad()
def measure_sizes(
    folder: Path, model: nn.Module, table: Table, packed: PackedTable | None
) -> Numbers:
    """Return the sizes of a model: parameters as papers count them, bytes of each stored part.

    ``dense_whole`` are the bytes of the same model with float32 rows and weights.
    """
    dense = table.num_embeddings * table.embedding_dim
    others = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in table.parameters())
    sizes: Numbers = {
        "parameters": table.pruned_parameter_count(),
        "dense_parameters": dense,
        "other_parameters": others,
        "float32": 4 * dense,
    }
    if packed is None:
        return sizes
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    words, whole = files.get(LIST, 0) + files.get(TOKENIZER, 0), stored_bytes(folder)
    return sizes | {
        "whole": whole,
        "table": files[WORDS],
        "words": words,
        "rest": whole - files[WORDS] - words,
        "resident": packed.nbytes,
        "ratio": 4 * dense / file_size(packed, keys=False),
        "dense_whole": 4 * (dense + others) + words,
    }


def parameter_line(sizes: Numbers) -> str:
    """Compare the number of parameters with that of dense rows.

    >>> parameter_line({"parameters": 500, "dense_parameters": 2000})
    'the table has 500 parameters, 4.0 times fewer than the 2,000 of dense rows'
    """
    times = sizes["dense_parameters"] / max(1, sizes["parameters"])
    compared = f"{times:,.1f} times fewer than" if times >= 1 else f"{1 / times:,.1f} times"
    return (
        f"the table has {sizes['parameters']:,} parameters, {compared} "
        f"the {sizes['dense_parameters']:,} of dense rows"
    )


def size_line(sizes: Numbers) -> str:
    """Compare the bytes of all stored files with those of float32 rows and weights.

    >>> size_line({"whole": 100, "dense_whole": 400, "table": 50, "words": 20, "rest": 30})
    ... # doctest: +ELLIPSIS
    '100 bytes in all, 4.0 times smaller than 400 with float32 rows and weights: table 50, ...
    """
    compared = compare_sizes(sizes["whole"], sizes["dense_whole"])
    parts = f"table {sizes['table']:,}, words {sizes['words']:,}, the rest {sizes['rest']:,}"
    return f"{sizes['whole']:,} bytes in all, {compared} with float32 rows and weights: {parts}"


def page_sizes(sizes: Numbers) -> Numbers:
    """Return sizes as a page shows them."""
    shown = {name: sizes[name] for name in ("parameters", "dense_parameters")}
    if "whole" not in sizes:
        return shown
    rest = {"the rest of the model": sizes["rest"]}
    return shown | {
        "file": sizes["whole"],
        "parts": {"table": sizes["table"], "words": sizes["words"], **rest},
        "float32": sizes["dense_whole"],
        "float16": (sizes["dense_whole"] - sizes["words"]) // 2 + sizes["words"],
    }

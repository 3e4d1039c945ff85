"""Models of others with a smaller token table."""

from pathlib import Path

import matplotlib.pyplot as plt

from research.harness.records import Record
from research.harness.report import markdown, single_records


def blocks() -> dict[str, list[str]]:
    """Return the tables of the README."""
    return {
        "gpt": gpt_table(),
        "minilm": minilm_table(),
        "onnx": onnx_table(),
        "whole": whole_table(),
        "static": static_table(),
    }


def largest_first(name: str) -> dict[str, Record]:
    """Return the records of an experiment, the largest table first."""
    found = single_records(name)
    return dict(sorted(found.items(), key=lambda item: -item[1]["measures"]["bytes"]))


def size_cells(record: Record) -> tuple[str, str, str]:
    """Return method, bytes and ratio."""
    found = record["measures"]
    ratio = f"{found['dense_bytes'] / found['bytes']:.2f}"
    return record["details"]["table_method"], f"{found['bytes']:,.0f}", ratio


def gpt_table() -> list[str]:
    """Return perplexities of the test text and divergences from the original."""
    rows = []
    for name, record in largest_first("models/gpt").items():
        test = record["details"]
        base, tuned = test["original"]["perplexity"], test["tuned"]
        stages = test["compressed"], tuned
        each = (f"{s['perplexity']:.2f} ({s['perplexity'] / base - 1:+.2%})" for s in stages)
        apart = (f"{s['divergence']:.5f} ± {s['divergence_error']:.5f}" for s in stages)
        interval = f"{tuned['perplexity_low']:.1f} to {tuned['perplexity_high']:.1f}"
        same = "yes" if test["same_logits"] else "NO"
        rows.append((name, *size_cells(record), f"{base:.2f}", *each, interval, *apart, same))
    head = ["run", "method", "table, bytes", "times smaller", "original", "compressed", "tuned"]
    return markdown([*head, "its 95 % interval", "divergence, nats", "tuned", "same logits"], rows)


def minilm_table() -> list[str]:
    """Return the change of similarities of sentence pairs."""
    rows = []
    for name, record in largest_first("models/minilm").items():
        found = record["measures"]
        change = f"{found['mean_change']:.5f} ± {found['standard_error']:.5f}"
        rows.append((name, *size_cells(record), change, f"{found['largest_change']:.3f}"))
    head = ["run", "method", "table, bytes", "times smaller", "mean change of cosine", "most"]
    return markdown(head, rows)


def onnx_table() -> list[str]:
    """Return sizes, changes of similarities and times of one ONNX file."""
    rows = []
    for name, record in largest_first("models/onnx").items():
        found = record["measures"]
        change = f"{found['mean_change']:.5f} ± {found['standard_error']:.5f}"
        times = f"{found['cpu_ms']:.2f} ({found['float_cpu_ms']:.2f})"
        sizes = f"{found['table_bytes']:,.0f}", f"{found['bytes']:,.0f}"
        apart = f"{found['against_torch']:.1e}"
        rows.append((name, *sizes, change, f"{found['largest_change']:.3f}", apart, times))
    head = ["run", "table, bytes", "ONNX file, bytes", "mean change of cosine", "most"]
    return markdown([*head, "against torch", "CPU ms (float32)"], rows)


def whole_table() -> list[str]:
    """Return sizes, perplexities and differences of logits of a whole GPT-2."""
    rows = []
    for name, record in largest_first("models/whole").items():
        found = record["measures"]
        folder, table, exported = (
            f"{found[one]:,.0f}" for one in ("bytes", "table_bytes", "onnx_bytes")
        )
        times = f"{found['original_bytes'] / found['bytes']:.2f}"
        change = found["perplexity"] / found["original_perplexity"] - 1
        perplexity = f"{found['perplexity']:.2f} ({change:+.2%})"
        method, apart = record["details"]["table_method"], f"{found['against_torch']:.1e}"
        rows.append((name, folder, times, method, table, perplexity, exported, apart))
    head = ["run", "folder, bytes", "times smaller", "method", "table, bytes", "perplexity"]
    return markdown([*head, "ONNX file, bytes", "logits against torch"], rows)


def static_table() -> list[str]:
    """Return quality against bytes of the rows of a static encoder in several forms."""
    rows = []
    for name, record in largest_first("models/static").items():
        found = record["measures"]
        shares = (f"{100 * found[task]:.2f}" for task in ("sst2", "imdb"))
        rows.append((name, f"{found['bytes']:,.0f}", f"{found['word_similarity']:.4f}", *shares))
    return markdown(["rows", "bytes", "word similarity", "SST-2, %", "IMDB, %"], rows)


def pictures(folder: Path) -> None:
    """Draw the loss of perplexity against bytes, before and after tuning."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for run, record in largest_first("models/gpt").items():
        test, size = record["details"], record["measures"]["bytes"] / 1000
        loss = [
            100 * (test[stage]["perplexity"] / test["original"]["perplexity"] - 1)
            for stage in ("compressed", "tuned")
        ]
        (line,) = axes.plot([size] * 2, loss, "o-", label=run)
        axes.plot(size, loss[0], "o", mfc="white", color=line.get_color())
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xlabel("KB of the table")
    axes.set_ylabel("perplexity, % above the original")
    axes.set_title("hollow: compressed, filled: tuned", fontsize=9)
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "gpt.svg", metadata={"Date": None})

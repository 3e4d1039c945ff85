"""The page of the runs on models of others, and a drawing. `python experiments/models/report.py`."""

import json
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent


def records(task):
    """Return the results of a task by run, the larger files first."""
    found = [
        json.loads(path.read_text()) for path in sorted((HERE / "results").glob(f"{task}-*.json"))
    ]
    return {
        one["run"]: one["metrics"]
        for one in sorted(found, key=lambda one: -one["metrics"]["bytes"])
    }


def size(metrics):
    """Return method, bytes and ratio, as three cells."""
    ratio = metrics["dense_bytes"] / metrics["bytes"]
    return f"{metrics['method']['method']} | {metrics['bytes']:,} | {ratio:.2f}"


def gpt():
    """Return the table of GPT-2: perplexities of the test text and divergences from the original."""
    head = [
        "run",
        "method",
        "table, bytes",
        "times smaller",
        "original",
        "compressed",
        "tuned",
        "its 95 % interval",
    ]
    head += ["divergence, nats", "tuned", "same logits"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for run, metrics in records("gpt").items():
        test = metrics["test"]
        base, tuned = test["original"]["perplexity"], test["tuned"]
        each = (
            f"{one['perplexity']:.2f} ({one['perplexity'] / base - 1:+.2%})"
            for one in (test["compressed"], tuned)
        )
        spans = f"{tuned['perplexity_low']:.1f} to {tuned['perplexity_high']:.1f}"
        apart = [
            f"{one['divergence']:.5f} ± {one['divergence_error']:.5f}"
            for one in (test["compressed"], tuned)
        ]
        lines.append(
            f"| {run} | {size(metrics)} | "
            f"{base:.2f} | {' | '.join(each)} | {spans} | {' | '.join(apart)} | {'yes' if metrics['same_logits'] else 'NO'} |"
        )
    return lines


def minilm():
    """Return the table of MiniLM: how much similarities of sentence pairs change."""
    lines = [
        "| run | method | table, bytes | times smaller | mean change of cosine | most |",
        "|---|---|---|---|---|---|",
    ]
    for run, metrics in records("minilm").items():
        lines.append(
            f"| {run} | {size(metrics)} | "
            f"{metrics['mean_change']:.5f} ± {metrics['standard_error']:.5f} | {metrics['most']:.3f} |"
        )
    return lines


def drawn():
    """Draw the loss of perplexity against bytes, before and after tuning."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for run, metrics in records("gpt").items():
        test = metrics["test"]
        loss = [
            100 * (test[stage]["perplexity"] / test["original"]["perplexity"] - 1)
            for stage in ("compressed", "tuned")
        ]
        (line,) = axes.plot([metrics["bytes"] / 1000] * 2, loss, "o-", label=run)
        axes.plot(metrics["bytes"] / 1000, loss[0], "o", mfc="white", color=line.get_color())
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xlabel("KB of the table")
    axes.set_ylabel("perplexity, % above the original")
    axes.set_title("hollow: compressed, filled: tuned", fontsize=9)
    axes.legend()
    figure.tight_layout()
    figure.savefig(HERE / "gpt.svg", metadata={"Date": None})


def main():
    drawn()
    text = (HERE / "README.md").read_text()
    for name, lines in (("gpt", gpt()), ("minilm", minilm())):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    (HERE / "README.md").write_text(text)


if __name__ == "__main__":
    main()

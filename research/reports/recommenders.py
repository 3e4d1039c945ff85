"""Write README.md and the pictures beside this file from the result files: python experiments/recommenders/report.py"""

import json
import statistics
import textwrap
from collections import Counter, defaultdict
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from run import PLAIN, RESULTS, SLACK, flat, front, settings_file, trials_of

HERE = Path(__file__).parent
NAMES = {
    **{f"dense-{dim}": f"dense rows by gradients, d = {dim}" for dim in (2, 4, 8, 16)},
    "bayes": "dense rows in closed form, d = 2 to 16",
    "low-bit": "low-bit rows, trained as stored",
    "hash": "hashed rows",
    "quotient-remainder": "quotient-remainder",
    "low-rank": "low rank",
    "mixed": "mixed dimensions",
    "selected": "frequency selection",
    "dpq": "product codes (DPQ)",
    "sparse-cbow": "Sparse CBOW: l1 on the rows, subgradient",
    "slimming": "slimming: small weights of the rows pruned",
    "slimming-anchors": "slimming on 8 to 16 anchors",
    "ant": "ANT",
    "nbant": "NBANT",
    "online-nbant": "online NBANT, one pass",
    "ant-refit": "ANT with a budget and refit",
    "hot-tail": "hot rows, coded tail",
    "graded": "graded rows",
}


def runs_of(folder):
    """Return {(trial, kind): [line of each seed]} of the final runs, with method and settings in every line."""
    found = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        trial = path.stem.rpartition("-seed-")[0]
        for line in run["stored"]:
            own = {
                "method": run["method"],
                "settings": run["settings"],
                "seed": run["seed"],
                "trial": trial,
            }
            found[trial, line["kind"]].append(line | own)
    return found


def best_within(finals, budget, method, seeds):
    """Return the seeds of the method's best stored form within a budget (its mean bytes) by validation, or None."""
    most = SLACK * budget
    fitting = [
        lines
        for lines in finals.values()
        if lines[0]["method"] == method and len(lines) == seeds and mean(lines, "bytes") <= most
    ]
    return min(fitting, key=lambda lines: mean(lines, "validation")) if fitting else None


def mean(lines, what):
    return statistics.fmean(line[what] for line in lines)


def spread(lines, what):
    return statistics.stdev([line[what] for line in lines]) if len(lines) > 1 else 0.0


def shown(value):
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def budget_lines(finals, budget, seeds):
    """Yield the table of one budget, the best first."""
    found = {method: best_within(finals, budget, method, seeds) for method in NAMES}
    ranked = sorted(
        (lines for lines in found.values() if lines), key=lambda lines: mean(lines, "test")
    )
    yield "| method | test MSE | validation | bytes | parameters | stored as | settings |"
    yield "|---|---|---|---|---|---|---|"
    for lines in ranked:
        first = lines[0]
        settings = ", ".join(f"{key} {shown(value)}" for key, value in first["settings"].items())
        error = f"{mean(lines, 'test'):.4f} ± {spread(lines, 'test'):.4f}"
        size, count = mean(lines, "bytes"), mean(lines, "parameters")
        row = f"{error} | {mean(lines, 'validation'):.4f} | {size:,.0f} | {count:,.0f} | {first['kind']} | {settings}"
        yield f"| {NAMES[first['method']]} | {row} |"
    missing = [NAMES[method] for method, lines in found.items() if not lines]
    if missing:
        yield ""
        yield f"Nothing that small was found or run of: {'; '.join(missing)}."
    yield ""
    yield verdict(ranked)


def verdict(ranked):
    """Say who has the lowest error, and how it compares with the best plain rows."""
    if not ranked:
        return "No final runs yet."
    winner = ranked[0]
    plain = next((lines for lines in ranked if lines[0]["method"] in PLAIN), None)
    text = f"Lowest error here: **{NAMES[winner[0]['method']]}**, {mean(winner, 'test'):.4f}."
    if plain is None or plain is winner:
        return text
    less = mean(plain, "test") - mean(winner, "test")
    return f"{text} The best plain rows ({NAMES[plain[0]['method']]}) have {mean(plain, 'test'):.4f}, {less:.4f} more."


def picture(trials, finals, size, path, label):
    """Draw all stored forms of the search in grey, their front, and the test errors of the final runs."""
    mpl.rcParams["svg.hashsalt"] = "featherbed"
    figure, axes = plt.subplots(figsize=(11, 5.5))
    lines = [line for line in flat(trials) if line[2]["validation"] < 1.0]
    axes.scatter(
        [line[2][size] for line in lines],
        [line[2]["validation"] for line in lines],
        s=5,
        color="0.8",
    )
    edge = front(lines, size)
    axes.step(
        [line[2][size] for line in edge],
        [line[2]["validation"] for line in edge],
        "k-",
        where="post",
        linewidth=0.8,
    )
    colours, shapes = mpl.colormaps["tab20"], "os^D"
    for number, (method, name) in enumerate(NAMES.items()):
        own = [runs for runs in finals.values() if runs[0]["method"] == method]
        if own:
            points = sorted((mean(runs, size), mean(runs, "test")) for runs in own)
            axes.plot(
                *zip(*points, strict=True),
                marker=shapes[number // 6],
                color=colours(number % 20),
                markersize=4,
                linewidth=0.7,
                label=name,
            )
    axes.set(
        xscale="log",
        xlabel=label,
        ylabel="MSE (grey and front: validation; coloured: test)",
        ylim=(0.68, 0.9),
    )
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def front_lines(trials, size):
    """Yield the front of the search."""
    yield f"| {size} | validation MSE | method | stored as |"
    yield "|---|---|---|---|"
    for _, method, line in front(list(flat(trials)), size):
        yield f"| {line[size]:,} | {line['validation']:.4f} | {NAMES[method]} | {line['kind']} |"


def paragraph(text):
    return textwrap.fill(
        " ".join(text.split()), 128, break_long_words=False, break_on_hyphens=False
    )


def introduction(settings, trials):
    yield f"""MovieLens-1M, random 80/10/10. Every method predicts mean + b_u + b_i + u . v with the biases in the first column
        of the rows, so that they are counted; bytes are those of both files without keys, headers included, and errors those of
        the rows as stored. The same for all: batches of {settings["batch"]:,}, at most {settings["epochs"]} epochs with a
        cosine schedule, stopping {settings["patience"]} epochs after the lowest validation error, up to {settings["trials"]}
        trials that optuna proposes from the spaces in [settings.toml](settings.toml). Ids are numbered by training counts. A
        trained model is stored in every precision its method allows (rows and weights with a scale for each column, anchors
        and projections float16)."""
    yield f"""Settings and precision are chosen on the validation part of seed {settings["search_seed"]}; what was chosen is
        trained on {len(settings["final_seeds"])} seeds, and each of these runs reads its test part once. Online NBANT sees
        every rating in one pass and stops by itself; closed-form and graded rows have no batches. Bytes are means
        over seeds and may be {SLACK - 1:.0%} above a budget: 4 and 8 columns of 4 bits, headers included, are just above 20 and
        40 KB, and the non-zeros of a penalty differ from seed to seed."""
    counts = Counter(found["method"] for found in trials.values())
    hours = sum(found["seconds"] for found in trials.values()) / 3600
    run = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
    yield f"""Trials run: {run} ({hours:.1f} hours of one thread of a busy machine). So few trials of short runs favour methods
        with few settings; `search --trials` goes on from here."""
    yield """What was changed on the way: AdamW's ranges were set after five runs of plain rows on validation; after two
        trials Yogi's learning rates and the penalties of ANT and NBANT got wider ranges, and the choices of DPQ were cut
        because its trials took minutes; four early trials of plain rows, which had one space for all widths, were replaced.
        The search of graded rows and the final runs used later code than the other trials. That bytes are means and may be
        5 % above was settled after the final runs had shown their test errors, since ANT's sizes vary with the seed: it adds
        and moves rows of the tables below the first, and changes no winner."""


def page(settings, trials, finals):
    yield "# Ways to a small recommender, side by side"
    for text in introduction(settings, trials):
        yield from ("", paragraph(text))
    for budget in settings["budgets"]:
        yield from ("", f"## Within {budget / 1000:g} KB", "")
        yield from budget_lines(finals, budget, len(settings["final_seeds"]))
    yield from ("", "## Fronts", "", "![bytes](bytes.svg)", "", "![parameters](parameters.svg)", "")
    yield paragraph("""Parameters are counted as the papers count them (a level of a low-bit row is one; codes are bits and no
        parameters, so that DPQ counts its code vectors alone): bytes are the fairer measure. The front of all stored forms of
        the search in bytes, by validation:""")
    yield from (
        "",
        *front_lines(trials, "bytes"),
        "",
        "In parameters:",
        "",
        *front_lines(trials, "parameters"),
    )
    yield from ("", "## Running it", "", "```text")
    yield "python experiments/recommenders/run.py search        # or: search ant dense --trials 20"
    yield from (
        "python experiments/recommenders/run.py final",
        "python experiments/recommenders/report.py",
        "```",
        "",
    )
    yield paragraph("""Trials and runs that have a result file under results/ are left alone, so that both commands go on where
        they were stopped.""")


def main():
    settings, trials, finals = settings_file(), trials_of(), runs_of(RESULTS / "final")
    picture(trials, finals, "bytes", HERE / "bytes.svg", "bytes of both files, without keys")
    picture(
        trials, finals, "parameters", HERE / "parameters.svg", "parameters, as the papers count"
    )
    (HERE / "README.md").write_text(
        "\n".join(page(settings, trials, finals)) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()

"""Draw signs for shared losses of factors that stand still: python experiments/sse/rademacher.py

Runs of rademacher.toml that have no result file are made; then rademacher.svg and rademacher.md are written from the results.
"""

import json
import math
import time
import tomllib
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import featherbed as fb
from featherbed.tasks import ratings
from featherbed.tasks.data import find_data, read_movielens
from featherbed.tasks.results import Result
from featherbed.theory.sharing import Factors, Transition, bias_term, rademacher_draws

HERE = Path(__file__).parent
QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}


def fitted(train, settings):
    """Return factors after some epochs of plain training (Adam, no sharing, no decay), and their error."""
    generator = torch.Generator().manual_seed(settings["seed"])
    tables = [
        fb.DenseTable(rows, settings["dim"], generator=generator)
        for rows in (train.num_users, train.num_items)
    ]
    with torch.no_grad():
        for table in tables:
            table.rows.normal_(std=settings["std"], generator=generator)
    mean = float(train.values.mean()) if settings["centred"] else 0.0
    model = ratings.MatrixFactorization(
        *tables, mean=mean, biases="apart" if settings["centred"] else "none"
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=settings["lr"])
    triples = ratings.to_tensors(train)
    for _ in range(settings["epochs"]):
        ratings.train_epoch(model, optimizer, triples, settings["batch"], generator)
    biases = (
        (model.user_bias.detach().numpy(), model.item_bias.detach().numpy())
        if settings["centred"]
        else None
    )
    factors = Factors(*(table.rows.detach().numpy() for table in tables), biases=biases, mean=mean)
    return factors, model


def run(name, settings, parts):
    begun = time.perf_counter()
    train, validation, _ = parts
    factors, model = fitted(train, settings)
    result = Result(name, settings, settings["seed"])
    for part, data in (("train", train), ("validation", validation)):
        result.metrics[part] = {"mse": ratings.mean_squared_error(model, data)}
    losses = np.empty((len(train), len(settings["probabilities"])))
    for column, p in enumerate(settings["probabilities"]):
        laws = Transition(train.num_users, p), Transition(train.num_items, p)
        losses[:, column] = factors.losses(train.users, train.items, train.values, *laws)
    values = rademacher_draws(
        losses, settings["draws"], generator=np.random.default_rng(settings["seed"])
    )
    for column, p in enumerate(settings["probabilities"]):
        of_p = losses[:, column]
        row = {"p": p, "mean": float(values[:, column].mean())}
        row |= {
            name: float(np.quantile(values[:, column], share)) for name, share in QUANTILES.items()
        }
        row["predicted"] = math.sqrt(2 / math.pi) * float(np.linalg.norm(of_p)) / len(of_p)
        row |= {"loss": float(of_p.mean()), "spread": float(of_p.std())}
        row["bias"] = bias_term(of_p, losses[:, 0]) / len(of_p)
        result.history.append(row)
    result.seconds = time.perf_counter() - begun
    return result


def picture(results):
    figure, axes = plt.subplots(1, len(results), figsize=(12, 3.2))
    keys = {"med": "median", "q1": "q25", "q3": "q75", "whislo": "q05", "whishi": "q95"}
    for axis, (name, result) in zip(axes, results.items(), strict=True):
        boxes = [{part: 1e3 * row[key] for part, key in keys.items()} for row in result["history"]]
        axis.bxp(boxes, showfliers=False)
        axis.plot(
            range(1, len(boxes) + 1),
            [1e3 * row["predicted"] for row in result["history"]],
            ".-",
            color="tab:blue",
        )
        axis.set_xticks(
            range(1, len(boxes) + 1),
            [f"{row['p']:g}" for row in result["history"]],
            fontsize=6,
            rotation=90,
        )
        axis.set(title=name, xlabel="SSE probability", ylim=(0, None))
    axes[0].set_ylabel("|Σ σ loss| / n, in thousandths")
    figure.tight_layout()
    figure.savefig(HERE / "rademacher.svg")


TEXT = """
MovieLens-1M, the training 80 % of a random split; d = {dim}, {draws:,} draws of signs, seed {seed}. SSE-SE with the same p on
users and items; the shared losses are exact, by the all-pairs sums (`featherbed.theory.Factors`). Medians over draws of
|Σ σ_i loss_i| / n, in thousandths; p = 0 is the plain Rademacher sample. In the picture boxes are quartiles, whiskers 5 % and
95 %, and blue is the mean by formula, sqrt(2/π) ‖loss‖ / n. Factors: *drawn* from N(0, 1) and not trained; a dot product
trained for 3 epochs (*brief*) and 20 (*trained*) with Adam, batches of 1,024, lr 0.005, from N(0, 0.01); the same, 20
epochs, with the global mean and *biases*.
"""

READING = """
The paper (Wu et al. 2019, figure 5) says that the values get smaller as p grows; it does not say for which factors. From
p = 0 to p = 0.5, by formula: {shares}. So it holds for factors that know nothing of the
ratings, and not for trained ones. Without a supremum a value is the length of the loss vector times a random number, and
length² / n = mean² + spread² of the losses. Sharing averages a loss over ids. Where no id is better than another this takes
spread away and leaves the mean: the values fall. Where ids have been fitted to their ratings it raises the mean by more than
it takes from the spread: the values rise, from p = 0.01 on. The rise of the mean is the bias term of theorem 2, B / n:
{bias} for *trained* at p = 0.01, 0.1 and 0.5. The figure says nothing of the supremum over factors, which is what
the theorem has.
"""


def lines(results):
    settings = next(iter(results.values()))["settings"]
    yield TEXT.strip().format(**settings)
    yield ""
    shown = [0.0, 0.01, 0.1, 0.3, 0.5, 1.0]
    yield (
        "| factors | train MSE | "
        + " | ".join(f"p = {p:g}" for p in shown)
        + " | mean loss, p = 0 to 1 | its spread |"
    )
    yield "|---" * (len(shown) + 4) + "|"
    rows = {name: {row["p"]: row for row in result["history"]} for name, result in results.items()}
    for name, result in results.items():
        cells = [f"{1e3 * rows[name][p]['median']:.3f}" for p in shown]
        cells += [
            f"{rows[name][0.0][key]:.2f} to {rows[name][1.0][key]:.2f}"
            for key in ("loss", "spread")
        ]
        yield f"| {name} | {result['metrics']['train']['mse']:.3f} | " + " | ".join(cells) + " |"
    yield ""
    yield "![draws of signs by SSE probability](rademacher.svg)"
    yield ""
    change = {
        name: rows[name][0.5]["predicted"] / rows[name][0.0]["predicted"] - 1 for name in results
    }
    shares = ", ".join(f"{name} {value:+.0%}" for name, value in change.items())
    bias = ", ".join(f"{rows['trained'][p]['bias']:.3f}" for p in (0.01, 0.1, 0.5))
    yield READING.strip().format(shares=shares, bias=bias)


def main():
    torch.set_num_threads(1)  # batches of a thousand small rows gain nothing by a second thread
    file = tomllib.loads((HERE / "rademacher.toml").read_text())
    common = {key: value for key, value in file.items() if not isinstance(value, dict)}
    data, results = None, {}
    for name, own in file["runs"].items():
        target = HERE / "results" / f"rademacher-{name}.json"
        if not target.exists():
            data = data or read_movielens(find_data(file["data"])).split(file["seed"])
            result = run(target.stem, {**common, **file["defaults"], **own}, data)
            result.write(target)
            print(f"{target.stem}: {result.seconds:.0f} s", flush=True)
        results[name] = json.loads(target.read_text())
    picture(results)
    (HERE / "rademacher.md").write_text("\n".join(lines(results)) + "\n")


if __name__ == "__main__":
    main()

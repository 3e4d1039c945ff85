"""Run the runs of a settings file, one result file for each: python experiments/ant/run.py planted.toml [run ...]

Runs that have a result file are left alone.
"""

import math
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import torch

import featherbed as fb
from featherbed.tasks import ratings
from featherbed.tasks.checkpoints import Checkpoints
from featherbed.tasks.data import find_data, read_movielens
from featherbed.tasks.online import train_online
from featherbed.tasks.results import Result
from featherbed.theory import nbant_objective

HERE = Path(__file__).parent


class Planted:
    """Rows that are a few planted anchors each, seen with noise."""

    def __init__(self, settings):
        self.generator = torch.Generator().manual_seed(settings["seed"])
        rows, dim, planted = settings["rows"], settings["dim"], settings["planted"]
        self.atoms = torch.randn(planted, dim, generator=self.generator)
        transform = torch.zeros(rows, planted)
        places = (
            torch.rand(rows, planted, generator=self.generator)
            .topk(settings["weights"], dim=1)
            .indices
        )
        transform.scatter_(1, places, torch.rand(places.shape, generator=self.generator) + 0.5)
        self.rows, self.nonzeros = transform @ self.atoms, int(torch.count_nonzero(transform))
        self.spread = settings["noise"] * float(self.rows.std())
        self.held_out = torch.randperm(rows, generator=self.generator)[: rows // 4]
        self.held_out_rows = self.seen(self.held_out)

    def seen(self, ids):
        return self.rows[ids] + self.spread * torch.randn(
            len(ids), self.rows.shape[1], generator=self.generator
        )

    def loss(self, table, ids, rows):
        return (table(ids) - rows).square().sum(1).mean()

    @torch.no_grad()
    def validation(self, table):
        table.eval()
        value = float(self.loss(table, self.held_out, self.held_out_rows))
        table.train()
        return value

    @torch.no_grad()
    def error(self, table):
        return float((table.weight - self.rows).norm() / self.rows.norm())


def run_planted(name, settings, _checkpoints):
    torch.set_num_threads(1)
    data = Planted(settings)
    generator = torch.Generator().manual_seed(settings["seed"])
    init = fb.HalfNormal(settings["start"])
    shape = (settings["rows"], settings["dim"])
    most = max(100, settings["anchors"])
    table = fb.GrowingAnchorTable(
        *shape,
        anchors=settings["anchors"],
        max_anchors=most,
        init=init,
        generator=generator,
        sparse=True,
    )
    penalties = {table.transform: fb.NonNegativeL1(settings["lam"])}
    optimizer = fb.Yogi(table.parameters(), settings["lr"], penalties=penalties)
    steps = settings["epochs"] * math.ceil(settings["rows"] / settings["batch"])
    budget = (
        fb.Budget(penalties, settings["nonzeros"], steps=steps) if "nonzeros" in settings else None
    )
    prices = {key: settings[key] for key in ("lambda1", "lambda2") if key in settings}
    own = {key: settings[key] for key in ("rule", "restarts") if key in settings}
    growth = (
        fb.Growth(table, optimizer, **prices, **own, generator=generator)
        if settings["grows"]
        else None
    )
    flat = settings.get("flat", 0.0)

    def lr_at(epoch):
        return 0.5 + 0.5 * math.cos(
            math.pi * max(0.0, (epoch / settings["epochs"] - flat) / (1 - flat))
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_at)
    result = Result(name, settings, settings["seed"])
    best, begun = math.inf, time.perf_counter()
    for epoch in range(settings["epochs"]):
        if "refit" in settings and epoch == int(settings["refit"] * settings["epochs"]):
            for parameter, penalty in penalties.items():
                penalty.freeze(parameter)
        for ids in torch.split(
            torch.randperm(settings["rows"], generator=generator), settings["batch"]
        ):
            optimizer.zero_grad()
            data.loss(table, ids, data.seen(ids)).backward()
            optimizer.step()
            if budget is not None:
                budget.step()
        schedule.step()
        if growth is not None:
            growth.step(lambda: data.validation(table))
        loss, nonzeros = data.validation(table), int(torch.count_nonzero(table.transform))
        row = {
            "epoch": epoch,
            "loss": loss,
            "nonzeros": nonzeros,
            "anchors": table.anchor_count,
            "error": data.error(table),
        }
        if prices:
            row["objective"] = nbant_objective(loss, nonzeros, table.anchor_count, **prices)
        if epoch % 10 == 0:
            print(name, row, flush=True)
        result.history.append(row)
        if (
            row.get("objective", -epoch) < best
        ):  # the lowest objective where there is one, otherwise the last epoch
            best, result.metrics["validation"] = (
                row.get("objective", -epoch),
                row | {"planted_nonzeros": data.nonzeros},
            )
    result.seconds = time.perf_counter() - begun
    return result


def run_ratings(name, settings, checkpoints):
    data = read_movielens(find_data(settings["data"]))
    train, validation, test = data.split(settings["seed"])
    torch.set_num_threads(1)  # batches of a thousand small rows gain nothing by a second thread
    generator = torch.Generator().manual_seed(settings["seed"])
    kind = fb.GrowingAnchorTable if settings["grows"] else fb.AnchorTable
    same = {
        "anchors": settings["anchors"],
        "init": fb.HalfNormal(settings["start"]),
        "generator": generator,
    }
    users, items = (kind(n, settings["dim"], **same) for n in (data.num_users, data.num_items))
    model = ratings.MatrixFactorization(
        users, items, mean=float(train.values.mean()), biases="apart"
    )
    penalties = {table.transform: fb.NonNegativeL1(settings["lam"]) for table in (users, items)}
    optimizer = fb.Yogi(model.parameters(), settings["lr"], penalties=penalties)
    steps = settings["epochs"] * math.ceil(len(train) / settings["batch"])
    schedulers = []
    if settings.get("schedule") == "cosine":
        schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps))
    if "nonzeros" in settings:
        own = {key: settings[key] for key in ("how", "warmup", "until") if key in settings}
        schedulers.append(fb.Budget(penalties, settings["nonzeros"], steps=steps, **own))
    prices = {key: settings[key] for key in ("lambda1", "lambda2") if key in settings}
    growth = fb.Growth([users, items], optimizer, **prices) if settings["grows"] else None
    loop = {key: settings[key] for key in ("epochs", "batch", "seed")}
    loop |= {
        "schedulers": schedulers,
        "growth": growth,
        "patience": settings["epochs"],
        "checkpoints": checkpoints,
    }
    result = ratings.train(
        model, optimizer, train, validation, settings=settings, name=name, **loop
    )
    nonzeros = sum(int(torch.count_nonzero(table.transform)) for table in (users, items))
    result.metrics["validation"] |= {
        "nonzeros": nonzeros,
        "anchors": [len(users.atoms), len(items.atoms)],
    }
    result.metrics["test"] = {"mse": ratings.mean_squared_error(model, test)}
    return result


def run_online(name, settings, _checkpoints):
    """One pass over the ratings as a shuffled stream: each batch is trained until learnt, then gone; nobody is known."""
    data = read_movielens(find_data(settings["data"]))
    train, validation, test = data.split(settings["seed"])
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(settings["seed"])
    same = {
        "anchors": settings["anchors"],
        "init": fb.HalfNormal(settings["start"]),
        "generator": generator,
    }
    users, items = (fb.GrowingAnchorTable(1, settings["dim"], **same) for _ in range(2))
    model = ratings.MatrixFactorization(users, items, mean=3.5, biases="apart")
    penalties = {table.transform: fb.NonNegativeL1(settings["lam"]) for table in (users, items)}
    optimizer = fb.Yogi(model.parameters(), settings["lr"], penalties=penalties)
    growth = fb.Growth(
        [users, items], optimizer, lambda1=settings["lambda1"], lambda2=settings["lambda2"]
    )
    known = (
        fb.Arrivals([users, model.user_bias], optimizer),
        fb.Arrivals([items, model.item_bias], optimizer),
    )

    def loss(batch, rows):
        ids = (rows(arrivals)(keys) for arrivals, keys in zip(known, batch, strict=False))
        return torch.nn.functional.mse_loss(model(*ids), torch.from_numpy(batch[2]))

    def evaluated(batch):
        model.eval()
        value = loss(batch, lambda arrivals: arrivals.ids)
        model.train()
        return value

    order = np.random.default_rng(settings["seed"]).permutation(len(train))
    parts = np.array_split(order, math.ceil(len(train) / settings["batch"]))
    stream = ((train.users[part], train.items[part], train.values[part]) for part in parts)
    result, begun = Result(name, settings, settings["seed"]), time.perf_counter()
    own = {key: settings[key] for key in ("steps", "every", "ahead")}
    for row in train_online(
        stream, lambda b: loss(b, lambda a: a.admit), evaluated, optimizer, growth=growth, **own
    ):
        result.history.append(row | {"users": len(known[0]), "items": len(known[1])})
        if row["batch"] % 50 == 0:
            print(name, result.history[-1], flush=True)
    result.seconds = time.perf_counter() - begun
    for which, part in (("validation", validation), ("test", test)):
        with torch.no_grad():
            result.metrics[which] = {"mse": float(evaluated((part.users, part.items, part.values)))}
    before = [row["before"] for row in result.history]
    result.metrics["validation"] |= {
        "nonzeros": growth.nonzeros(),
        "anchors": [len(users.atoms), len(items.atoms)],
        "before": float(np.mean(before)),
        "before_last_tenth": float(np.mean(before[-len(before) // 10 :])),
    }
    return result


def runs_of(file):
    common = {key: value for key, value in file.items() if not isinstance(value, dict)}
    for name, own in file["runs"].items():
        yield name, {**common, **file["defaults"], **own, "grows": "lambda1" in own}
    grid = dict(file.get("grid", {}))
    for anchors in grid.pop("anchors", []):
        yield (
            f"{grid['name']}-{anchors}",
            {**common, **file["defaults"], **grid, "anchors": anchors, "grows": False},
        )


def main():
    path = HERE / sys.argv[1]
    file = tomllib.loads(path.read_text())
    for name, settings in runs_of(file):
        target = HERE / "results" / f"{path.stem}-{name}.json"
        if target.exists() or (len(sys.argv) > 2 and name not in sys.argv[2:]):
            continue
        run = {"planted": run_planted, "ratings": run_ratings, "online": run_online}[
            settings["task"]
        ]
        result = run(target.stem, settings, Checkpoints(HERE / "runs" / target.stem))
        if result.interrupted:
            print(f"{target.stem}: interrupted; run again to go on")
            return
        result.write(target)
        print(f"{target.stem}: {result.metrics}, {result.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""The competitors: each is a function of its settings that learns from the training part and returns its tables as stored.

All of them predict mean + U[u]_0 + V[i]_0 + sum over k >= 1 of U[u]_k V[i]_k; what differs is what the rows are made of. Errors
are those of the rows as they come out of the packed tables, sizes the bytes of both files without keys.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch

import featherbed as fb
from featherbed.apps.recommender import model as ratings
from featherbed.apps.recommender.online import train_online
from featherbed.tables.spec import table_from_dense
from research.runners.storing import Stored, in_all_kinds

SPREAD = 0.1  # of the rows tables start near
DIM = 16
ROUNDS = 30  # of fit_posterior Bayes, at most


# learning


def learn(
    task,
    users,
    items,
    *,
    lr,
    decay=0.0,
    penalties=None,
    nonzeros=None,
    prices=None,
    lasso=None,
    share=1.0,
):
    """Train two tables: by AdamW, or by Yogi where weights are penalised; cosine schedule; the best validation epoch stays.

    ``nonzeros``: ``fb.Budget``; ``prices``: NBANT; ``lasso``: (lam, parameters) of an l1 term by its subgradient.
    """
    model = ratings.MatrixFactorization(users, items, mean=task.mean, biases="column")
    epochs = max(1, round(share * task.epochs))
    steps = epochs * math.ceil(len(task.train) / task.batch)
    if penalties is None and lasso is None:
        optimizer = fb.AdamW(model.parameters(), lr, weight_decay=decay)
    else:
        optimizer = fb.Yogi(model.parameters(), lr, penalties=penalties)
    if lasso is not None:
        optimizer.register_step_pre_hook(partial(add_subgradient, *lasso))
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)]
    budget = None if nonzeros is None else fb.Budget(penalties, nonzeros, steps=steps)
    growth = (
        None
        if prices is None
        else fb.Growth([users, items], optimizer, generator=task.generator, **prices)
    )
    loop = {
        "epochs": epochs,
        "batch": task.batch,
        "patience": task.patience,
        "seed": task.seed,
        "progress": False,
    }
    schedulers += [] if budget is None else [budget]
    ratings.fit_model(
        model, optimizer, task.train, task.validation, schedulers=schedulers, growth=growth, **loop
    )
    if budget is not None:
        budget.finish()
    model.eval()
    return users, items


def add_subgradient(lam, parameters, *_):
    for parameter in parameters:
        parameter.grad.add_(parameter.detach().sign(), alpha=lam)


def started(task, spec, dim=DIM):
    """Make both tables of a spec (or of one for each side) near short random rows."""
    specs, generator, tables = [spec] * 2 if isinstance(spec, str) else spec, task.generator, []
    for one, rows, counts in zip(specs, task.shape, task.counts, strict=True):
        extra = {"counts": counts} if one.startswith(("mixed", "selected", "banded")) else {}
        tables.append(
            table_from_dense(one, SPREAD * torch.randn(rows, dim, generator=generator), **extra)
        )
    return tables


def by_gradients(task, spec, settings, dim=DIM, kinds=None):
    users, items = learn(
        task, *started(task, spec, dim), lr=settings["lr"], decay=settings["decay"]
    )
    return in_all_kinds(task, users, items, kinds)


def anchored(task, users, items, kind=fb.AnchorTable):
    """Make tables of so many anchors, and their penalties of weight ``lam``."""
    same = {"init": fb.HalfNormal(SPREAD), "generator": task.generator}
    return [
        kind(rows, DIM, anchors=count, **same)
        for rows, count in zip(task.shape, (users, items), strict=True)
    ]


def penalised(tables, lam):
    return {table.transform: fb.NonNegativeL1(lam) for table in tables}


# methods


def dense(dim, task, settings):
    return by_gradients(task, "dense", settings, dim)


def bayes(task, settings):
    """Variational Bayes in closed form; stops by validation as the others do; turned to its main axes before it is rounded."""
    from featherbed.apps.recommender.graded import balance, fit_posterior

    found = fit_posterior(
        task.train, settings["dim"], iterations=ROUNDS, validation=task.validation, seed=task.seed
    )
    found = balance(found, *(counts.numpy() for counts in task.counts))
    tables = (
        fb.DenseTable.from_dense(torch.from_numpy(rows.astype(np.float32)))
        for rows in (found.users, found.items)
    )
    return [replace(stored, mean=float(found.mean)) for stored in in_all_kinds(task, *tables)]


def low_bit(task, settings):
    """Half of the epochs for the rows, the other half for their levels and scales."""
    own = {"lr": settings["lr"], "decay": settings["decay"]}
    rough = learn(task, *started(task, "dense", settings["dim"]), share=0.5, **own)
    as_stored = {"bits": settings["bits"], "scales": "column"}
    tables = [fb.QuantizedTable.from_dense(table.weight.detach(), **as_stored) for table in rough]
    users, items = learn(task, *tables, share=0.5, lr=settings["lr"] / 3, decay=settings["decay"])
    return in_all_kinds(task, users, items, kinds=(f"int{settings['bits']}",))


def hashed(task, settings):
    specs = [
        f"hashed:buckets={round(settings['share'] * rows)},hashes={settings['hashes']},values={settings['values']}"
        for rows in task.shape
    ]
    return by_gradients(task, specs, settings, settings["dim"])


def quotient_remainder(task, settings):
    spec = f"remainder:divisor={settings['divisor']},combine={settings['combine']}"
    return by_gradients(task, spec, settings, settings["dim"])


def low_rank(task, settings):
    return by_gradients(task, f"lowrank:rank={settings['rank']}", settings)


def mixed(task, settings):
    dims = settings["dims"].replace(" ", ",")
    return by_gradients(task, f"mixed:dims=[{dims}]", settings, max(map(int, dims.split(","))))


def selected(task, settings):
    shares = settings["users"], settings["items"]
    keeps = (max(1, round(share * rows)) for share, rows in zip(shares, task.shape, strict=True))
    return by_gradients(
        task,
        [f"selected:keep={keep},rest={settings['rest']}" for keep in keeps],
        settings,
        settings["dim"],
    )


def dpq(task, settings):
    spec = f"product:choices={settings['choices']},parts={settings['parts']}"
    return by_gradients(task, spec, settings, kinds=("float32", "float16", "int8"))


def sparse_rows(matrix):
    """Rows that are mostly zero, stored as weights over unit vectors."""
    table = fb.AnchorTable(*matrix.shape, anchors=matrix.shape[1], nonnegative=False)
    with torch.no_grad():
        table.transform.copy_(matrix)
        table.atoms.copy_(torch.eye(matrix.shape[1]))
    return table


def stored_sparse(task, tables):
    rows = [table.weight.detach() for table in tables]
    return in_all_kinds(
        task,
        *map(sparse_rows, rows),
        parameters=sum(int(torch.count_nonzero(part)) for part in rows),
    )


def sparse_cbow(task, settings):
    """Rows with an l1 term by its subgradient, which reaches no exact zeros; what is below the threshold is set to zero."""
    tables = started(task, "dense")
    learn(
        task,
        *tables,
        lr=settings["lr"],
        lasso=(settings["lam"], [table.weight for table in tables]),
    )
    with torch.no_grad():
        for table in tables:
            table.weight.mul_(table.weight.abs() >= settings["threshold"])
    return stored_sparse(task, tables)


def slimmed(task, tables, settings, parameters, penalty):
    """An l1 term by its subgradient, then the largest entries stay and are trained on."""
    learn(task, *tables, lr=settings["lr"], share=0.6, lasso=(settings["lam"], parameters))
    sizes = torch.cat([parameter.detach().abs().flatten() for parameter in parameters])
    least = sizes.topk(min(settings["nonzeros"], len(sizes))).values[-1]
    penalties = {parameter: penalty(0.0) for parameter in parameters}
    for parameter, one in penalties.items():
        one.keep(parameter, parameter.detach().abs() >= least)
    learn(task, *tables, lr=settings["lr"] / 3, share=0.4, penalties=penalties)
    return tables


def slimming(task, settings):
    tables = started(task, "dense")
    return stored_sparse(
        task, slimmed(task, tables, settings, [table.weight for table in tables], fb.L1)
    )


def slimming_anchors(task, settings):
    tables = anchored(task, settings["anchors"], settings["anchors"])
    return in_all_kinds(
        task, *slimmed(task, tables, settings, [table.transform for table in tables], fb.L1)
    )


def ant(task, settings):
    tables = anchored(task, settings["users"], settings["items"])
    return in_all_kinds(
        task, *learn(task, *tables, lr=settings["lr"], penalties=penalised(tables, settings["lam"]))
    )


def ant_refit(task, settings):
    tables = anchored(task, settings["anchors"], settings["anchors"])
    own = {"lr": settings["lr"], "nonzeros": settings["nonzeros"]}
    return in_all_kinds(
        task, *learn(task, *tables, penalties=penalised(tables, settings["lam"]), **own)
    )


def nbant(task, settings):
    tables = anchored(task, settings["anchors"], settings["anchors"], fb.GrowingAnchorTable)
    own = {"lr": settings["lr"], "prices": {key: settings[key] for key in ("lambda1", "lambda2")}}
    return in_all_kinds(
        task, *learn(task, *tables, penalties=penalised(tables, settings["lam"]), **own)
    )


def online_nbant(task, settings):
    """One pass over a shuffled stream; users and items get rows when they come."""
    same = {
        "anchors": settings["anchors"],
        "init": fb.HalfNormal(SPREAD),
        "generator": task.generator,
    }
    tables = [fb.GrowingAnchorTable(1, DIM, **same) for _ in range(2)]
    model = ratings.MatrixFactorization(*tables, mean=task.mean, biases="column")
    optimizer = fb.Yogi(
        model.parameters(), settings["lr"], penalties=penalised(tables, settings["lam"])
    )
    prices = {key: settings[key] for key in ("lambda1", "lambda2")}
    growth = fb.Growth(tables, optimizer, generator=task.generator, **prices)
    known = [fb.Arrivals([table], optimizer) for table in tables]

    def loss(batch, training):
        model.train(training)
        ids = (
            (one.admit if training else one.ids)(keys)
            for one, keys in zip(known, batch, strict=False)
        )
        return torch.nn.functional.mse_loss(model(*ids), torch.from_numpy(batch[2]))

    train = task.train
    order = np.random.default_rng(task.seed).permutation(len(train))
    parts = np.array_split(order, math.ceil(len(train) / task.batch))
    stream = ((train.users[part], train.items[part], train.values[part]) for part in parts)
    for _ in train_online(
        stream,
        lambda b: loss(b, True),
        lambda b: loss(b, False),
        optimizer,
        growth=growth,
        steps=settings["steps"],
    ):
        pass
    ordered = [
        in_order(table, one, rows)
        for table, one, rows in zip(tables, known, task.shape, strict=True)
    ]
    return in_all_kinds(task, *ordered)


def in_order(table, known, rows):
    """Return the arrived rows in the order of ids; ids that never came have the row of unseen ids."""
    ids = known.ids(np.arange(rows))
    found = fb.AnchorTable(rows, DIM, anchors=len(table.atoms))
    with torch.no_grad():
        found.transform.copy_(table.transform[ids])
        found.atoms.copy_(table.atoms)
    return found


def hot_tail(task, settings):
    name, *numbers = settings["tail"].split()
    inner = {
        "quantized": "bits={0},scales=column",
        "lowrank": "rank={0}",
        "product": "choices={0},parts={1}",
    }
    tail = f"{name}:{inner.get(name, 'anchors={0}').format(*numbers)}"
    specs = [
        f"banded:hot={max(1, round(settings['hot'] * rows))},tail='{tail}'" for rows in task.shape
    ]
    return by_gradients(task, specs, settings, settings["dim"])


def graded(task, settings):
    from featherbed.apps.recommender.graded import fit_graded

    budget, dim = settings["budget"], settings["dim"]
    users, items, mean, _ = fit_graded(
        task.train, task.validation, dim=dim, budget=budget, seed=task.seed
    )
    return [Stored("graded", users, items, float(mean), dim * sum(task.shape))]


METHODS = {
    **{f"dense-{dim}": partial(dense, dim) for dim in (2, 4, 8, 16)},
    "bayes": bayes,
    "low-bit": low_bit,
    "hash": hashed,
    "quotient-remainder": quotient_remainder,
    "low-rank": low_rank,
    "mixed": mixed,
    "selected": selected,
    "dpq": dpq,
    "sparse-cbow": sparse_cbow,
    "slimming": slimming,
    "slimming-anchors": slimming_anchors,
    "ant": ant,
    "nbant": nbant,
    "online-nbant": online_nbant,
    "ant-refit": ant_refit,
    "hot-tail": hot_tail,
    "graded": graded,
}

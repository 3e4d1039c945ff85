"""Checkpoints of divided models, readable by any number of processes and by the plain model."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from featherbed.errors import DataError, FeatherbedError, MissingFileError
from featherbed.optim.processes import group_of, raise_together
from featherbed.optim.row_optimizer import RowOptimizer, kept_for, owners, penalties_of

Entries = dict[str, Any]


def save_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write model and optimizer to a folder (torch.distributed.checkpoint), from all processes.

    Names and shapes are those of the model before ``fb.distributed.shard``: another number of
    processes, or the plain model in one process, reads it by ``load_checkpoint``. ``extra`` are
    plain values, such as the step. An interrupted call leaves the former checkpoint.

    >>> import tempfile, featherbed as fb
    >>> table, other = (fb.AnchorTable(100, 8, anchors=4) for _ in range(2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(table, f"{folder}/step-7", extra={"step": 7})
    ...     load_checkpoint(other, f"{folder}/step-7")
    {'step': 7}
    >>> torch.equal(table.transform, other.transform)
    True
    """
    group, path = group_of(model.parameters()), Path(path)
    draft = path.with_name(path.name + ".draft")
    entries = model_entries(model) | optimizer_entries(model, optimizer)
    entries["extra"] = json.dumps(extra or {})
    _alone(group, lambda: shutil.rmtree(draft, ignore_errors=True))
    with _one_line(f"{draft} cannot be written"):
        save(entries, checkpoint_id=draft, process_group=group, no_dist=group is None)

    def replace() -> None:
        shutil.rmtree(path, ignore_errors=True)
        draft.rename(path)

    _alone(group, replace)


def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into model and optimizer, in all processes; return the plain values of it.

    It may come from another number of processes, or from the plain model. A checkpoint of another
    model is an error before anything changes.
    """
    group, path = group_of(model.parameters()), Path(path)
    entries = model_entries(model) | optimizer_entries(model, optimizer)
    error: FeatherbedError | None = None
    try:
        _check(path, entries, optimizer is not None)
    except FeatherbedError as found:
        error = found
    raise_together(error, group)
    for owner in owners(optimizer):
        if isinstance(owner, RowOptimizer):
            for parameter in model.parameters():
                owner.forget(parameter)
    entries["extra"] = ""
    with _one_line(f"{path} is damaged, and parts of it were read: resume from another checkpoint"):
        load(entries, checkpoint_id=path, process_group=group, no_dist=group is None)
    _set_plain(model, optimizer, entries)
    found_extra: dict[str, Any] = json.loads(entries["extra"])
    return found_extra


@contextmanager
def _one_line(message: str) -> Iterator[None]:
    """Turn the error that torch raises in all processes into one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        try:
            yield
        except CheckpointException as error:  # no Exception: nobody else would catch it
            cause = next(iter(error.failures.values()))[0]
            shown = f"{type(cause).__name__} {cause}".strip().partition("\n")[0]
            raise DataError(f"{message} ({shown[:200]})") from None


def _alone(group: Any, action: Any) -> None:
    """Do something in the first process while the others wait; all have its error."""
    error: FeatherbedError | None = None
    if group is None or torch.distributed.get_rank(group) == 0:
        try:
            action()
        except OSError as found:
            error = DataError(f"the checkpoint cannot be written: {found}")
    raise_together(error, group)


def _check(path: Path, entries: Entries, resumed: bool) -> None:
    """Raise an error if a folder is no checkpoint of this model."""
    if not (path / ".metadata").exists():
        raise MissingFileError(f"{path} is no checkpoint: give the folder that was saved")
    try:
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:
        raise DataError(f"{path} is damaged: its .metadata cannot be read") from error
    for name, value in entries.items():
        if name not in stored:
            raise DataError(f"{path} is the checkpoint of another model: it has no {name}")
        size = getattr(stored[name], "size", None)
        shape = value.size() if hasattr(value, "size") else None
        if size is not None and shape is not None and tuple(size) != tuple(shape):
            raise DataError(
                f"{path} is the checkpoint of another model: {name} has shape {tuple(size)} there, "
                f"{tuple(shape)} here"
            )
    left = [name for name in stored if name.startswith("optimizer.") and name not in entries]
    if resumed and left:
        raise DataError(
            f"{path} has {left[0]}, which this optimizer would not read: give one of the same kind "
            "(those of torch.optim have their state after a first step), or none"
        )


def plain_name(name: str) -> str:
    """Return the name of a parameter before the model was divided.

    >>> plain_name("module.tower.items.rows.embeddings.rows_tower_items.transform")
    'tower.items.transform'
    """
    for inside in (".rows.embeddings.", ".rows.embedding_bags."):
        head, found, tail = name.partition(inside)
        if found:
            name = f"{head}.{tail.partition('.')[2]}"
    return name.removeprefix("module.")


def model_entries(model: nn.Module) -> Entries:
    """Return the tensors of a model by their plain names; those of divided rows as parts."""
    return {f"model.{plain_name(name)}": value for name, value in model.state_dict().items()}


def places(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """Yield the plain name of every parameter, the parameter, and the shard whose rows it has."""
    shards = {}
    for module in model.modules():
        for shard in getattr(module, "shards", {}).values():
            if shard.table is not None and shard.divided:
                own = shard.table
                for name in own.row_tensors:
                    if name in own._parameters:
                        shards[id(own._parameters[name])] = shard
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter, shards.get(id(parameter))


def optimizer_entries(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Entries:
    """Return the optimizer's state tensors and penalties by the plain names of parameters."""
    if optimizer is None:
        return {}
    penalties, found = penalties_of(optimizer), {}
    prepare(optimizer)
    for name, parameter, shard in places(model):
        state = kept_for(parameter, optimizer)
        penalty = penalties.get(parameter)
        if penalty is not None:
            kept = penalty.kept
            state["kept"] = torch.ones_like(parameter, dtype=torch.bool) if kept is None else kept
        for key, value in state.items():
            entry = f"optimizer.{name}.{key}"
            found[entry] = divided(value, shard)
        for owner in owners(optimizer):
            step = owner.state.get(parameter, {}).get("step")
            if step is not None:
                found[f"optimizer.{name}.step"] = torch.as_tensor(step).clone()
        if penalty is not None:
            found[f"optimizer.{name}.lam"] = torch.tensor(penalty.lam, dtype=torch.float64)
    return found


def prepare(optimizer: torch.optim.Optimizer) -> None:
    """Settle all rows and create the state of parameters that have not been stepped yet."""
    for owner in owners(optimizer):
        if isinstance(owner, RowOptimizer):
            owner.settle()
            for group in owner.param_groups:
                for parameter in group["params"]:
                    owner._state_of(parameter, group)


def divided(value: Tensor, shard: Any) -> Any:
    """Return a tensor, or the part of one that all processes hold."""
    value = value.contiguous()  # those of an optimizer are strided: the state of a row is adjacent
    if shard is None:
        return value
    from featherbed.interop.torchrec.collections import sharded_tensor

    return sharded_tensor(value, shard)


def _set_plain(model: nn.Module, optimizer: torch.optim.Optimizer | None, entries: Entries) -> None:
    """Copy what ``load`` could not read in place: step numbers, penalties, parts that are
    strided."""
    if optimizer is None:
        return
    penalties = penalties_of(optimizer)
    for name, parameter, _ in places(model):
        penalty = penalties.get(parameter)
        for key, value in kept_for(parameter, optimizer).items():
            value.copy_(local_rows(entries[f"optimizer.{name}.{key}"]))
        for owner in owners(optimizer):
            state, step = owner.state.get(parameter, {}), entries.get(f"optimizer.{name}.step")
            if step is not None and "step" in state:
                kind = state["step"]
                state["step"] = step if isinstance(kind, Tensor) else int(step)
        if penalty is not None:
            kept = entries[f"optimizer.{name}.kept"]
            kept = local_rows(kept)
            penalty.keep(parameter, None if bool(kept.all()) else kept)
            penalty.lam = float(entries[f"optimizer.{name}.lam"])
    for owner in owners(optimizer):
        if isinstance(owner, RowOptimizer):
            owner._bind_all()


def local_rows(value: Any) -> Tensor:
    """Return the rows of this process of a tensor that may be divided."""
    if isinstance(value, Tensor) and not hasattr(value, "local_shards"):
        return value
    parts = value.local_shards()
    found: Tensor = parts[0].tensor if parts else value.new_zeros(0, *value.size()[1:])
    return found

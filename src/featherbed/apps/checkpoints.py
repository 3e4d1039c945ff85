"""Checkpoints: model, optimizer, step and generator states in one file, written atomically."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featherbed.apps.results import write_json
from featherbed.errors import ArgumentError, DataError
from featherbed.packed.writing import replacing

CHECKPOINTS, RUN = "checkpoints", "run.json"


class Checkpoints:
    """A folder of checkpoints ``step-00000012.pt``; the newest ``keep`` stay.

    >>> checkpoints = Checkpoints(getfixture("tmp_path") / "run")
    >>> model = nn.Linear(2, 1)
    >>> checkpoints.save(12, model=model)
    >>> checkpoints.latest()
    12
    >>> checkpoints.restore(model=model)["step"]
    12
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise ArgumentError(f"keep={keep}: keep at least one checkpoint")
        self.folder, self.keep = Path(folder), keep

    def stage(self, name: str) -> Checkpoints:
        """Return the checkpoints of one stage of training, in a subfolder."""
        return Checkpoints(self.folder / name, self.keep)

    def _steps(self) -> list[int]:
        return sorted(
            int(path.stem.removeprefix("step-")) for path in self.folder.glob("step-*.pt")
        )

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def latest(self) -> int | None:
        """Return the newest step saved, or None."""
        steps = self._steps()
        return steps[-1] if steps else None

    def clear(self) -> None:
        """Remove all checkpoints, including those of stages, and the folder if it is empty then."""
        for step in self._steps():
            self._path(step).unlink(missing_ok=True)
        for stage in self.folder.glob("*/"):
            Checkpoints(stage).clear()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        generators: dict[str, torch.Generator] | None = None,
        **extra: Any,
    ) -> None:
        """Write the state after ``step`` steps; ``extra`` takes plain values and tensors."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "step": step,
            "model": model.state_dict(),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "generators": {
                name: generator.get_state() for name, generator in (generators or {}).items()
            },
            "default_generator": torch.get_rng_state(),
            "extra": extra,
        }
        with replacing(self._path(step)) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
            torch.save(state, file)
        for old in self._steps()[: -self.keep]:
            self._path(old).unlink(missing_ok=True)

    def restore(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        generators: dict[str, torch.Generator] | None = None,
    ) -> dict[str, Any]:
        """Load the newest checkpoint into model, optimizer and generators.

        Returns its ``step`` and ``extra``.
        """
        step = self.latest()
        if step is None:
            raise DataError(f"{self.folder} holds no checkpoint to resume from")
        state = torch.load(self._path(step), weights_only=True)
        model.load_state_dict(state["model"])
        if optimizer is not None and state["optimizer"] is not None:
            optimizer.load_state_dict(state["optimizer"])
        for name, generator in (generators or {}).items():
            generator.set_state(state["generators"][name])
        torch.set_rng_state(state["default_generator"])
        return {"step": state["step"], "extra": state["extra"]}


class RunCheckpoints(Checkpoints):
    """Checkpoints beside a file that says which run they belong to, written with the first one."""

    def __init__(self, folder: Path, fingerprint: dict[str, Any], root: Path | None = None) -> None:
        super().__init__(folder)
        self.fingerprint, self.root = fingerprint, root or folder

    def stage(self, name: str) -> Checkpoints:
        """Return the checkpoints of one stage of training, in a subfolder."""
        return RunCheckpoints(self.folder / name, self.fingerprint, self.root)

    def save(self, step: int, **state: Any) -> None:
        """Write the state after ``step`` steps."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.root / RUN, self.fingerprint)
        super().save(step, **state)


def open_checkpoints(out: Path, fingerprint: dict[str, Any], *, resume: bool) -> Checkpoints:
    """Return the checkpoints of the run that writes ``out``.

    Resuming raises ``ArgumentError`` if the checkpoints belong to other data or settings; a new run
    removes old checkpoints.

    >>> open_checkpoints(getfixture("tmp_path"), {"seed": 0}, resume=False).latest() is None
    True
    """
    fingerprint = json.loads(json.dumps(fingerprint, default=str))  # as it is read back
    path = out / CHECKPOINTS / RUN
    if not resume:
        clear_checkpoints(out)
        return RunCheckpoints(path.parent, fingerprint)
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if other := [name for name, value in fingerprint.items() if before.get(name) != value]:
        raise ArgumentError(
            f"{out} has checkpoints of other {', '.join(other[:3])}: ask for the same again, "
            "or leave --resume out"
        )
    return RunCheckpoints(path.parent, fingerprint)


def clear_checkpoints(out: Path) -> None:
    """Remove the checkpoints in ``out``, and the folder if it is empty then."""
    (out / CHECKPOINTS / RUN).unlink(missing_ok=True)
    Checkpoints(out / CHECKPOINTS).clear()
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()

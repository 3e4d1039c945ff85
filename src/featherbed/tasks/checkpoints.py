"""Checkpoints: model, optimizer, step and generator states in one file, written atomically, the last few kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featherbed.errors import ArgumentError, DataError
from featherbed.packed.writing import replacing


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
        """Return the checkpoints of a stage of training that has its own: a folder in the folder."""
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
        """Remove the checkpoints, those of stages too, and the folder if nothing else is in it."""
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
        """Load the newest checkpoint into model, optimizer and generators; return its ``step`` and ``extra``."""
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

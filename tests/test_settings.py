"""Settings: types, limits, groups, recipes, and messages that name the setting."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from featherbed.errors import ArgumentError, DataError, MissingFileError
from featherbed.settings import Settings, group, setting


@dataclass(frozen=True, kw_only=True)
class Optimization(Settings):
    epochs: int = setting(10, "Maximum number of epochs.", minimum=1)
    lr: float | None = setting(None, "Learning rate.", above=0)
    optimizer: str = setting("adam", "Optimizer.", choices=("adam", "yogi"))
    decay: float = setting(0.0, "Weight decay.", minimum=0, maximum=1)

    def check(self):
        if self.decay and self.optimizer == "yogi":
            raise ArgumentError(f"decay={self.decay:g} goes with optimizer=adam")


@dataclass(frozen=True, kw_only=True)
class Example(Settings):
    dim: int = setting(16, "Row width.", minimum=1)
    widths: tuple[int, ...] = setting((3, 4), "Filter widths.", minimum=1)
    tied: bool = setting(True, "Tie input and output.")
    cache: Path | None = setting(None, "Folder.")
    training: Optimization = group(Optimization, epochs=3)


def test_defaults_of_a_group_can_be_replaced():
    assert Example().training.epochs == 3
    assert Example.from_values({"training.lr": 0.5}).training.epochs == 3


def test_text_is_converted_to_the_type_of_the_setting():
    values = {"dim": "8", "widths": "2,5", "tied": "false", "cache": "a/b", "training.lr": "1e-2"}
    found = Example.from_values(values)
    assert (found.dim, found.widths, found.tied) == (8, (2, 5), False)
    assert (found.cache, found.training.lr) == (Path("a/b"), 0.01)
    assert Example.from_values({"training.lr": "none"}).training.lr is None


def test_values_describe_and_from_values_agree():
    values = Example(dim=4).values()
    assert [line.name for line in Example.describe()] == list(values)
    assert Example.from_values(values) == Example(dim=4)
    defaults = {line.name: line.default for line in Example.describe()}
    assert defaults["training.epochs"] == 3


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dim", "0", "dim=0: give a whole number of at least 1"),
        ("dim", "1.5", "dim=1.5: give a whole number"),
        ("dim", True, "dim=True: give a whole number"),
        ("widths", "3,0", "widths=0: give a whole number of at least 1"),
        ("tied", "maybe", "tied=maybe: give true or false"),
        ("training.lr", "0", "training.lr=0.0: give a number above 0"),
        ("training.lr", "nan", "training.lr=nan: give a number above 0"),
        ("training.lr", "fast", "training.lr=fast: give a number or none"),
        ("training.decay", 2, "training.decay=2.0: give a number of at least 0 and of at most 1"),
        ("training.optimizer", "sgd", "training.optimizer=sgd: use one of adam, yogi"),
        ("lr", "0.1", "lr: no such setting; did you mean training.lr?"),
        ("training.epoch", "1", "training.epoch: no such setting; did you mean training.epochs?"),
        ("qqq", "1", "qqq: no such setting; `featherbed settings` lists those of a command"),
    ],
)
def test_a_bad_value_is_refused_by_name(name, value, message):
    with pytest.raises(ArgumentError) as caught:
        Example.from_values({name: value})
    assert str(caught.value).startswith(message)


def test_rules_between_settings_name_the_group():
    with pytest.raises(ArgumentError, match=r"^training\.decay=0\.1 goes with optimizer=adam"):
        Example.from_values({"training.decay": 0.1, "training.optimizer": "yogi"})


def test_recipe_then_assignments_then_options(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("dim = 8\nwidths = [7]\n[training]\nlr = 1\nepochs = 5\n")
    found = Example.read(recipe, ["training.lr=0.5"], training__epochs=9, dim=None)
    assert (found.dim, found.widths, found.training.lr, found.training.epochs) == (8, (7,), 0.5, 9)


def test_bad_recipes_and_assignments(tmp_path):
    with pytest.raises(ArgumentError, match="--set dim: give name=value"):
        Example.read(None, ["dim"])
    with pytest.raises(MissingFileError, match="no such file"):
        Example.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("dim = = 3")
    with pytest.raises(DataError, match="is not a TOML file"):
        Example.read(tmp_path / "bad.toml")

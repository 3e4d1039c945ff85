"""Settings of recommenders: defaults, policy, recipes, and the same results from Python and the command."""

import json
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from featherbed.apps.recommender import RecommenderSettings, train_recommender
from featherbed.apps.recommender.model import check_tables
from featherbed.apps.recommender.settings import AUTO, GROWING
from featherbed.cli import app
from featherbed.errors import ArgumentError
from featherbed.io.records import make_ratings

EXACT = ("users.safetensors", "items.safetensors", "seen.safetensors", "recommender.json")


def resolved(**values):
    given = {name.replace("__", "."): value for name, value in values.items()}
    return RecommenderSettings.from_values(given).resolve()


@pytest.fixture
def source(tmp_path):
    found = make_ratings(60, 40, 1500)
    triples = zip(found.users, found.items, found.values, strict=True)
    lines = ["user,item,rating", *(f"{u},{i},{r:.1f}" for u, i, r in triples)]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(lines))
    return path


def test_graded_rows_are_the_default():
    assert resolved().graded
    assert resolved(table__budget="40KB").graded
    assert not resolved(table__users="dense").graded


def test_tables_have_defaults_for_everything():
    settings = resolved(table__users="dense")
    assert settings.table.items == "dense"
    assert settings.table.biases == "column"
    assert (settings.training.epochs, settings.training.patience) == (15, 3)
    assert settings.resolve() == settings
    assert resolved(anchors__nonzeros=100).table.users == "anchor:anchors=16"


def test_auto_fills_in_what_was_chosen_for_it_and_keeps_what_is_given():
    settings = resolved(table__auto=True, training__epochs=4, anchors__lambda1=0.5)
    values = settings.values()
    assert settings.grows
    assert settings.table.users == settings.table.items == GROWING
    given = {"training.epochs": 4, "training.patience": 4, "anchors.lambda1": 0.5}
    assert {name: values[name] for name in given} == given
    for name in AUTO.keys() - given.keys():
        assert values[name] == AUTO[name]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"training__epochs": 3}, r"training\.epochs is for tables .* leave one of them out"),
        ({"table__users": "dense", "table__ratio": 4}, r"table\.users is for tables"),
        ({"table__mean": False}, r"table\.mean is for tables"),
        ({"table__budget": "1KB", "table__ratio": 3}, "not both"),
        ({"table__budget": "lots"}, "give bytes"),
        ({"table__dim": 1}, "leave no factor"),
        ({"table__users": "dense", "anchors__lambda1": 1.0}, r"with table\.auto"),
        ({"storage__weights": "int99"}, "storage kind"),
        ({"split__method": "other"}, "use one of random, time, leave-out"),
        ({"epochs": 3}, r"did you mean training\.epochs"),
    ],
)
def test_settings_that_do_not_go_together(values, message):
    with pytest.raises(ArgumentError, match=message):
        resolved(**values)


def test_tables_that_the_settings_do_not_fit():
    with pytest.raises(ArgumentError, match="has anchors"):
        check_tables(resolved(table__users="dense", table__items="dense", anchors__nonzeros=3))
    with pytest.raises(ArgumentError, match="NBANT takes growinganchor"):
        check_tables(resolved(table__auto=True, table__users="dense"))
    with pytest.raises(ArgumentError, match="plain rows have none"):
        check_tables(resolved(table__users="dense", storage__weights="int8"))


@pytest.mark.skipif(find_spec("plotly") is None, reason="the report needs plotly")
def test_python_callers_a_recipe_and_the_command_give_the_same_files(source, tmp_path):
    values = {"table.users": "anchor:anchors=4", "table.dim": 4, "training.epochs": 2}
    train_recommender(source, tmp_path / "python", values, seed=3, progress=False)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[table]\nusers = "dense"\ndim = 4\n[training]\nepochs = 2\n')
    words = f"train ratings {source} --out {tmp_path / 'command'} --recipe {recipe} --quiet"
    options = ["--users", "anchor:anchors=4", "--seed", "3"]  # options override the recipe
    done = CliRunner().invoke(app, [*words.split(), *options])
    assert done.exit_code == 0, done.output
    for name in EXACT:
        one, other = ((tmp_path / place / name).read_bytes() for place in ("python", "command"))
        assert one == other, name
    metrics = json.loads((tmp_path / "python" / "metrics.json").read_text())
    assert metrics["settings"]["table.users"] == "anchor:anchors=4"


@pytest.mark.parametrize("command", [["train", "ratings"], ["recommend"]])
def test_commands_have_at_most_14_options(command):
    text = CliRunner().invoke(app, [*command, "--help"]).output
    options = [line.split()[0] for line in text.splitlines() if line.strip().startswith("-")]
    assert 4 <= len([name for name in options if name != "--help"]) <= 14


def test_every_setting_is_listed_with_help():
    shown = CliRunner().invoke(app, ["settings", "train", "ratings"]).output
    for line in RecommenderSettings.describe():
        assert f"{line.name} = " in shown
        assert line.help.endswith(".")

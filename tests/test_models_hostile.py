"""Folders of ``transformers`` models that were tampered with: one named error, before memory or time is spent."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import featherbed as fb

transformers = pytest.importorskip(
    "transformers", reason="models of the transformers library: pip install featherbed[hf]"
)

from featherbed.interop.pretrained import load_model  # noqa: E402
from featherbed.interop.swap import compress_model  # noqa: E402

SIZES = {
    "vocab_size": 600,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
TABLE = "embeddings.word_embeddings"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("models") / "small"
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    compress_model(model, ratio=3, method="int4")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(small, tmp_path):
    shutil.copytree(small, tmp_path / "model")
    return tmp_path / "model"


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_table(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    fields = config["quantization_config"]["tables"][TABLE]
    for name, value in changes.items():
        if value is ...:
            del fields[name]
        else:
            fields[name] = value
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, change):
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def write_config(folder, text):
    (folder / "config.json").write_text(text)


@pytest.mark.parametrize(
    "names",
    [
        ["AutoTokenizer"],
        ["AutoModel"],
        ["PreTrainedModel"],
        ["BertConfig"],
        ["modeling_utils"],
        ["__builtins__"],
        ["__version__"],
        [""],
        [17],
        [None],
        [["BertModel"]],
        {"BertModel": 1},
        "BertModel",
        17,
    ],
    ids=str,
)
def test_only_a_model_class_is_accepted_as_the_architecture(folder, names):
    edit(folder, architectures=names)
    with pytest.raises((fb.ArgumentError, fb.DataError), match=r"config\.json") as error:
        load_model(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ...}, "lacks the field 'rows'"),
        ({"rows": "600"}, "rows must be an integer"),
        ({"rows": 0}, "rows must be an integer"),
        ({"rows": 10**30}, "rows must be an integer"),
        ({"rows": True}, "rows must be an integer"),
        ({"rows": 700}, r"table of 700 x 16, the model has Embedding 600 x 16"),
        ({"dim": 1.5}, "dim must be an integer"),
        ({"padding": 600}, "padding must be an integer"),
        ({"padding": [1]}, "padding must be an integer"),
        ({"scale": "1"}, "scale must be a finite number"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"bytes": -1}, "bytes must be an integer"),
        ({"bytes": 1 << 40}, "has no tensor embeddings.word_embeddings.packed of"),
        ({"twins": []}, "twins must be an object"),
        ({"twins": {"a": None}}, "scale must be a finite number"),
        ({"heads": "pooler"}, "heads must be a list of names"),
        ({"heads": [1]}, "heads must be a list of names"),
        ({"heads": ["pooler.dense"]}, "'pooler.dense' for a table"),
        ({"twins": {"embeddings.position_embeddings": 1.0}}, "'embeddings.position_embeddings'"),
    ],
    ids=str,
)
def test_tables_are_read_by_a_schema(folder, changes, message):
    edit_table(folder, **changes)
    with pytest.raises(fb.FormatError, match=message) as error:
        load_model(folder)
    assert "\n" not in str(error.value)


CONFIGS = {
    "no tables": lambda folder: edit(folder, quantization_config={"quant_method": "featherbed"}),
    "a list of tables": lambda folder: edit(
        folder, quantization_config={"quant_method": "featherbed", "tables": []}
    ),
    "tables of nothing": lambda folder: edit(
        folder, quantization_config={"quant_method": "featherbed", "tables": {TABLE: None}}
    ),
    "another table": lambda folder: edit(
        folder, quantization_config={"quant_method": "featherbed", "tables": {"x": {}}}
    ),
    "quantization that is none": lambda folder: edit(folder, quantization_config=17),
    "a list": lambda folder: write_config(folder, "[]"),
    "a number": lambda folder: write_config(folder, "17"),
    "deep nesting": lambda folder: write_config(folder, '{"a":' * 100_000),
    "deep nesting, closed": lambda folder: write_config(
        folder, '{"a":' * 100_000 + "1" + "}" * 100_000
    ),
    "no text": lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"),
    "a long number": lambda folder: write_config(folder, '{"vocab_size": ' + "9" * 10_000 + "}"),
    "many layers": lambda folder: edit(folder, num_hidden_layers=10**9),
    "many labels": lambda folder: edit(folder, num_labels=10**9),
    "layers that are text": lambda folder: edit(folder, num_hidden_layers="many"),
    "no width": lambda folder: edit(folder, hidden_size=0),
    "a width below zero": lambda folder: edit(folder, hidden_size=-16),
    "another width": lambda folder: edit(folder, hidden_size=32),
    "more tokens": lambda folder: edit(folder, vocab_size=10**12),
    "more positions": lambda folder: edit(folder, max_position_embeddings=10**13),
    "unknown activation": lambda folder: edit(folder, hidden_act="nothing"),
    "a kind that is no text": lambda folder: edit(folder, model_type=["bert"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_hostile_configs_are_named_errors(case, folder):
    CONFIGS[case](folder)
    with pytest.raises(fb.FeatherbedError) as error:
        load_model(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    assert len(str(error.value)) < 700


TENSORS = {
    "no bytes": lambda held: held.pop(f"{TABLE}.packed"),
    "fewer bytes": lambda held: held.update({f"{TABLE}.packed": held[f"{TABLE}.packed"][:-1]}),
    "no table": lambda held: held[f"{TABLE}.packed"].zero_(),
    "bytes of floats": lambda held: held.update(
        {f"{TABLE}.packed": held[f"{TABLE}.packed"].float()}
    ),
    "another shape": lambda held: held.update({"embeddings.LayerNorm.weight": torch.ones(17)}),
}


@pytest.mark.parametrize("case", TENSORS)
def test_hostile_tensors_are_named_errors(case, folder):
    edit_tensors(folder, TENSORS[case])
    with pytest.raises(fb.FeatherbedError) as error:
        load_model(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["generation_config.json", "model-2.safetensors", "config.json"])
def test_pipes_and_devices_are_refused_before_they_are_read(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(fb.DataError, match=name):
        load_model(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(fb.DataError, match=name):
        load_model(folder)


def test_a_file_that_is_cut_short_is_a_named_error(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(fb.DataError, match="cut short"):
        load_model(folder)

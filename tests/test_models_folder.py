"""A model's folder compressed from disk: what it holds is what memory would have made, and nothing half-written is left."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import featherbed as fb
from featherbed.cli import app

transformers = pytest.importorskip(
    "transformers", reason="models of the transformers library: pip install featherbed[hf]"
)

from featherbed.interop import folder as streaming  # noqa: E402
from featherbed.interop.folder import compress_folder  # noqa: E402
from featherbed.interop.pretrained import load_model  # noqa: E402
from featherbed.interop.swap import compress_model  # noqa: E402

ROWS, DIM = 600, 16
SMALL = {"vocab_size": ROWS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {
    "hidden_size": DIM,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
}
BART = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", autouse=True)
def no_progress_bars():
    transformers.utils.logging.disable_progress_bar()


def gpt2(kind=transformers.GPT2LMHeadModel):
    return kind(transformers.GPT2Config(**SMALL, n_embd=DIM, n_layer=1, n_head=2, n_positions=64))


def bert(kind=transformers.BertModel):
    return kind(transformers.BertConfig(**SMALL, **LAYERS, max_position_embeddings=64))


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**SMALL, d_model=DIM, d_kv=8, num_layers=1, num_heads=2, d_ff=32)
    )


def bart():
    sizes = {
        "d_model": DIM,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 64,
    }
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**SMALL, **BART, **sizes, scale_embedding=True)
    )


def gemma3():
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SMALL, **LAYERS, num_key_value_heads=1)
    )


def llama():
    config = transformers.LlamaConfig(**SMALL, **LAYERS, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


FAMILIES = {"gpt2": gpt2, "bert": bert, "t5": t5, "bart": bart, "gemma3": gemma3, "llama": llama}


def stream(folder, out, **settings):
    return compress_folder(folder, out, **({"ratio": 3, "method": "int4"} | settings))


def same_tensors(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert set(first) == set(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize(
    ("family", "shard"),
    [
        *((one, "50GB") for one in FAMILIES),
        *((one, "10KB") for one in ("gpt2", "t5", "bart", "llama")),
    ],
)
def test_the_stream_makes_what_memory_makes(family, shard, tmp_path):
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path / "dense", max_shard_size=shard)
    (done,) = stream(tmp_path / "dense", tmp_path / "small")
    (made,) = compress_model(model, ratio=3, method="int4")
    assert str(done) == str(made)
    again = load_model(tmp_path / "small")
    same_tensors(again, model)
    assert again.dtype == model.dtype
    assert again.config.quantization_config.tables == model.config.quantization_config.tables
    files = sorted((tmp_path / "small").glob("*.safetensors"))
    assert len(files) == 1 if shard == "50GB" else len(files) > 2
    assert (tmp_path / "small" / INDEX).exists() == (shard == "10KB")
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert [t.numel() for name, t in held.items() if name.endswith(f"{done.name}.weight")] == [0]


@pytest.mark.parametrize(
    ("saved", "named"),
    [
        (lambda: gpt2(transformers.GPT2Model), "GPT2LMHeadModel"),
        (lambda: bert(transformers.BertForMaskedLM), "BertModel"),
    ],
)
def test_names_with_and_without_the_prefix_of_the_body(saved, named, tmp_path):
    saved().save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config | {"architectures": [named]}))
    torch.manual_seed(1)
    model = load_model(tmp_path / "dense")
    assert type(model).__name__ == named
    stream(tmp_path / "dense", tmp_path / "small")
    compress_model(model, ratio=3, method="int4")
    again = load_model(tmp_path / "small")
    assert torch.equal(again.get_input_embeddings().packed, model.get_input_embeddings().packed)
    ids = torch.randint(ROWS, (2, 5))
    with torch.no_grad():
        assert torch.equal(again.eval()(ids)[0], model.eval()(ids)[0])


@pytest.fixture
def dense(tmp_path):
    gpt2().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def test_what_else_is_there_comes_along(dense, tmp_path):
    (dense / "tokenizer.json").write_bytes(b"\x00words\xff")
    (dense / "README.md").write_text("a model")
    stream(str(dense), str(tmp_path / "small"))
    for name in ("tokenizer.json", "README.md", "generation_config.json"):
        assert (tmp_path / "small" / name).read_bytes() == (dense / name).read_bytes()
    before, after = (
        json.loads((one / "config.json").read_text()) for one in (dense, tmp_path / "small")
    )
    assert after.pop("quantization_config")["quant_method"] == "featherbed"
    assert after == before


def test_folders_within_come_along_but_not_other_forms_of_the_model(dense, tmp_path):
    within, other = (
        ("1_Pooling/config.json", "2_Dense/model.safetensors"),
        ("onnx/model.onnx", "openvino/model.xml", ".cache/lock"),
    )
    for name in (*within, *other):
        (dense / name).parent.mkdir()
        (dense / name).write_text(name)
    stream(dense, tmp_path / "small")
    found = sorted(
        str(path.relative_to(tmp_path / "small"))
        for path in (tmp_path / "small").rglob("*/*")
        if path.is_file()
    )
    assert found == list(within)


def test_a_head_that_was_stored_twice_is_stored_once(dense, tmp_path):
    tensors = load_file(dense / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    stream(dense, tmp_path / "small")
    held = load_file(tmp_path / "small" / "model.safetensors")
    assert held["lm_head.weight"].numel() == held["transformer.wte.weight"].numel() == 0


def test_settings_reach_the_compression(dense, tmp_path):
    told = []
    (done,) = stream(
        dense,
        tmp_path / "small",
        ratio=None,
        budget="9KB",
        tell=lambda what, share: told.append(share),
    )
    assert done.after <= 9_000
    assert 0 <= min(told) <= max(told) <= 1


def test_the_command(dense, tmp_path):
    asked = [
        "compress",
        str(dense),
        "--ratio",
        "3",
        "--method",
        "int4",
        "--out",
        str(tmp_path / "small"),
        "--quiet",
    ]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "transformer.wte: 600 x 16" in result.output
    assert load_model(tmp_path / "small").lm_head.out_features == ROWS


def test_the_table_is_mapped_and_the_rest_copied_in_blocks(dense, tmp_path, monkeypatch):
    given, real = [], streaming.compress

    def compress(matrix, **settings):
        given.append(matrix)
        return real(matrix, **settings)

    stream(dense, tmp_path / "at once")
    monkeypatch.setattr(streaming, "compress", compress)
    monkeypatch.setattr(streaming, "BLOCK", 1000)
    stream(dense, tmp_path / "in blocks")
    assert isinstance(given[0], np.memmap)
    assert listing(tmp_path / "at once") == listing(tmp_path / "in blocks")


# Interrupted, or refused: nothing is left


def listing(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space left")])
def test_an_interruption_leaves_nothing(dense, tmp_path, monkeypatch, error):
    before, copied, real = listing(tmp_path), [], streaming.copy

    def copy(*given):
        copied.append(given[-1])
        if len(copied) == 3:
            raise error
        real(*given)

    monkeypatch.setattr(streaming, "copy", copy)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else OSError):
        stream(dense, tmp_path / "small")
    assert len(copied) == 3
    assert listing(tmp_path) == before


def test_what_a_killed_run_left_is_no_hindrance(dense, tmp_path):
    (tmp_path / ".featherbed-abcdefgh.tmp" / "made").mkdir(parents=True)
    (tmp_path / ".featherbed-abcdefgh.tmp" / "made" / "junk").write_text("half")
    stream(dense, tmp_path / "small")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "small"]
    assert not (tmp_path / "small" / "junk").exists()
    assert (tmp_path / "small").stat().st_mode == (tmp_path / "dense").stat().st_mode


def test_names_of_the_longest_kind(dense, tmp_path):
    stream(dense, tmp_path / ("n" * 255))
    assert load_model(tmp_path / ("n" * 255)).lm_head.out_features == ROWS


# Symbolic links


def test_links_within_the_folder_and_into_a_cache_are_followed(dense, tmp_path):
    snapshot, blobs = (
        tmp_path / "models--x" / "snapshots" / "1a2b",
        tmp_path / "models--x" / "blobs",
    )
    blobs.mkdir(parents=True)
    (snapshot / "1_Pooling").mkdir(parents=True)
    for number, path in enumerate(sorted(dense.iterdir())):
        (blobs / f"{number:040x}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    (blobs / "abc").write_text("{}")
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/abc")
    (snapshot / "README.md").write_text("a model")
    (snapshot / "LICENSE").symlink_to("README.md")
    stream(dense, tmp_path / "plain")
    stream(snapshot, tmp_path / "small")
    found = listing(tmp_path / "small")
    assert found.pop("1_Pooling") is None
    assert found.pop("1_Pooling/config.json") == b"{}"
    assert found.pop("README.md") == found.pop("LICENSE") == b"a model"
    assert found == listing(tmp_path / "plain")
    assert not any(path.is_symlink() for path in (tmp_path / "small").rglob("*"))


LINKS = {
    "a file elsewhere": ("notes.txt", "../secret.txt", "outside the folder"),
    "a file elsewhere, by its whole path": ("notes.txt", "{root}/secret.txt", "outside the folder"),
    "a folder": ("1_Pooling", "inside", "a folder"),
    "a folder elsewhere": ("1_Pooling", "/", "a folder"),
    "a file within a folder": ("inside/key", "../../secret.txt", "outside the folder"),
    "a folder within a folder": ("inside/more", "..", "a folder"),
    "nothing": ("notes.txt", "nowhere", "does not exist"),
    "blobs of nobody": ("notes.txt", "../blobs/abc", "outside the folder"),
    "the config": ("config.json", "../secret.txt", "outside the folder"),
    "the weights": ("model.safetensors", "../secret.txt", "outside the folder"),
}


@pytest.mark.parametrize("case", LINKS)
def test_links_that_lead_out_of_the_folder_are_refused(case, dense, tmp_path):
    name, target, message = LINKS[case]
    (tmp_path / "secret.txt").write_text("a private key")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_text("a private key")
    (dense / "inside").mkdir()
    (dense / "inside" / "config.json").write_text("{}")
    (dense / name).unlink(missing_ok=True)
    (dense / name).symlink_to(target.format(root=tmp_path))
    with pytest.raises(fb.DataError, match=f"{name} is a symbolic link .*{message}") as error:
        stream(dense, tmp_path / "small")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "small").exists()


def edited(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def retold(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut(path, share):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def as_bin(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def indexed(folder, text):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / INDEX).write_text(text)


def map_of(name):
    return json.dumps({"weight_map": {"transformer.wte.weight": name}})


SPOILT = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "unknown kind": (lambda folder: edited(folder, model_type="nothing"), "nothing"),
    "unknown architecture": (lambda folder: edited(folder, architectures=["Nothing"]), "Nothing"),
    "no architecture": (lambda folder: edited(folder, architectures=None), "architectures"),
    "quantised": (
        lambda folder: edited(folder, quantization_config={"quant_method": "awq"}),
        "quantized already",
    ),
    "bin only": (as_bin, r"neither model\.safetensors nor .*save_pretrained"),
    "empty": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cut short"),
    "garbage": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 99),
        "not a valid safetensors file",
    ),
    "half a header": (
        lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 99) + b"{"),
        "cut short",
    ),
    "cut short": (lambda folder: cut(folder / "model.safetensors", 0.9), "model.safetensors"),
    "no table": (
        lambda folder: retold(folder, lambda held: held.pop("transformer.wte.weight")),
        "token table",
    ),
    "another vocabulary": (lambda folder: edited(folder, vocab_size=700), r"600 x 16.*700 x 16"),
    "heads that differ": (
        lambda folder: retold(
            folder, lambda held: held.update({"lm_head.weight": torch.ones(ROWS, DIM)})
        ),
        r"lm_head\.weight",
    ),
    "broken index": (lambda folder: indexed(folder, "{"), "index"),
    "an index of nothing": (lambda folder: indexed(folder, "{}"), "names no files"),
    "an index that is none": (lambda folder: indexed(folder, "[]"), "index"),
    "a shard that is missing": (
        lambda folder: indexed(folder, map_of("other.safetensors")),
        r"names other\.safetensors",
    ),
    "a shard elsewhere": (
        lambda folder: indexed(folder, map_of("../dense/part.safetensors")),
        r"\.\./dense",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_folders_that_cannot_be_compressed(case, dense, tmp_path):
    spoil, message = SPOILT[case]
    spoil(dense)
    before = listing(tmp_path)
    with pytest.raises((fb.DataError, fb.ArgumentError), match=message) as error:
        stream(dense, tmp_path / "small")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert listing(tmp_path) == before


def test_a_shard_that_is_cut_short(tmp_path):
    gpt2().save_pretrained(tmp_path / "dense", max_shard_size="10KB")
    held = json.loads((tmp_path / "dense" / INDEX).read_text())["weight_map"]
    cut(
        tmp_path / "dense" / next(file for name, file in held.items() if "mlp.c_fc.weight" in name),
        0.8,
    )
    before = listing(tmp_path)
    with pytest.raises(fb.DataError, match="cut short"):
        stream(tmp_path / "dense", tmp_path / "small")
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("out", "settings", "message"),
    [
        ("dense", {}, "exists: name a folder that does not"),
        ("not/there", {}, "name a folder in one that exists"),
        ("small", {"ratio": 0.5}, "ratio=0.5"),
        ("small", {"ratio": None}, "exactly one of"),
        ("small", {"ratio": 100}, "nothing fits"),
    ],
)
def test_what_cannot_be_asked_for(out, settings, message, dense, tmp_path):
    before = listing(tmp_path)
    with pytest.raises(fb.ArgumentError, match=message):
        stream(dense, tmp_path / out, **settings)
    assert listing(tmp_path) == before


def test_a_compressed_folder_and_no_folder_at_all(dense, tmp_path):
    stream(dense, tmp_path / "small")
    with pytest.raises(fb.ArgumentError, match="quantized already"):
        stream(tmp_path / "small", tmp_path / "smaller")
    with pytest.raises(fb.DataError, match="nowhere"):
        stream(tmp_path / "nowhere", tmp_path / "smaller")


def test_a_model_without_tokens(tmp_path):
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 8,
        "patch_size": 4,
    }
    transformers.ViTModel(transformers.ViTConfig(hidden_size=DIM, **sizes)).save_pretrained(
        tmp_path / "dense"
    )
    with pytest.raises(fb.ArgumentError, match=r"ViTModel has no nn\.Embedding"):
        stream(tmp_path / "dense", tmp_path / "small")
    assert set(listing(tmp_path)) == {"dense", "dense/config.json", "dense/model.safetensors"}

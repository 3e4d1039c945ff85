"""A whole model shrinks: remaining weights, a budget for the folder, ONNX without featherbed and torch."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import featherbed as fb
from featherbed.cli import app

transformers = pytest.importorskip("transformers", reason="pip install featherbed[hf]")
onnx = pytest.importorskip("onnx", reason="pip install featherbed[onnx]")
onnxruntime = pytest.importorskip("onnxruntime", reason="pip install featherbed[onnx]")
pytest.importorskip("onnxscript", reason="pip install featherbed[onnx]")
tokenizers = pytest.importorskip("tokenizers", reason="pip install featherbed[text]")

from featherbed.interop import onnx_model  # noqa: E402
from featherbed.interop.folder import folder_bytes  # noqa: E402
from featherbed.interop.loss import measure_loss  # noqa: E402
from featherbed.interop.onnx_model import Pooling, model_to_onnx, read_pooling  # noqa: E402
from featherbed.interop.rest import Int8Linear  # noqa: E402

ROWS, DIM = 700, 96
SMALL = {"vocab_size": ROWS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {"hidden_size": DIM, "intermediate_size": 128, "num_hidden_layers": 2}
LAYERS |= {"num_attention_heads": 2, "max_position_embeddings": 64}
GPT = {"n_embd": DIM, "n_layer": 2, "n_head": 2, "n_positions": 64}


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL, **LAYERS)).eval()


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL, **GPT)).eval()


FAMILIES = {"bert": bert, "gpt2": gpt2}


def write_tokenizer(folder):
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3}
    words |= {f"w{number}": number for number in range(4, ROWS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=FAMILIES)
def original(request, tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / request.param
    FAMILIES[request.param]().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """The folder of a sentence encoder."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("sentences") / "encoder"
    bert().save_pretrained(folder)
    write_tokenizer(folder)
    kinds = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_N", "Normalize")]
    modules = [
        {
            "idx": int(name),
            "name": name,
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for name, path, kind in kinds
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": DIM, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def ids_and_mask(count=3, length=9):
    ids = torch.randint(4, ROWS, (count, length), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return ids, mask


@pytest.mark.parametrize("rest", ["float16", "int8"])
def test_memory_folder_and_reloaded_model_agree(rest, original, tmp_path):
    model = fb.load_model(original).eval()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    fb.compress_model(model, ratio=6, method="int4", rest=rest)
    model.save_pretrained(tmp_path / "memory")
    fb.compress_folder(original, tmp_path / "folder", ratio=6, method="int4", rest=rest)
    ids, mask = ids_and_mask()
    expected = model(input_ids=ids, attention_mask=mask)[0]
    for name in ("memory", "folder"):
        again = fb.load_model(tmp_path / name).eval()
        assert torch.equal(again(input_ids=ids, attention_mask=mask)[0], expected)
        assert next(again.parameters()).dtype == torch.float32
        sizes = [
            (tmp_path / name / "model.safetensors").stat().st_size,
            (original / "model.safetensors").stat().st_size,
        ]
        assert sizes[0] * {"float16": 2.2, "int8": 3.2}[rest] < sizes[1]
    layers = [name for name, one in model.named_modules() if isinstance(one, Int8Linear)]
    assert len(layers) == (0 if rest == "float16" else 8 if "gpt2" in original.name else 13)
    for name in layers:
        layer, weight = model.get_submodule(name), before[f"{name}.weight"]
        weight = weight.T if "gpt2" in original.name else weight
        assert ((layer.weight - weight).abs() <= 0.501 * layer.scales[:, None]).all()
    assert (
        json.loads((tmp_path / "folder/config.json").read_text())["quantization_config"]["rest"]
        == rest
    )


def neox():
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL, **LAYERS))


def classifier():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **LAYERS))


def t5_encoder():
    sizes = {"d_model": DIM, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 2}
    return transformers.T5EncoderModel(transformers.T5Config(vocab_size=ROWS, **sizes))


@pytest.mark.parametrize("make", [neox, classifier, t5_encoder])
def test_other_heads_and_renamed_layers(make, tmp_path):
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(tmp_path / "dense")
    fb.compress_model(model, ratio=6, method="int4", rest="int8")
    model.save_pretrained(tmp_path / "memory")  # transformers stores lm_head of neox as embed_out
    fb.compress_folder(tmp_path / "dense", tmp_path / "small", ratio=6, method="int4", rest="int8")
    ids, mask = ids_and_mask()
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask)[0]
        for name in ("memory", "small"):
            again = fb.load_model(tmp_path / name).eval()
            assert torch.equal(again(input_ids=ids, attention_mask=mask)[0], expected)
    session = onnxruntime.InferenceSession(model_to_onnx(tmp_path / "small", tmp_path / "onnx"))
    (found,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    kept = mask.numpy().astype(bool) if found.ndim == 3 else slice(None)
    assert np.abs(found - expected.numpy())[kept].max() < 1e-4 * expected.abs().max()


def test_int8_layers_that_the_model_lacks_are_an_error(original, tmp_path):
    fb.compress_folder(original, tmp_path / "small", ratio=6, method="int4", rest="int8")
    file = tmp_path / "small" / "model.safetensors"
    data = file.read_bytes()
    name = b"h.0.mlp.c_fc.levels" if "gpt2" in original.name else b"0.output.dense.levels"
    assert data.count(name) == 1
    file.write_bytes(
        data.replace(name, name.replace(b"e.levels", b"x.levels").replace(b"fc.", b"fx."))
    )
    with pytest.raises(fb.FormatError, match="has no linear layer for"):
        fb.load_model(tmp_path / "small")


def test_any_module_with_small_weights_is_restored():
    def make():
        return torch.nn.Sequential(torch.nn.Embedding(500, 16), torch.nn.Linear(16, 2))

    model, ids = make(), torch.tensor([3, 17])
    fb.compress_model(model, ratio=4, method="int4", rest="int8")
    assert isinstance(model[1], Int8Linear)
    assert torch.equal(fb.restore_model(make(), model.state_dict())(ids), model(ids))


def test_a_budget_for_the_whole_folder(original, tmp_path):
    limit = folder_bytes(original) // 4
    (result,) = fb.compress_folder(
        original, tmp_path / "quarter", folder_budget=limit, method="int4"
    )
    assert folder_bytes(tmp_path / "quarter") <= limit
    assert result.after < result.before / 6
    loss = measure_loss(original, tmp_path / "quarter", ["w5 w6 w7", "w9 w8", "w17 w300 w20"] * 9)
    assert 0 <= loss.value < 0.1
    assert ("perplexity" if "gpt2" in original.name else "cosine") in str(loss)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"folder_budget": 5000}, "without its table the folder has at least"),
        ({"folder_budget": "1MB", "ratio": 4}, "which it replaces"),
        ({"ratio": 4, "rest": "int3"}, "rest='int3': use one of float32, float16, int8"),
    ],
)
def test_folders_that_are_refused_leave_nothing(settings, message, original, tmp_path):
    with pytest.raises(fb.ArgumentError, match=message) as error:
        fb.compress_folder(original, tmp_path / "out", method="int4", **settings)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rest", ["float16", "int8", "dynamic"])
def test_onnx_equals_torch(rest, original, tmp_path):
    weights = "float32" if rest == "dynamic" else rest
    fb.compress_folder(original, tmp_path / "small", ratio=6, method="int4", rest=weights)
    path = model_to_onnx(tmp_path / "small", tmp_path / "onnx", rest=rest)
    model = fb.load_model(tmp_path / "small").eval()
    ids, mask = ids_and_mask()
    session = onnxruntime.InferenceSession(path)
    (found,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask)[0].numpy()
    kept = mask.numpy().astype(bool)
    limit = 0.2 if rest == "dynamic" else 1e-4
    assert np.abs(found - expected)[kept].max() < limit * np.abs(expected).max()
    table = len(model.get_input_embeddings().packed)
    arrays = {one.name: one for one in onnx.load(path).graph.initializer}
    codes = sum(one.ByteSize() for name, one in arrays.items() if name.startswith("table/"))
    assert codes < 1.05 * table + 1000  # once, also with a tied head
    if rest == "int8":
        assert sum(one.data_type == onnx.TensorProto.INT8 for one in arrays.values()) >= 8
    assert session.get_outputs()[0].name == (
        "logits" if "gpt2" in original.name else "last_hidden_state"
    )


def test_a_sentence_encoder_needs_onnxruntime_alone(sentences, tmp_path):
    model_to_onnx(sentences, tmp_path / "onnx", ratio=6, method="int4")
    example = (tmp_path / "onnx" / "example.py").read_text()
    assert len(example.splitlines()) < 25
    texts = '"w5 w6 w7", "w9 w8"'
    example = example.replace('"A dog runs in the snow.", "The market is open."', texts)
    code = "import sys\nsys.modules['torch'] = sys.modules['featherbed'] = None\n" + example
    code += "np.save('found.npy', sentence_embedding)\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "onnx", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "onnx" / "found.npy")
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    model = fb.load_model(sentences).eval()
    fb.compress_model(model, ratio=6, method="int4", rest="int8")
    ids = torch.tensor([[1, 5, 6, 7, 2], [1, 9, 8, 2, 0]])
    mask = (ids > 0).long()
    with torch.no_grad():
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        expected = Pooling("mean", normalized=True).apply(states, mask).numpy()
    assert np.abs(found - expected).max() < 1e-4


def test_pooling_is_that_of_the_folder(sentences, tmp_path):
    assert read_pooling(sentences) == Pooling("mean", normalized=True)
    assert read_pooling(tmp_path) is None
    states = torch.tensor([[[1.0, -2.0], [3.0, -4.0]]])
    mask = torch.tensor([[1, 0]])
    for mode in ("mean", "cls", "max"):
        assert Pooling(mode, normalized=False).apply(states, mask).tolist() == [[1.0, -2.0]]
    (tmp_path / "modules.json").write_text('[{"type": "x.Dense", "path": ""}]')
    with pytest.raises(fb.DataError, match="pooling it names cannot be read"):
        read_pooling(tmp_path)


def test_models_that_cannot_be_exported_leave_nothing(original, tmp_path, monkeypatch):
    def refused(message, kind=fb.ArgumentError, folder=original, **settings):
        with pytest.raises(kind, match=message) as error:
            model_to_onnx(folder, tmp_path / "out", **settings)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()

    refused("is not compressed: give ratio= or budget=")
    refused("use one of float32, float16, int8, dynamic", ratio=4, rest="int4")
    bart = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "encoder_ffn_dim": 16}
    bart |= {"decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    transformers.BartModel(transformers.BartConfig(**SMALL, **bart)).save_pretrained(
        tmp_path / "bart"
    )
    refused("has an encoder and a decoder", folder=tmp_path / "bart", ratio=4, method="int4")
    # without a padding token it takes one text at a time; with one it looks for it among the ids
    heads = {"n_embd": 16, "n_layer": 1, "n_head": 2}
    for padding, message in ((None, "does not run on token ids alone"), (0, "differs from torch")):
        config = transformers.GPT2Config(**SMALL | {"pad_token_id": padding}, **heads)
        folder = tmp_path / f"classes-{padding}"
        transformers.GPT2ForSequenceClassification(config).save_pretrained(folder)
        refused(message, folder=folder, ratio=4, method="int4")
    monkeypatch.setattr(onnx_model, "find_spec", lambda name: None)
    refused("onnxscript|onnx", kind=fb.MissingExtra, ratio=4)


def test_bfloat16_is_exported_in_float32(original, tmp_path):
    fb.load_model(original, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    fb.compress_folder(tmp_path / "half", tmp_path / "small", ratio=3, method="int4")
    path = model_to_onnx(tmp_path / "small", tmp_path / "onnx", rest="float32")
    ids, mask = ids_and_mask()
    given = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    (found,) = onnxruntime.InferenceSession(path).run(None, given)
    with torch.no_grad():
        model = fb.load_model(tmp_path / "small", dtype=torch.float32).eval()
        expected = model(input_ids=ids, attention_mask=mask)[0].numpy()
    assert np.abs(found - expected)[mask.numpy() > 0].max() < 1e-4 * np.abs(expected).max()


CHILD = """
import sys, torch, transformers
{start}
try:
    {code}
    print("worked")
except Exception as error:
    print("raised", type(error).__name__)
"""


@pytest.mark.parametrize("start", ["", "import featherbed.interop.pretrained"])
def test_whole_models_fail_loudly_without_featherbed(start, original, sentences, tmp_path):
    folder = original if "gpt2" in original.name else sentences
    fb.compress_folder(folder, tmp_path / "small", ratio=6, method="int4", rest="int8")
    classes = ["AutoModelForCausalLM"] if folder is original else ["AutoModel", "BertModel"]
    calls = [f"transformers.{one}.from_pretrained({str(tmp_path / 'small')!r})" for one in classes]
    if folder is sentences:
        pytest.importorskip("sentence_transformers")
        calls.append(
            "__import__('sentence_transformers').SentenceTransformer"
            f"({str(tmp_path / 'small')!r}, device='cpu').encode(['w5 w6'])"
        )
    for code in calls:
        done = subprocess.run(
            [sys.executable, "-c", CHILD.format(start=start, code=code)],
            capture_output=True,
            text=True,
        )
        assert ("worked" if start else "raised") in done.stdout, done.stdout + done.stderr


def run(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_the_commands(original, sentences, tmp_path):
    words = tmp_path / "sentences.txt"
    words.write_text("w5 w6 w7\nw9 w8\nw12 w13 w14\n" * 12)
    aim = ("--ratio", 6, "--method", "int4")
    done = run(
        *("compress", original, "--out", tmp_path / "small", *aim),
        *("--rest", "int8", "--words", words, "--quiet"),
    )
    assert done.exit_code == 0, done.output
    for part in (
        "folder ",
        "table ",
        "remaining weights ",
        "times smaller",
        "lost  ",
        "given sent",
    ):
        assert part in done.output
    done = run("export", tmp_path / "small", "--to", "onnx", "--out", tmp_path / "onnx", "--quiet")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "onnx" / "model.onnx").stat().st_size > 10_000
    done = run("distill", sentences, "--out", tmp_path / "static", "--dim", 32, *aim, "--quiet")
    assert done.exit_code == 0, done.output
    done = run("encode", tmp_path / "static", "w5 w6", "w9")
    vectors = np.array([line.split("\t") for line in done.output.splitlines()], dtype=float)
    assert vectors.shape == (2, 32)
    done = run("encode", tmp_path / "static", "w5 w6", "w9", "--out", tmp_path / "v.npy")
    assert np.allclose(np.load(tmp_path / "v.npy"), vectors, atol=1e-5)
    done = run(
        *("compress", original, "--out", tmp_path / "budget", "--method", "int4", "--quiet"),
        *("--folder-budget", folder_bytes(original) // 3),
    )
    assert done.exit_code == 0, done.output
    assert folder_bytes(tmp_path / "budget") <= folder_bytes(original) // 3
    both = ("--budget", "5KB", "--folder-budget=90KB", "--out", tmp_path / "y")
    assert "give one of them" in str(run("compress", original, *both).exception)
    given = ("compress", tmp_path / "static", "--out", tmp_path / "z", "--rest", "int8")
    assert "is a static encoder" in str(run(*given).exception)
    assert isinstance(run("export", original, "--out", tmp_path / "x").exception, fb.ArgumentError)


def test_the_loss_is_measured_with_a_decoder_or_not_at_all(sentences, tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=ROWS, decoder_start_token_id=0, **sizes)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    given = ("--ratio", 4, "--method", "int4", "--quiet")
    done = run("compress", tmp_path / "t5", *given, "--out", tmp_path / "small")
    assert done.exit_code == 0, done.output
    assert "lost        change of cosine 0." in done.output
    one, none = tmp_path / "one.txt", tmp_path / "none.txt"
    one.write_text("w5 w6\n")
    none.write_text("\n")
    done = run("compress", sentences, *given, "--words", one, "--out", tmp_path / "a")
    assert done.exit_code == 0, done.output
    assert "lost        not measured: too little text (1 given sentences)" in done.output
    done = run("compress", sentences, *given, "--words", none, "--out", tmp_path / "b")
    assert "holds no sentence" in str(done.exception)
    assert not (tmp_path / "b").exists()


def test_quiet_commands_say_nothing_on_the_way(sentences, tmp_path):
    given = ("--ratio", "6", "--method", "int4", "--quiet", "--out", str(tmp_path / "small"))
    command = [sys.executable, "-m", "featherbed", "compress", str(sentences), *given]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

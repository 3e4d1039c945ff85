"""A compressed folder of ``transformers`` fails loudly where featherbed is not imported, and stays marked when saved again."""

import json
import logging
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip(
    "transformers", reason="models of the transformers library: pip install featherbed[hf]"
)

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
    "max_position_embeddings": 64,
}
BART = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "d_model": DIM,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
}
GPT = {"n_embd": DIM, "n_layer": 1, "n_head": 2, "n_positions": 64}
T5 = {"d_model": DIM, "d_kv": 8, "num_layers": 1, "num_heads": 2, "d_ff": 32}
# class that is saved, its config, classes it is opened by; AutoModel is what SentenceTransformer uses
FAMILIES = {
    "bert": ("BertModel", "BertConfig", LAYERS, ["BertModel", "AutoModel", "BertForMaskedLM"]),
    "masked": (
        "BertForMaskedLM",
        "BertConfig",
        LAYERS,
        ["AutoModel", "BertModel", "AutoModelForMaskedLM", "BertForSequenceClassification"],
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        GPT,
        ["GPT2LMHeadModel", "AutoModel", "AutoModelForCausalLM"],
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        LAYERS | {"tie_word_embeddings": False},
        ["AutoModelForCausalLM", "AutoModel"],
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        T5,
        ["AutoModel", "AutoModelForSeq2SeqLM", "T5EncoderModel"],
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        BART,
        ["AutoModel", "AutoModelForSeq2SeqLM", "BartForCausalLM"],
    ),
}
SHARDED = ("gpt2", "t5", "bart")
SAVED = ("from memory", "from memory, in shards", "from disk", "from disk, in shards", "again")

CHILD = """
import json, logging, sys, warnings
import transformers
warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
for case in json.load(sys.stdin):
    folder, kind = case
    try:
        getattr(transformers, kind).from_pretrained(folder)
        error = None
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    print(json.dumps([folder, kind, error]))
assert not any(name.split(".")[0] == "featherbed" for name in sys.modules)
"""


def made(family):
    kind, config, sizes, _ = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**SMALL, **sizes)).eval()


CASES = [
    (family, saved)
    for family in FAMILIES
    for saved in SAVED
    if family in SHARDED or "shards" not in saved
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of all families, saved in all ways."""
    transformers.utils.logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        model, place = made(family), root / family
        for shards in ("", ", in shards") if family in SHARDED else ("",):
            size = "10KB" if shards else "50GB"
            model.save_pretrained(place / f"dense{shards}", max_shard_size=size)
            out = place / f"from disk{shards}"
            compress_folder(place / f"dense{shards}", out, ratio=3, method="int4")
        compress_model(model, ratio=3, method="int4")
        model.save_pretrained(place / "from memory")
        if family in SHARDED:
            model.save_pretrained(place / "from memory, in shards", max_shard_size="10KB")
        load_model(place / "from disk").save_pretrained(place / "once")
        load_model(place / "once").save_pretrained(place / "again")
    return root


@pytest.fixture(scope="module")
def alone(folders):
    """Return what a process says of every folder that never imports featherbed."""
    asked = [
        [str(folders / family / saved), kind]
        for family, saved in CASES
        for kind in FAMILIES[family][3]
    ] + [[str(folders / family / "dense"), FAMILIES[family][0]] for family in FAMILIES]
    run = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return {
        (folder, kind): error for folder, kind, error in map(json.loads, run.stdout.splitlines())
    }


@pytest.mark.parametrize(("family", "saved"), CASES)
def test_without_featherbed_it_fails_loudly(family, saved, folders, alone):
    for kind in FAMILIES[family][3]:
        error = alone[str(folders / family / saved), kind]
        assert error is not None, f"{kind} opened the folder with random rows"
        assert "size" in error.lower(), error


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_folders_are_opened_by_that_process(family, folders, alone):
    assert alone[str(folders / family / "dense"), FAMILIES[family][0]] is None


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


@pytest.fixture
def said():
    handler, logger = Records(), logging.getLogger("transformers")
    logger.addHandler(handler)
    yield handler.said
    logger.removeHandler(handler)


@pytest.mark.parametrize(("family", "saved"), CASES)
def test_with_featherbed_it_loads_without_a_warning(family, saved, folders, said):
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_model(folders / family / saved).eval()
    assert said == []
    expected = load_model(folders / family / "from memory").state_dict()
    found = model.state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_the_body_saved_alone_is_marked(folders, tmp_path):
    for number, model in enumerate((load_model(folders / "masked" / "from disk"), made("masked"))):
        if number:
            compress_model(model, ratio=3, method="int4")
        model.bert.save_pretrained(tmp_path / str(number))
        held = load_file(tmp_path / str(number) / "model.safetensors")
        assert held["embeddings.word_embeddings.weight"].numel() == 0
        assert held["embeddings.word_embeddings.packed"].numel() > 0
        again = load_model(tmp_path / str(number)).eval()
        ids = torch.tensor([[3, 17]])
        assert torch.equal(again(ids)[0], model.bert.eval()(ids)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_of_earlier_versions_without_the_mark_still_load(family, folders, tmp_path, said):
    source = folders / family / "from memory"
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    held = load_file(source / "model.safetensors")
    old = {name: tensor for name, tensor in held.items() if tensor.numel()}
    assert len(old) < len(held)
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(tmp_path)
    assert said == []
    expected = load_model(source).state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in model.state_dict().items())

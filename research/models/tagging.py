"""Named entities: a BERT with a conditional random field, its word pieces shared at random (SSE).

    emissions = W h(first piece of each word) + b,   loss = -log p_CRF(tags | emissions) / words

Wu et al. 2019, "Stochastic Shared Embeddings" (rebuttal, table 1): BERT with a CRF, fine-tuned on
CoNLL-2003 for one and two epochs, with and without SSE-SE. In SSE-Graph, edges connect word pieces
that begin words of the same type of entity in the training text. MiniLM does not know upper case: a
row for the shape of each word (lower, UPPER, Title ...) is added to its input and to its state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from tokenizers import BertWordPieceTokenizer, Tokenizer
from torch import Tensor, nn

import featherbed as fb
from featherbed.checks import require
from featherbed.progress import show_progress
from research.harness.records import Outcome, Run
from research.runners.models import minilm_folder
from research.sources.tagging import TYPES, Sentence, Tagged

MARKS = {"iob2": "BI", "iobes": "BIES"}
SHAPES = 5
FORBIDDEN = -100.0  # score of a pair of tags that no text has
LONGEST = 512  # pieces of a sentence
POOL = 50  # batches whose sentences are sorted by length together
EVERY = 100  # steps between two checkpoints
NEIGHBORS = 400  # of a word piece, at most
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


# ----------------------------------------------------------------------------- words as numbers


@dataclass(frozen=True)
class Coded:
    """A sentence as numbers: its pieces and their shapes, the first piece of each word, tags."""

    pieces: list[int]
    shapes: list[int]
    first: list[int]
    tags: list[int]


@dataclass(frozen=True)
class Batch:
    """Sentences of a batch, padded with zeros; ``attention`` and ``words`` mark what is not."""

    pieces: Tensor  # [B, n]
    shapes: Tensor  # [B, n]
    attention: Tensor  # [B, n]
    first: Tensor  # [B, words]
    tags: Tensor  # [B, words]
    words: Tensor  # bool [B, words]


def batch_of(sentences: Sequence[Coded]) -> Batch:
    """Return the batch of some sentences."""

    def padded(rows: list[list[int]]) -> Tensor:
        return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    return Batch(
        padded([one.pieces for one in sentences]),
        padded([one.shapes for one in sentences]),
        padded([[1] * len(one.pieces) for one in sentences]),
        padded([one.first for one in sentences]),
        padded([one.tags for one in sentences]),
        padded([[1] * len(one.first) for one in sentences]).bool(),
    )


def shape_of(word: str) -> int:
    """Return the shape of a word: no letters, lower, UPPER, Title, or others.

    >>> [shape_of(word) for word in ("1996-08-22", "lamb", "EU", "Peter", "McNair")]
    [0, 1, 2, 3, 4]
    """
    if word.lower() == word.upper():
        return 0
    if word == word.lower():
        return 1
    if word == word.upper() and len(word) > 1:
        return 2
    return 3 if word == word[0].upper() + word[1:].lower() else 4


def tags_of(scheme: str) -> list[str]:
    """Return all tags of a scheme.

    >>> len(tags_of("iob2")), len(tags_of("iobes"))
    (9, 17)
    """
    return ["O", *(f"{mark}-{kind}" for kind in TYPES for mark in MARKS[scheme])]


def may_follow(before: str, after: str, scheme: str) -> bool:
    """Return whether a tag may stand after another one.

    >>> may_follow("O", "I-PER", "iob2"), may_follow("B-PER", "I-PER", "iob2")
    (False, True)
    >>> may_follow("B-PER", "O", "iob2"), may_follow("B-PER", "O", "iobes")
    (True, False)
    """
    if after[0] in "IE":
        return before[0] in "BI" and before[2:] == after[2:]
    return scheme == "iob2" or before[0] in "OES"


def coded(sentence: Sentence, tokens: Tokenizer, scheme: str) -> Coded:
    """Return a sentence as numbers, cut after its longest input."""
    found = tokens.encode(list(sentence.words), is_pretokenized=True)
    owners = found.word_ids[:LONGEST]
    first: dict[int, int] = {}
    for place, word in enumerate(owners):
        if word is not None:
            first.setdefault(word, place)
    number = {tag: place for place, tag in enumerate(tags_of(scheme))}
    kept = max(first) + 1
    return Coded(
        found.ids[:LONGEST],
        [0 if word is None else shape_of(sentence.words[word]) for word in owners],
        [first.get(word, 0) for word in range(kept)],  # a word without pieces has the first mark
        [number[tag] for tag in sentence.tags(scheme)[:kept]],
    )


def entity_graph(sentences: Sequence[Sentence], tokens: Tokenizer, seed: int) -> fb.Graph:
    """Relate word pieces that begin words of the same type of entity, in most places where they do.

    Pieces that mostly begin words outside of entities have no edges.
    """
    kinds: dict[int, Counter[str]] = {}
    for sentence in sentences:
        pieces = tokens.encode(list(sentence.words), is_pretokenized=True)
        begun: set[int] = set()
        for piece, word in zip(pieces.ids, pieces.word_ids, strict=True):
            if word is not None and word not in begun:
                begun.add(word)
                kind = sentence.tags()[word].partition("-")[2]
                kinds.setdefault(piece, Counter())[kind] += 1
    most = {piece: counts.most_common(1)[0][0] for piece, counts in kinds.items()}
    ids = [piece for piece, kind in most.items() if kind]
    values = [most[piece] for piece in ids]
    objects = tokens.get_vocab_size()
    return fb.Graph.from_attributes(objects, (ids, values), most=NEIGHBORS, seed=seed)


# ---------------------------------------------------------------------------------- the model


class Tagger(nn.Module):
    """Word pieces, shapes, a transformer, scores of the tags of each word, a CRF."""

    def __init__(self, encoder: Any, scheme: str, shapes: bool, dropout: float) -> None:
        super().__init__()
        from torchcrf import CRF

        self.encoder, self.names, width = encoder, tags_of(scheme), encoder.config.hidden_size
        self.shapes = nn.ModuleList(nn.Embedding(SHAPES, width) for _ in range(2 * shapes))
        for table in self.shapes:
            nn.init.zeros_(cast(nn.Embedding, table).weight)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, len(self.names))
        self.crf = CRF(len(self.names), batch_first=True)
        with torch.no_grad():
            for i, before in enumerate(self.names):
                for j, after in enumerate(self.names):
                    if not may_follow(before, after, scheme):
                        self.crf.transitions[i, j] = FORBIDDEN
                if not may_follow("O", before, scheme):
                    self.crf.start_transitions[i] = FORBIDDEN
                if not may_follow(before, "O", scheme):
                    self.crf.end_transitions[i] = FORBIDDEN

    def scores(self, batch: Batch) -> Tensor:  # -> [B, words, tags]
        """Return the scores of the tags of each word."""
        inputs = self.encoder.embeddings.word_embeddings(batch.pieces)
        inputs = inputs + self.shapes[0](batch.shapes) if self.shapes else inputs
        found = self.encoder(inputs_embeds=inputs, attention_mask=batch.attention)
        states = found.last_hidden_state
        states = states + self.shapes[1](batch.shapes) if self.shapes else states
        words = states[torch.arange(len(states))[:, None], batch.first]
        scores: Tensor = self.head(self.dropout(words))
        return scores

    def loss(self, batch: Batch) -> Tensor:
        """Return the negative log-likelihood of the tags, per word."""
        found: Tensor = self.crf(
            self.scores(batch), batch.tags, mask=batch.words, reduction="token_mean"
        )
        return -found

    @torch.no_grad()
    def tags(self, batch: Batch) -> list[list[str]]:
        """Return the best tags of each sentence, IOB2."""
        best = self.crf.decode(self.scores(batch), mask=batch.words)
        marks = str.maketrans("SE", "BI")
        return [
            [self.names[tag][0].translate(marks) + self.names[tag][1:] for tag in own]
            for own in best
        ]


def opened_encoder(settings: Mapping[str, Any], source: Tagged) -> tuple[Any, Tokenizer]:
    """Return MiniLM and its word pieces; "small": an untrained BERT and pieces of the text."""
    if settings["encoder"] == "minilm":
        folder = minilm_folder()
        tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens.no_truncation()
        tokens.no_padding()
        return transformers.AutoModel.from_pretrained(folder), tokens
    letters = {word.lower().rstrip("0123456789") for one in source.train for word in one.words}
    pieces = [*SPECIAL, *sorted(letters), *(f"##{digit}" for digit in range(10))]
    own = BertWordPieceTokenizer({piece: place for place, piece in enumerate(pieces)})
    config = transformers.BertConfig(vocab_size=len(pieces), **SMALL)
    small: Any = transformers.BertModel
    return small(config), own._tokenizer


# ------------------------------------------------------------------------------ training, metrics


def batches(
    sentences: Sequence[Coded], size: int, generator: torch.Generator
) -> Iterator[list[Coded]]:
    """Yield batches of sentences of like length, all in random order."""
    order = torch.randperm(len(sentences), generator=generator).tolist()
    found: list[list[int]] = []
    for start in range(0, len(order), size * POOL):
        pool = sorted(order[start : start + size * POOL], key=lambda i: len(sentences[i].pieces))
        found += [pool[place : place + size] for place in range(0, len(pool), size)]
    for place in torch.randperm(len(found), generator=generator).tolist():
        yield [sentences[i] for i in found[place]]


def train(
    model: Tagger, sentences: Sequence[Coded], settings: Mapping[str, Any], seed: int, run: Run
) -> list[dict[str, Any]]:
    """Train by AdamW; learning rates rise for a tenth of the steps and fall to 0; return losses."""
    size, epochs = settings["batch"], settings["epochs"]
    added = [p for name, p in model.named_parameters() if not name.startswith("encoder.")]
    body, rates = [*model.encoder.parameters()], (settings["lr"], settings["head_lr"])
    optimizer = torch.optim.AdamW(
        [{"params": body}, {"params": added}], weight_decay=settings["weight_decay"]
    )
    count = -(-len(sentences) // size)
    steps, warm = epochs * count, max(1, epochs * count // 10)
    generator = torch.Generator().manual_seed(seed)
    saved, begun = run.checkpoints(settings, seed), 0
    history: list[dict[str, Any]] = []
    if saved.latest() is not None:
        state = saved.restore(model=model, optimizer=optimizer)
        begun, history = state["step"], state["extra"]["history"]
    model.train()
    with show_progress(run.title, steps, completed=begun, shown=run.shown) as shown:
        for step, batch in enumerate(
            batch for _ in range(epochs) for batch in batches(sentences, size, generator)
        ):
            if step < begun:
                continue
            factor = min((step + 1) / warm, (steps - step) / (steps - warm + 1))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            loss = model.loss(batch_of(batch))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            shown.update(advance=1, note=f"loss {loss.item():.3f}")
            if step % EVERY == EVERY - 1 or step == steps - 1:
                history.append({"step": step + 1, "loss": loss.item()})
                saved.save(step + 1, model=model, optimizer=optimizer, history=history)
    return history


def measured(
    model: Tagger, sentences: Sequence[Sentence], tokens: Tokenizer, scheme: str
) -> dict[str, float]:
    """Return accuracy, precision, recall and F1 of entities (seqeval)."""
    from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score

    model.eval()
    right = [sentence.tags() for sentence in sentences]
    numbers = [coded(sentence, tokens, scheme) for sentence in sentences]
    found = [["O"] * len(tags) for tags in right]  # also of words beyond the longest input
    order = sorted(range(len(numbers)), key=lambda i: len(numbers[i].pieces))
    for start in range(0, len(order), 64):
        places = order[start : start + 64]
        for place, tags in zip(
            places, model.tags(batch_of([numbers[i] for i in places])), strict=True
        ):
            found[place][: len(tags)] = tags
    return {
        "accuracy": float(accuracy_score(right, found)),
        "precision": float(precision_score(right, found, zero_division=0)),
        "recall": float(recall_score(right, found, zero_division=0)),
        "f1": float(f1_score(right, found, zero_division=0)),
    }


def run_tagging(settings: Mapping[str, Any], seed: int, source: Tagged, run: Run) -> Outcome:
    """Fine-tune with or without SSE (``p``; ``rho``: over the graph), and measure on validation and test part."""
    require("tagging", {"yardsticks": ["torchcrf", "seqeval"]})
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    scheme = settings["scheme"]
    encoder, tokens = opened_encoder(settings, source)
    sentences = source.train
    details: dict[str, Any] = {}
    if settings["p"]:
        graph = entity_graph(sentences, tokens, seed) if "rho" in settings else None
        special: list[int] = [
            place for token in SPECIAL[1:] if (place := tokens.token_to_id(token)) is not None
        ]
        encoder.embeddings.word_embeddings = fb.SSE(
            encoder.embeddings.word_embeddings,
            settings["p"],
            graph=graph,
            rho=settings.get("rho", 1.0),
            exclude=special,
            generator=torch.Generator().manual_seed(seed),
        )
        if graph is not None:
            related = int((graph.degrees > 0).sum())
            details = {"related_pieces": related, "edges": int(graph.degrees.sum()) // 2}
    model = Tagger(encoder, scheme, settings["shapes"], settings["dropout"])
    numbers = [coded(sentence, tokens, scheme) for sentence in sentences]
    history = train(model, numbers, settings, seed, run)
    validation = measured(model, source.validation, tokens, scheme)
    measures = measured(model, source.test, tokens, scheme)
    measures |= {f"validation_{name}": value for name, value in validation.items()}
    run.checkpoints(settings, seed).clear()
    return Outcome(measures, history, details)

"""The loss of a compressed model against the original, measured on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from featherbed.errors import DataError
from featherbed.interop.pretrained import load_model, token_ids_alone
from featherbed.interop.tuning import evaluation_mode, measure_model, predicts_next
from featherbed.io.texts import open_tokenizer

LENGTH = 64  # tokens of a sequence of a causal model
MOST = 400  # sentences compared pair by pair
BATCH = 32
SENTENCES = (
    "A woman in a red coat waits for the tram at the corner.",
    "Two boys kick a ball against the wall of the school.",
    "The old man reads his newspaper on a bench in the park.",
    "Heavy rain is expected in the north of the country tonight.",
    "The storm will bring a lot of rain to the northern regions.",
    "Our flight was cancelled, so we took the night train instead.",
    "She has been learning to play the violin for three years.",
    "The company reported higher profits than analysts had expected.",
    "Shares of the company fell after the profit warning.",
    "Add the flour slowly and stir until the dough is smooth.",
    "The recipe calls for two eggs, some butter and a little salt.",
    "Doctors recommend at least half an hour of exercise a day.",
    "The patient was given a new drug against high blood pressure.",
    "Parliament will vote on the new tax law next week.",
    "The minister resigned after the vote was lost.",
    "A small dog runs through the snow with a stick in its mouth.",
    "The cat is asleep on the warm stones in front of the house.",
    "How do I change the password of my account?",
    "I forgot my password and cannot log in any more.",
    "The telescope discovered a planet that orbits two stars.",
    "Astronomers measured the light of a distant galaxy.",
    "The museum is closed on Mondays and on public holidays.",
    "Their new album was recorded in a church in the mountains.",
    "The goalkeeper saved a penalty in the last minute of the match.",
    "Workers repaired the bridge that the flood had damaged.",
    "Children under six years of age travel free of charge.",
    "The novel tells the story of a family over three generations.",
    "Please send the signed contract back to us by Friday.",
    "The battery of this phone lasts for about two days.",
    "Fresh vegetables are sold at the market every morning.",
    "He opened the window because the room was too warm.",
    "The train to the airport leaves every twenty minutes.",
)


@dataclass(frozen=True)
class FolderLoss:
    """Loss of a compressed model: one number to compare by, and its description."""

    value: float  # mean |change of cosine|, or divergence of the next token
    text: str

    def __str__(self) -> str:
        return self.text


def measure_loss(
    original: str | Path, compressed: str | Path, sentences: Sequence[str] = ()
) -> FolderLoss:
    """Return the loss of a compressed folder on ``sentences`` or on 32 built-in sentences.

    For causal models it is the change of the perplexity, for others the mean |change of cosine| of
    the mean states of all pairs of sentences. Without a tokenizer.json, random tokens are used.
    """
    before, after = (load_model(folder).eval() for folder in (original, compressed))
    given = f"{len(sentences):,} given sentences" if sentences else "built-in sentences"
    ids, note = tokenize(Path(original), sentences or SENTENCES, before), given
    if ids is None:
        draw = torch.Generator().manual_seed(0)
        size = before.config.get_text_config().vocab_size
        ids = list(torch.randint(size, (32, 16), generator=draw))
        note = "random tokens, for lack of a tokenizer.json"
    causal = predicts_next(before, torch.empty(0))
    if sum(map(len, ids)) < 2 or (len(ids) < 2 and not causal):
        raise DataError(f"too little text ({note}): give at least two sentences")
    with token_ids_alone(before):
        if causal:
            return _perplexity(before, after, torch.cat(ids), note)
        first, second = (sentence_vectors(model, ids[:MOST]) for model in (before, after))
    pairs = torch.triu_indices(len(first), len(first), 1)
    cosine = [(rows[pairs[0]] * rows[pairs[1]]).sum(1) for rows in (first, second)]
    change = (cosine[1] - cosine[0]).abs()
    mean, most = float(change.mean()), float(change.max())
    return FolderLoss(mean, f"change of cosine {mean:.4f} on average, at most {most:.4f} ({note})")


def tokenize(folder: Path, sentences: Sequence[str], model: Any) -> list[Tensor] | None:
    """Return the token ids of sentences; None if the folder has no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = open_tokenizer(file.read_text(encoding="utf-8"), own=False)
    most = min(getattr(model.config, "max_position_embeddings", None) or LENGTH, 512)
    found = [one.ids[:most] for one in tokenizer.encode_batch(list(sentences))]
    rows = model.config.get_text_config().vocab_size
    if any(number >= rows for one in found for number in one):
        raise DataError(f"{file} has more tokens than the model has rows, {rows:,}")
    return [torch.tensor(one) for one in found if one]


def _perplexity(before: Any, after: Any, flat: Tensor, note: str) -> FolderLoss:
    length = min(LENGTH, len(flat), getattr(before.config, "max_position_embeddings", LENGTH))
    ids = flat[: len(flat) // length * length].reshape(-1, length)
    found = [measure_model(model, before, ids) for model in (before, after)]
    first, second = (one.perplexity or float("nan") for one in found)
    text = f"perplexity {first:.2f} -> {second:.2f}, {second / first - 1:+.2%} ({note})"
    return FolderLoss(found[1].divergence, text)


@torch.no_grad()
def sentence_vectors(model: Any, ids: Sequence[Tensor]) -> Tensor:  # -> [sentences, d]
    """Return the mean of the last hidden states of each sentence, of length 1."""
    rows = []
    for start in range(0, len(ids), BATCH):
        part = list(ids[start : start + BATCH])
        batch = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in part], True)
        given = {"input_ids": batch, "attention_mask": mask}
        if model.config.is_encoder_decoder:
            given["decoder_input_ids"] = batch
        with evaluation_mode(model):
            found = model.base_model(**given, output_hidden_states=True)
        # T5 with a head is its own base model, without last_hidden_state
        states = getattr(found, "last_hidden_state", None)
        states = found.decoder_hidden_states[-1] if states is None else states
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        rows.append(torch.nn.functional.normalize(mean.float(), dim=-1))
    return torch.cat(rows)

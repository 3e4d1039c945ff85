"""``fb.distill_model``: a static encoder from a sentence encoder, in the manner of model2vec.

Every token passes through the encoder once, alone; its vector is the mean of the states, projected
onto the first principal components and weighted by smooth inverse frequency, a / (a + p), where
Zipf's law gives p by the rank of the token (Arora et al. 2017; Tulkens and van Dongen 2024).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featherbed.checks import check_integer
from featherbed.codecs.codec import ProgressCallback, no_progress
from featherbed.errors import ArgumentError, DataError
from featherbed.interop.encoder import read_tokenizer, write_encoder
from featherbed.interop.pretrained import load_model, token_ids_alone
from featherbed.interop.tuning import evaluation_mode
from featherbed.io.texts import open_tokenizer
from featherbed.packed.table import PackedTable

SMOOTHING = 1e-4  # a of the weights
BATCH = 512  # tokens encoded at once
UNUSED = re.compile(r"\[unused\d+\]|<unused\d+>")


def distill_model(
    folder: str | Path,
    out: str | Path,
    *,
    dim: int = 256,
    ratio: float | None = None,
    budget: int | str | None = None,
    method: str = "blocks",
    generator: Any = None,
    tell: ProgressCallback = no_progress,
) -> PackedTable:
    """Make a static encoder of a saved sentence encoder and write it compactly; return its table.

    ``fb.Encoder(out).encode(texts)`` uses it with numpy and tokenizers alone.

    Args:
        folder: a ``transformers`` or sentence-transformers model with its tokenizer.json.
        out: folder to write.
        dim: number of principal components, the width of the vectors.
        ratio, budget: size of the table (default: a ratio of 16, a quarter of int8).
        method: "blocks" (one small dictionary for blocks of columns, frequent tokens in narrower
            ones: the most precise at this size, for a ``dim`` that 8 divides), or see
            ``fb.compress``.
        generator, tell: see ``fb.compress``.

    >>> import transformers
    >>> from tokenizers import Tokenizer, models
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> place, config = getfixture("tmp_path"), transformers.BertConfig(vocab_size=2000, **sizes)
    >>> transformers.BertModel(config).save_pretrained(place / "bert")
    >>> words = {f"w{n}": n for n in range(2000)}
    >>> Tokenizer(models.WordLevel(words, "w0")).save(str(place / "bert" / "tokenizer.json"))
    >>> distill_model(place / "bert", place / "static", dim=8, ratio=2, method="int8").rows
    2000
    """
    source = Path(folder)
    check_integer("dim", dim)
    text = read_tokenizer(source)
    if Path(out).exists():
        raise ArgumentError(f"{out} exists: name a folder that does not")
    model = load_model(source).eval()
    rows = token_vectors(model, text, tell)
    tokens = open_tokenizer(text, own=False).get_vocab()
    used = np.zeros(len(rows), dtype=bool)
    used[[number for token, number in tokens.items() if not UNUSED.fullmatch(token)]] = True
    rows = weight_by_rank(project(rows, used, dim), used)
    ratio = 16 if ratio is None and budget is None else ratio
    settings = {"ratio": ratio, "budget": budget, "method": method, "generator": generator}

    def tell_second(description: str, share: float) -> None:
        tell(description, 0.5 + 0.5 * share)

    config = {"tokenizer_name": source.name, "apply_pca": rows.shape[1]}
    config |= {"sif_coefficient": SMOOTHING, "architectures": ["StaticModel"]}
    return write_encoder(Path(out), rows, text, config, **settings, tell=tell_second)


@torch.no_grad()
def token_vectors(model: Any, tokenizer: str, tell: ProgressCallback) -> NDArray[np.float32]:
    """Return the mean states of every token [V, d], encoded alone between the special tokens."""
    opened = open_tokenizer(tokenizer, own=False)
    count = max(opened.get_vocab().values()) + 1
    known = int(getattr(model.config.get_text_config(), "vocab_size", 0))
    if count > known:
        raise DataError(f"tokenizer.json has {count:,} tokens, the model {known:,} rows")
    plain, full = (opened.encode("a", add_special_tokens=one).ids for one in (False, True))
    start = next((at for at in range(len(full)) if full[at : at + len(plain)] == plain), 0)
    before, after = full[:start], full[start + len(plain) :]
    body = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    rows = []
    with evaluation_mode(model):
        for first in range(0, count, BATCH):
            ids = torch.arange(first, min(first + BATCH, count))[:, None]
            sides = [torch.tensor(side).expand(len(ids), -1) for side in (before, after)]
            batch = torch.cat([sides[0], ids, sides[1]], dim=1).long()
            mask = torch.ones_like(batch)
            with token_ids_alone(model):
                states = body(input_ids=batch, attention_mask=mask).last_hidden_state
            rows.append(states.float().mean(1).numpy())
            tell(f"encoding tokens: {first + len(ids):,} of {count:,}", 0.5 * first / count)
    return np.asarray(np.nan_to_num(np.concatenate(rows)), dtype=np.float32)


def project(
    rows: NDArray[np.float32], used: NDArray[np.bool_], dim: int
) -> NDArray[np.float32]:  # [V, d] -> [V, dim]
    """Return rows without their mean on their first ``dim`` principal components."""
    centered = rows - rows[used].mean(0)
    _, axes = np.linalg.eigh(centered[used].T @ centered[used])
    return np.asarray(centered @ axes[:, ::-1][:, :dim], dtype=np.float32)


def weight_by_rank(
    rows: NDArray[np.float32], used: NDArray[np.bool_]
) -> NDArray[np.float32]:  # [V, d] -> [V, d]
    """Return rows times a / (a + p) with p by Zipf's law of their rank; unused rows become zero."""
    rank = np.cumsum(used) + 1.0  # from 2
    frequency = np.where(used, 1 / rank, 0)
    weights = SMOOTHING / (SMOOTHING + frequency / frequency.sum())
    return np.asarray(rows * np.where(used, weights, 0)[:, None], dtype=np.float32)

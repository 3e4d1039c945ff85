"""Tokenization of texts, the same in training and serving: a word tokenizer and two encoders.

The word tokenizer follows the pipeline of Chen et al. (2019), used by Liang et al. (2021): letters,
digits and the marks ``( ) , ! ? ' ` " @`` are kept, anything else separates words, letters become
lower case, contractions are split as in the Penn Treebank. Letters of every script count as
letters, which changes nothing for ASCII text; NLTK, used by the papers, differs in rare cases.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, FormatError, MissingExtra
from featherbed.packed.keys import Keys
from featherbed.packed.vocabulary import Vocabulary

PAD, UNKNOWN, END = "<pad>", "<unk>", "<eos>"
PAD_ID, UNKNOWN_ID = 0, 1
MAX_LENGTH = 100  # default number of words per text

_WORD = re.compile(r"n't\b|'(?:s|m|d|ll|re|ve)\b|[^\W_]+|[(),!?'`\"@]")
_LETTERS = 8  # characters per word, more than most words have
_UNSAFE = 4  # words before a cut that may differ from those of the whole text
_ANY = re.compile(r"[^\W_]|[(),!?'’`\"@]")


def tokenize(text: str, limit: int | None = None) -> list[str]:
    """Split a text into lower-case words and marks, at most ``limit`` of them.

    Contractions are split: "don't" becomes "do" and "n't", "it's" becomes "it" and "'s".

    >>> tokenize("Don't panic: it's only AG-News (2005)!")
    ['do', "n't", 'panic', 'it', "'s", 'only', 'ag', 'news', '(', '2005', ')', '!']
    """
    if limit is not None and len(text) > _LETTERS * limit:
        words = tokenize(text[: _LETTERS * limit])
        if len(words) > limit + _UNSAFE:
            return words[:limit]
    if not text.isascii():
        text = unicodedata.normalize("NFC", text).replace("’", "'")
    return _WORD.findall(text.lower().replace("n't", " n't"))[:limit]


def has_words(text: str) -> bool:
    """Return whether ``tokenize`` finds any word or mark in a text.

    >>> has_words("..."), has_words("a...")
    (False, True)
    """
    return _ANY.search(text) is not None


class TextEncoder(Protocol):
    """Converts a text to ids, at most ``length`` of them."""

    length: int

    def tokens(self, text: str) -> list[str]:
        """Return the tokens of a text."""

    def ids(self, text: str) -> NDArray[np.int64]:
        """Return the ids of ``tokens(text)``."""


class WordEncoder:
    """Encodes the first ``length`` words of a text by a vocabulary; unknown words have id 1.

    ``ids_of`` maps words to ids: a dictionary, a vocabulary, or the keys of a packed table.

    >>> encoder = WordEncoder({"<pad>": 0, "<unk>": 1, "good": 2}, length=3)
    >>> encoder.ids("Good, GOOD film").tolist(), encoder.tokens("Good, GOOD film")
    ([2, 1, 2], ['good', ',', 'good'])
    """

    def __init__(
        self, ids_of: Mapping[str, int] | Keys | Vocabulary, length: int = MAX_LENGTH
    ) -> None:
        self.length = check_length(length)
        self._ids_of = ids_of

    def tokens(self, text: str) -> list[str]:
        """Return the first ``length`` words of a text."""
        return tokenize(text, self.length)

    def ids(self, text: str) -> NDArray[np.int64]:
        """Return the ids of the first ``length`` words of a text."""
        words = self.tokens(text)
        if isinstance(self._ids_of, Mapping):
            rows = (self._ids_of.get(word, UNKNOWN_ID) for word in words)
            return np.fromiter(rows, dtype=np.int64, count=len(words))
        found = self._ids_of.ids(words)
        return np.where(found < 0, UNKNOWN_ID, found)


class SubwordEncoder:
    """Encodes the first ``length`` subwords of a text by a tokenizer of the ``tokenizers`` package.

    ``tokenizer`` is its JSON text.
    """

    def __init__(self, tokenizer: str, length: int = MAX_LENGTH) -> None:
        self.length = check_length(length)
        self._tokenizer = open_tokenizer(tokenizer)

    def _encode(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def tokens(self, text: str) -> list[str]:
        """Return the first ``length`` subwords of a text."""
        tokens: list[str] = self._encode(text).tokens[: self.length]
        return tokens

    def ids(self, text: str) -> NDArray[np.int64]:
        """Return the ids of the first ``length`` subwords of a text."""
        return np.array(self._encode(text).ids[: self.length], dtype=np.int64)


def open_tokenizer(text: str, *, own: bool = True) -> Any:
    """Return the tokenizer that a JSON text describes, without padding and truncation.

    One of our ``own`` has the tokens of padding and of unknown words in front.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtra("tokenizers", "text", "splitting words into subwords") from None
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing narrower
        raise FormatError(f"the tokenizer cannot be read: {str(error)[:100]}") from None
    ids = [tokenizer.token_to_id(token) for token in (PAD, UNKNOWN)]
    if own and ids != [PAD_ID, UNKNOWN_ID]:
        raise FormatError(
            f"the tokenizer must have {PAD} as token {PAD_ID} and {UNKNOWN} as token {UNKNOWN_ID}"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def check_length(length: int) -> int:
    """Return the maximum number of words per text, an integer of at least 1."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ArgumentError(f"length={length!r}: give a whole number of at least 1")
    return length


def build_vocabulary(
    tokens: Sequence[str], *, min_count: int = 1, max_words: int | None = None
) -> tuple[tuple[str, ...], NDArray[np.int32]]:  # -> V, [N]
    """Return the vocabulary of a list of tokens, and the id of each token.

    The vocabulary is ``<pad>``, ``<unk>``, then words by decreasing count, ties in alphabetical
    order; words rarer than ``min_count`` or beyond ``max_words`` are unknown.

    >>> words, ids = build_vocabulary(["a", "b", "b", "c"], max_words=4)
    >>> words, ids.tolist()
    (('<pad>', '<unk>', 'b', 'a'), [3, 2, 2, 1])
    """
    found = Vocabulary.count([tokens], min_count=min_count, most=max_words, special=(PAD, UNKNOWN))
    return tuple(found), found.ids(tokens, default=UNKNOWN_ID).astype(np.int32)


def train_subwords(texts: Sequence[str], size: int, length: int = MAX_LENGTH) -> str:
    """Train byte-pair encoding (Sennrich et al. 2016) with at most ``size`` subwords.

    Subwords are numbered by decreasing count in the first ``length`` subwords of the texts; "▁" is
    the space before a word. Returns the JSON text of the tokenizer.
    """
    try:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    except ImportError:
        raise MissingExtra("tokenizers", "text", "splitting words into subwords") from None

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
    )
    special, alphabet = [PAD, UNKNOWN], max(size // 2, 1)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, limit_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    flat = chain.from_iterable(item.ids[:length] for item in encoded)
    ids = np.fromiter(flat, dtype=np.int64)
    counts = np.bincount(ids, minlength=tokenizer.get_vocab_size()).tolist()
    description = json.loads(tokenizer.to_str())
    id_of: dict[str, int] = description["model"]["vocab"]
    subwords = sorted(set(id_of) - set(special), key=lambda word: (-counts[id_of[word]], word))
    description["model"]["vocab"] = {
        word: number for number, word in enumerate([*special, *subwords])
    }
    return json.dumps(description, ensure_ascii=False)


def subwords_of(tokenizer: str) -> tuple[str, ...]:
    """Return the subwords of a tokenizer, given as JSON text, in the order of their ids."""
    id_of: dict[str, int] = json.loads(tokenizer)["model"]["vocab"]
    return tuple(sorted(id_of, key=id_of.__getitem__))

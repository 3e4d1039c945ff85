"""From a text to word ids, the same way in training and in serving: one tokenizer, two encoders, no torch.

The tokenizer follows the pipeline of Chen et al. (2019), which Liang et al. (2021) train on: letters, digits and the marks
``( ) , ! ? ' ` " @`` are kept, all else parts words, letters become small, contractions are split as in the Penn Treebank.
Letters of every script count as letters, which changes nothing in ASCII text; NLTK, which they use, differs in rare cases.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import unicodedata
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featherbed.errors import ArgumentError, DataError, FormatError, MissingExtra, UnknownKeyError
from featherbed.packed.keys import Keys

PAD, UNKNOWN = "<pad>", "<unk>"
PAD_ID, UNKNOWN_ID = 0, 1
LENGTH = 100  # words of a text that are read
BLOCK = 1 << 20  # bytes of a text file that are read at once
LARGE = 1 << 28  # bytes that any packed file may unpack to
MOST_RATIO = 200  # how many times larger a packed file may become beyond that

_WORD = re.compile(r"n't\b|'(?:s|m|d|ll|re|ve)\b|[^\W_]+|[(),!?'`\"@]")
_LETTERS, _SPOILT = (
    8,
    4,
)  # of a word, more than most have; words at a cut that may differ from those of the whole text
_PACKED: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
_BINARY = {
    b"\xff\xfe": "UTF-16 text: give --encoding utf-16, or save it as UTF-8",
    b"\xfe\xff": "UTF-16 text: give --encoding utf-16, or save it as UTF-8",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": "a Parquet file: write it as CSV or JSON lines",
    b"\x28\xb5\x2f\xfd": "packed by zstd: unpack it",
}
_ANY = re.compile(r"[^\W_]|[(),!?'’`\"@]")


def tokenize(text: str, most: int | None = None) -> list[str]:
    """Return the words and marks of a text in small letters, the first ``most`` if given.

    Contractions are split: "don't" is "do" and "n't", "it's" is "it" and "'s".

    >>> tokenize("Don't panic: it's only AG-News (2005)!")
    ['do', "n't", 'panic', 'it', "'s", 'only', 'ag', 'news', '(', '2005', ')', '!']
    """
    if most is not None and len(text) > _LETTERS * most:
        words = tokenize(text[: _LETTERS * most])
        if len(words) > most + _SPOILT:
            return words[:most]
    if not text.isascii():
        text = unicodedata.normalize("NFC", text).replace("’", "'")
    return _WORD.findall(text.lower().replace("n't", " n't"))[:most]


def has_words(text: str) -> bool:
    """Whether ``tokenize`` finds anything in a text.

    >>> has_words("..."), has_words("a...")
    (False, True)
    """
    return _ANY.search(text) is not None


class Encoder(Protocol):
    """How a text becomes ids."""

    length: int

    def tokens(self, text: str) -> list[str]:
        """Return what the text is cut into, at most ``length`` of it."""

    def ids(self, text: str) -> NDArray[np.int64]:
        """Return the ids of ``tokens(text)``."""


class WordEncoder:
    """Whole words by a vocabulary; unknown ones have the id 1.

    ``ids_of`` maps words to ids; the keys of a packed table will do. Texts are cut after ``length`` words, not padded.

    >>> encoder = WordEncoder({"<pad>": 0, "<unk>": 1, "good": 2}, length=3)
    >>> encoder.ids("Good, GOOD film").tolist(), encoder.tokens("Good, GOOD film")
    ([2, 1, 2], ['good', ',', 'good'])
    """

    def __init__(self, ids_of: Mapping[str, int] | Keys, length: int = LENGTH) -> None:
        self.length = checked_length(length)
        self._ids_of = ids_of

    def tokens(self, text: str) -> list[str]:
        """Return the first ``length`` words of a text."""
        return tokenize(text, self.length)

    def ids(self, text: str) -> NDArray[np.int64]:
        """Return the ids of the first ``length`` words of a text."""
        words = self.tokens(text)
        return np.fromiter(map(self._id, words), dtype=np.int64, count=len(words))

    def _id(self, word: str) -> int:
        if not isinstance(self._ids_of, Keys):
            return self._ids_of.get(word, UNKNOWN_ID)
        try:
            return int(self._ids_of.find([word])[0])
        except UnknownKeyError:
            return UNKNOWN_ID


class SubwordEncoder:
    """Pieces of words by a tokenizer of the ``tokenizers`` package, given as its JSON text."""

    def __init__(self, tokenizer: str, length: int = LENGTH) -> None:
        self.length = checked_length(length)
        self._tokenizer = open_tokenizer(tokenizer)

    def tokens(self, text: str) -> list[str]:
        """Return the first ``length`` pieces of a text."""
        found: list[str] = self._tokenizer.encode(text, add_special_tokens=False).tokens
        return found[: self.length]

    def ids(self, text: str) -> NDArray[np.int64]:
        """Return the ids of the first ``length`` pieces of a text."""
        return np.array(
            self._tokenizer.encode(text, add_special_tokens=False).ids[: self.length],
            dtype=np.int64,
        )


def open_tokenizer(text: str) -> Any:
    """Return the tokenizer that a JSON text describes, without padding and cutting of its own."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtra("tokenizers", "text", "cutting words into pieces") from None
    try:
        made = Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing narrower
        raise FormatError(f"the tokenizer cannot be read: {str(error)[:100]}") from None
    if made.token_to_id(PAD) != PAD_ID or made.token_to_id(UNKNOWN) != UNKNOWN_ID:
        raise FormatError(
            f"the tokenizer must have {PAD} as token {PAD_ID} and {UNKNOWN} as token {UNKNOWN_ID}"
        )
    made.no_padding()
    made.no_truncation()
    return made


def checked_length(length: int) -> int:
    """Return how many words of a text are read, which must be a whole number from 1 on."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ArgumentError(f"length={length!r}: give a whole number of words from 1 on")
    return length


def vocabulary(
    tokens: Sequence[str], *, min_count: int = 1, most: int | None = None
) -> tuple[tuple[str, ...], NDArray[np.int32]]:  # -> V, [N]
    """Return ``<pad>``, ``<unk>`` and the words by falling count, equals by the alphabet, and the ids of ``tokens``.

    >>> words, ids = vocabulary(["a", "b", "b", "c"], most=4)
    >>> words, ids.tolist()
    (('<pad>', '<unk>', 'b', 'a'), [3, 2, 2, 1])
    """
    first: dict[str, int] = {}
    places = np.fromiter(
        (first.setdefault(word, len(first)) for word in tokens), dtype=np.int64, count=len(tokens)
    )
    found, often = list(first), np.bincount(places, minlength=len(first)).tolist()
    order = sorted(range(len(found)), key=lambda at: (-often[at], found[at]))
    kept = [at for at in order if often[at] >= min_count]
    kept = kept if most is None else kept[: max(most - 2, 0)]
    number = np.full(len(found), UNKNOWN_ID, dtype=np.int32)
    number[kept] = np.arange(2, len(kept) + 2)
    return (PAD, UNKNOWN, *(found[at] for at in kept)), number[places]


def learn_subwords(texts: Sequence[str], size: int, length: int = LENGTH) -> str:
    """Learn at most ``size`` pieces of words by byte-pair encoding (Sennrich et al. 2016); return the tokenizer's JSON text.

    Pieces are numbered by falling count in the first ``length`` pieces of the texts; "▁" is the blank before a word.
    """
    if find_spec("tokenizers") is None:
        raise MissingExtra("tokenizers", "text", "cutting words into pieces")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token=UNKNOWN, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
    )
    special, alphabet = [PAD, UNKNOWN], max(size // 2, 1)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, limit_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer, length=len(texts))
    flat = chain.from_iterable(
        item.ids[:length] for item in made.encode_batch_fast(texts, add_special_tokens=False)
    )
    often = np.bincount(np.fromiter(flat, dtype=np.int64), minlength=made.get_vocab_size())
    held = json.loads(made.to_str())
    numbers: dict[str, int] = held["model"]["vocab"]
    pieces = sorted(
        set(numbers) - set(special), key=lambda piece: (-int(often[numbers[piece]]), piece)
    )
    held["model"]["vocab"] = {piece: number for number, piece in enumerate([*special, *pieces])}
    return json.dumps(held, ensure_ascii=False)


def pieces_of(tokenizer: str) -> tuple[str, ...]:
    """Return the pieces of a tokenizer, given as JSON text, in the order of their ids."""
    numbers: dict[str, int] = json.loads(tokenizer)["model"]["vocab"]
    return tuple(sorted(numbers, key=numbers.__getitem__))


def read_text(path: Path, encoding: str | None = None) -> str:
    """Return the text of a file, unpacked if gzip, bzip2 or xz packed it, and decoded; line ends become newlines.

    >>> path = getfixture("tmp_path") / "a.txt.gz"
    >>> _ = path.write_bytes(gzip.compress(b"one\\r\\ntwo\\n"))
    >>> read_text(path)
    'one\\ntwo\\n'
    """
    try:
        return _decoded(path, _unpacked(path), encoding)
    except MemoryError:
        raise DataError(
            f"{path} does not fit into memory: give a smaller file, or parts of it"
        ) from None


def _decoded(path: Path, data: bytearray, encoding: str | None) -> str:
    """Return bytes as text, line ends as newlines, or say why they are no text."""
    kind = next((kind for magic, kind in _BINARY.items() if data.startswith(magic)), "")
    if kind and encoding is None:
        raise DataError(f"{path} is {kind}")
    try:
        made = data.decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        line, found = (
            1 + data.count(b"\n", 0, error.start),
            f"byte 0x{data[error.start]:02x} at offset {error.start:,}",
        )
        name = encoding or "UTF-8"
        raise DataError(
            f"{path}, line {line}: {found} is no {name} text: give --encoding, such as latin-1"
        ) from None
    except LookupError:
        raise ArgumentError(
            f"encoding={encoding!r} is not known: give a name such as utf-8 or latin-1"
        ) from None
    if "\0" in made:
        line = 1 + made.count("\n", 0, made.index("\0"))
        raise DataError(
            f"{path}, line {line}: a zero byte; this is no text: give a text file, or its --encoding"
        )
    return made.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _unpacked(path: Path) -> bytearray:
    opener: Callable[[Any], Any] | None = None
    try:
        with path.open("rb") as raw:
            start = raw.read(8)
            raw.seek(0)
            opener = next(
                (opener for magic, opener in _PACKED.items() if start.startswith(magic)), None
            )
            most = None if opener is None else max(LARGE, MOST_RATIO * path.stat().st_size)
            return _read_all(path, raw if opener is None else opener(raw), most)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        fault = "cannot be read" if opener is None else "is packed and not complete"
        raise DataError(f"{path} {fault} ({str(error)[:100]}): get it again") from None


def _read_all(path: Path, stream: Any, most: int | None) -> bytearray:
    """Read a stream in blocks, at most ``most`` bytes of it."""
    data = bytearray()
    while block := stream.read(BLOCK):
        data += block
        if most is not None and len(data) > most:
            raise DataError(
                f"{path} unpacks to more than {most:,} bytes, {MOST_RATIO} times its size, as no text does: "
                "unpack it first if it is one"
            )
    return data

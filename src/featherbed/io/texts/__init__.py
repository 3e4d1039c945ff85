"""Readers of texts: labeled texts for classifiers, plain text for language models; tokenizers."""

from featherbed.io.texts.corpus import Corpus, read_corpus, read_ptb
from featherbed.io.texts.labeled import LabeledTexts, read_texts
from featherbed.io.texts.tokenizer import (
    END,
    MAX_LENGTH,
    PAD,
    PAD_ID,
    UNKNOWN,
    UNKNOWN_ID,
    SubwordEncoder,
    TextEncoder,
    WordEncoder,
    build_vocabulary,
    check_length,
    open_tokenizer,
    subwords_of,
    tokenize,
    train_subwords,
)

__all__ = [
    "END",
    "MAX_LENGTH",
    "PAD",
    "PAD_ID",
    "UNKNOWN",
    "UNKNOWN_ID",
    "Corpus",
    "LabeledTexts",
    "SubwordEncoder",
    "TextEncoder",
    "WordEncoder",
    "build_vocabulary",
    "check_length",
    "open_tokenizer",
    "read_corpus",
    "read_ptb",
    "read_texts",
    "subwords_of",
    "tokenize",
    "train_subwords",
]

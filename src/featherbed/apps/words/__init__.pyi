from featherbed.apps.words.insight import row_kind as row_kind
from featherbed.apps.words.insight import word_insight as word_insight
from featherbed.apps.words.table import Lexicon as Lexicon
from featherbed.apps.words.table import StorageSettings as StorageSettings
from featherbed.apps.words.table import WordTableSettings as WordTableSettings
from featherbed.apps.words.table import build_word_table as build_word_table
from featherbed.apps.words.table import glove_vectors as glove_vectors
from featherbed.apps.words.table import select_words as select_words

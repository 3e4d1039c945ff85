"""Relations between objects, from pairs, attributes, vectors, text or WordNet. No torch."""

from importlib.util import find_spec

from featherbed.errors import MissingExtra

if find_spec("scipy") is None:
    raise MissingExtra("scipy", "train", "featherbed.graphs")

from featherbed.graphs.cooccurrence import cooccurrence, cooccurrence_counts
from featherbed.graphs.edges import edge_file
from featherbed.graphs.graph import Graph
from featherbed.graphs.wordnet import wordnet

__all__ = ["Graph", "cooccurrence", "cooccurrence_counts", "edge_file", "wordnet"]

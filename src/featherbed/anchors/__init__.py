"""Where anchors come from: objects that give an AnchorTable its first atoms and transform."""

from featherbed.anchors.basis import RandomBasis
from featherbed.anchors.clusters import FrequencyThenClusters, KMeansPlusPlus
from featherbed.anchors.coreset import Coreset
from featherbed.anchors.objects import Frequency
from featherbed.anchors.random import HalfNormal, Xavier
from featherbed.anchors.selection import GroupLasso, VocabularyDropout
from featherbed.anchors.tfidf import TfIdf

__all__ = [
    "Coreset",
    "Frequency",
    "FrequencyThenClusters",
    "GroupLasso",
    "HalfNormal",
    "KMeansPlusPlus",
    "RandomBasis",
    "TfIdf",
    "VocabularyDropout",
    "Xavier",
]

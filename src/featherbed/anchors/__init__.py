"""Initializations of an AnchorTable's atoms and transform, random or with objects as anchors."""

from featherbed.anchors.clusters import Coreset, FrequencyThenClusters, KMeansPlusPlus
from featherbed.anchors.objects import Frequency, ObjectAnchors, TfIdf
from featherbed.anchors.random import HalfNormal, RandomBasis, Xavier
from featherbed.anchors.selection import GroupLasso, VocabularyDropout

__all__ = [
    "Coreset",
    "Frequency",
    "FrequencyThenClusters",
    "GroupLasso",
    "HalfNormal",
    "KMeansPlusPlus",
    "ObjectAnchors",
    "RandomBasis",
    "TfIdf",
    "VocabularyDropout",
    "Xavier",
]

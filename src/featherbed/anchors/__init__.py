"""Initializations of an AnchorTable's atoms and transform, random or with objects as anchors."""

from featherbed.anchors.basis import RandomBasis
from featherbed.anchors.clusters import FrequencyThenClusters, KMeansPlusPlus
from featherbed.anchors.coreset import Coreset
from featherbed.anchors.objects import Frequency, ObjectAnchors
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
    "ObjectAnchors",
    "RandomBasis",
    "TfIdf",
    "VocabularyDropout",
    "Xavier",
]

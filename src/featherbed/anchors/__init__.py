"""Where anchors come from: objects that give an AnchorTable its first atoms and transform."""

from featherbed.anchors.objects import Frequency
from featherbed.anchors.random import HalfNormal, Xavier

__all__ = ["Frequency", "HalfNormal", "Xavier"]

"""Parts shared by the text applications: word tables, stored files, insight."""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)

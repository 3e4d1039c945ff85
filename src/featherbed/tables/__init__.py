"""Tables: one file, one method. The public list is ``__init__.pyi``.

One line there makes a method public: ``fb.<Name>``, specs and the conformance suite find it.
"""

from featherbed.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)

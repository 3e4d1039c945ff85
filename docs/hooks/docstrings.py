"""Docstrings as the site shows them: examples become code blocks."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"(?:^|\n)((?:>>> .*)(?:\n(?!\s*\n).+)*)")


class Examples(Extension):
    """Put a fence around every example of a docstring, which Markdown would take for a quote."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:  # noqa: ARG002 - griffe's call
        """Rewrite the docstring of ``obj``."""
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)


def fence_examples(text: str) -> str:
    """Return a docstring whose examples stand in fences.

    >>> print(fence_examples("Add.\\n\\n>>> 1 + 1\\n2").replace("`", "'"))
    Add.
    <BLANKLINE>
    '''pycon
    >>> 1 + 1
    2
    '''
    """
    return EXAMPLE.sub(lambda found: f"\n```pycon\n{found[1]}\n```", text)

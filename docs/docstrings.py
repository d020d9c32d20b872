"""A griffe extension that turns the examples of docstrings into code blocks."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^|\n\n)((?: *)>>> .*?)(?=\n\s*\n|\Z)", re.DOTALL)


def fenced(text: str) -> str:
    """Return the text of a docstring with fences around its examples."""
    return _EXAMPLE.sub(r"\n\n```pycon\n\1\n```", text)


class Examples(griffe.Extension):
    """Put fences around the examples of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

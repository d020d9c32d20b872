"""What griffe reads of the docstrings: their examples become blocks of code."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^|\n\n)((?: *)>>> .*?)(?=\n\s*\n|\Z)", re.DOTALL)


def fenced(text: str) -> str:
    """The text of a docstring with fences around its examples."""
    return _EXAMPLE.sub(r"\n\n```pycon\n\1\n```", text)


class Examples(griffe.Extension):
    """Fences the examples of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

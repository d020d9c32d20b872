"""Run the examples of pages, write their output into the pages, or compare it with them.

python -m docs.outputs [PAGE ...]      such as docs/predict.md; all pages with output by default

If a fence without a language directly follows a block of Python or of `vardrop` commands, it shows
the output of that block. A line with an ellipsis stands for any number of lines, so a fence that
has one is not changed by this script. Tests compare all of them with `compare`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

from vardrop.app.cli import main

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
ELLIPSIS = "…"
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
_TIMES = re.compile(r"latency| ms\b|\bms |seconds|time    about|\d+ s$")  # lines with times
ABSOLUTE, RELATIVE = 0.02, 0.1  # tolerances of printed numbers, for other versions of torch


def run_block(language: str, source: str, module: ModuleType) -> str:
    """Run a block and return its printed output. A command that fails raises an error."""
    printed = io.StringIO()
    width = mock.patch.dict(os.environ, {"COLUMNS": "80"})
    with contextlib.redirect_stdout(printed), width:
        if language == "python":
            exec(compile(source, module.__name__, "exec"), vars(module))
        else:
            for line in source.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    _run_command(words, line)
    return printed.getvalue().rstrip() + "\n"


def _run_command(words: list[str], line: str) -> None:
    if words[0] != "vardrop":
        raise ValueError(f"Expected a command of vardrop, but got {line!r}.")
    try:
        main(words[1:])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{line!r} failed with exit code {end.code}.") from end


def run_page(page: Path, module: ModuleType) -> Iterator[tuple[str, str | None, str]]:
    """Run the blocks of a page: source, shown output if there is one, and printed output."""
    for language, source, shown in BLOCK.findall(page.read_text()):
        yield source, shown or None, run_block(language, source, module)


def compare(shown: str, printed: str) -> str:
    """The first difference between shown and printed output; empty if they agree.

    Texts have to be equal except for spaces. Numbers have to agree within a tolerance, except
    for times. An ellipsis stands for any lines.

    >>> compare("accuracy 0.958\\n…\\nend", "accuracy 0.961\\na\\nb\\nend\\n")
    ''
    >>> compare("accuracy 0.958", "accuracy 0.7")
    'accuracy 0.958 is now accuracy 0.7'
    >>> compare("latency 0.04 -> 0.02 ms", "latency 0.3 -> 0.1 ms")
    ''
    """
    lines = [line for line in printed.splitlines() if line.strip()]
    skip = timed = False
    for wanted in (line for line in shown.splitlines() if line.strip()):
        if wanted.strip() == ELLIPSIS:
            skip = True
            continue
        while skip and lines and not _agree(wanted, lines[0], timed):
            lines.pop(0)
        line = lines.pop(0) if lines else "missing"
        if not _agree(wanted, line, timed):
            return f"{wanted} is now {line}"
        skip, timed = False, timed or line.endswith("seconds")  # a table with a column of times
    return f"{lines[0]} is not shown" if lines and not skip else ""


def _agree(shown: str, printed: str, timed: bool) -> bool:
    """Whether two lines agree. The last number of a line is not compared if it is a time."""
    texts = [" ".join(_NUMBER.sub("#", line).replace("─", "").split()) for line in (shown, printed)]
    if texts[0] != texts[1]:
        return False
    if _TIMES.search(shown):
        return True
    pairs = zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True)
    numbers = [[float(text.replace(",", "")) for text in pair] for pair in pairs]
    numbers = numbers[:-1] if timed else numbers
    return all(abs(a - b) <= ABSOLUTE + RELATIVE * abs(a) for a, b in numbers)


def write_outputs(page: Path) -> None:
    """Run a page in an empty folder and update its outputs."""
    module = ModuleType(f"page_{page.stem}")
    sys.modules[module.__name__] = module

    def replace(match: re.Match[str]) -> str:
        language, source, shown = match.groups()
        output = run_block(language, source, module)
        if shown is None or ELLIPSIS in shown:
            return match[0]
        return f"```{language}\n{source}```\n\n```\n{output}```\n"

    os.chdir(tempfile.mkdtemp())
    page.write_text(BLOCK.sub(replace, page.read_text()))


if __name__ == "__main__":
    pages = [ROOT / name for name in sys.argv[1:]] or [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    for page in pages:
        if any(shown for _, _, shown in BLOCK.findall(page.read_text())):
            write_outputs(page)
            print(page.relative_to(ROOT))

"""Run the examples of pages and write their output into the pages.

python -m docs.outputs [PAGE ...]      such as docs/predict.md; all pages with output by default

If a fence without a language directly follows a block of Python or of `vardrop` commands, it shows
the output of that block. A fence with an ellipsis was shortened by hand and is not changed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from vardrop.app.cli import main

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def run_block(language: str, source: str, module: ModuleType) -> str:
    """Run a block and return its printed output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if language == "python":
            exec(compile(source, module.__name__, "exec"), vars(module))
        else:
            for line in source.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    with contextlib.suppress(SystemExit):
                        main(words[1:])
    return printed.getvalue().rstrip() + "\n"


def write_outputs(page: Path) -> None:
    """Run a page in an empty folder and update its outputs."""
    module = ModuleType(f"page_{page.stem}")
    sys.modules[module.__name__] = module

    def replace(match: re.Match[str]) -> str:
        language, source, shown = match.groups()
        output = run_block(language, source, module)
        if shown is None or "…" in shown:
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

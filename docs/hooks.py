"""Hooks of MkDocs: formulas as MathML, pages from outside docs/, and the command-line reference."""

import contextlib
import html
import io
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

from vardrop.app.cli import main

ROOT = Path(__file__).parent.parent
PLACES = {  # pages of the site whose source is outside docs/
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "benchmarks.md": "benchmarks/RESULTS.md",
    "benchmarks_how.md": "benchmarks/README.md",
    "train_step.png": "benchmarks/train_step.png",
}
_PAGES = {source: page for page, source in PLACES.items()}
_FORMULA = re.compile(
    r'<span class="arithmatex">\\\((.*?)\\\)</span>'
    r'|<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>',
    re.DOTALL,
)
_LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/ and the command-line reference."""
    for page, source in PLACES.items():
        content = (ROOT / source).read_bytes()
        files.append(File.generated(config, page, content=content))
    files.append(File.generated(config, "reference/cli.md", content=command_line_page()))
    return files


def command_line_page() -> str:
    """Return the help of every command as a Markdown page."""
    overview = _help()
    names = re.findall(r"^  (\w+) ", overview.partition("Commands:")[2], re.MULTILINE)
    text = f"# Command line\n\nThe output of `vardrop --help`.\n\n```\n{overview}```\n"
    for name in names:
        text += f"\n## vardrop {name}\n\n```\n{_help(name)}```\n"
    return text


def _help(*command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return printed.getvalue()


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside docs/ by links to their pages."""
    source = PLACES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = (ROOT / source).parent
    depth = page.file.src_uri.count("/")

    def moved(match: re.Match[str]) -> str:
        target = (here / match[2]).resolve()
        name = str(target.relative_to(ROOT)) if target.is_relative_to(ROOT) else ""
        if name in _PAGES:
            return f"{match[1]}{'../' * depth}{_PAGES[name]}{match[3]}"
        if source in _PAGES and name.startswith("docs/"):
            return f"{match[1]}{name.removeprefix('docs/')}{match[3]}"
        return match[0]

    return _LINK.sub(moved, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML, which browsers show without a script."""

    def drawn(match: re.Match[str]) -> str:
        inline, block = match[1], match[2]
        display = "inline" if block is None else "block"
        return convert(html.unescape(inline if block is None else block), display=display)

    return _FORMULA.sub(drawn, content)

"""The tree in docs/architecture.md is the tree of src/vardrop, in the order of the import contract."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"^( +)((?:\w+(?:/|\.py)(?: +|$))+)", re.MULTILINE)


def lines(indent):
    """The entries of each line of the page's tree with this indent, from top to bottom."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    (tree,) = re.findall(r"^```\nsrc/vardrop/\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [names.split() for spaces, names in LINE.findall(tree) if len(spaces) == indent]


def entries(folder):
    """The modules and packages of a folder, as the page writes them."""
    modules = {path.name for path in folder.glob("*.py") if path.name != "__init__.py"}
    return modules | {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}


def test_the_page_shows_every_module_and_package():
    source = ROOT / "src" / "vardrop"
    for indent, folder in ((2, source), (4, source / "app")):
        shown = [name for line in lines(indent) for name in line]
        assert len(shown) == len(set(shown))
        assert set(shown) == entries(folder)


def test_its_lines_are_the_layers_of_the_import_contract():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    contracts = tools["importlinter"]["contracts"]
    for indent, contract in zip((2, 4), contracts, strict=True):
        shown = [{re.sub(r"(/|\.py)$", "", name) for name in line} for line in lines(indent)]
        assert shown == [set(layer.split(" | ")) for layer in contract["layers"]]

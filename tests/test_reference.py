"""Every public name stands in the reference, once, and in a page that says what it is for."""

import importlib
import inspect
import re
import tomllib
from functools import cache

import vardrop as vd
from tests.running import ROOT
from vardrop import recipes

DOCS = ROOT / "docs"
ENTRY = re.compile(r"^::: (vardrop[\w.]*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@cache
def entries():
    pages = [page.read_text() for page in DOCS.glob("reference/*.md")]
    names = [name for page in pages for name in ENTRY.findall(page)]
    methods = {f"vardrop.recipes.{name}" for name in ("weights", "features", "classes")}
    assert methods <= set(names)  # a page of all functions in a file, a new one included
    names = [n for n in names if not n.startswith("vardrop.integrations.")]  # need packages
    built_in = [m for m, make in recipes.METHODS.items() if make.__module__ in methods]
    return [name for name in names if name not in methods] + [f"vardrop.{m}" for m in built_in]


def named(path):
    home, _, name = path.rpartition(".")
    return getattr(importlib.import_module(home), name)


def missing(names, text):
    """The names that no code, in a block or in a line, mentions."""
    used = set(re.findall(r"\w+", "\n".join(FENCE.findall(text) + re.findall(r"`[^`\n]+`", text))))
    return sorted(set(names) - used)


def test_names_in_the_reference_exist_and_stand_there_once():
    found = entries()
    assert len(found) == len(set(found))
    for path in found:
        assert named(path) is not None, path


def test_the_reference_has_every_public_name():
    found = {(path.rpartition(".")[2], id(named(path))) for path in entries()}
    assert [n for n in vd.__all__ if (n, id(getattr(vd, n))) not in found] == []


def test_every_room_of_scores_and_rules_is_whole():
    for room in (vd.metrics, vd.heads):
        names = [n for n, value in vars(room).items() if callable(value) and n[0] != "_"]
        public = [n for n in names if getattr(room, n).__module__.startswith("vardrop")]
        assert len(public) > 8
        assert missing(public, "\n".join(f"`{path}`" for path in entries())) == []


def test_every_public_name_is_used_in_a_page():
    pages = [p for p in DOCS.rglob("*.md") if p.parent.name != "reference" and p.stem != "results"]
    pages.append(DOCS.parent / "README.md")  # the table of methods
    assert missing(vd.__all__, "\n".join(page.read_text() for page in pages)) == []


def parameters(function):
    named = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return [p for p in named if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def lacking(thing):
    """The sections that the docstring of a public callable lacks."""
    doc = inspect.getdoc(thing) or ""
    returned = None if inspect.isclass(thing) else inspect.signature(thing).return_annotation
    sections = ["Args:"] if parameters(thing) else []
    sections += ["Returns:"] if sections and returned not in (None, "None") else []
    return [section for section in sections if section not in doc]


def public_callables():
    """Functions, classes and the methods that a class declares first, by name."""
    rooms = [vd, *(room for name in vd.__all__ if inspect.ismodule(room := getattr(vd, name)))]
    names = [(room, n) for room in rooms for n in getattr(room, "__all__", dir(room))]
    things = [getattr(room, n) for room, n in names if n[0] != "_"]
    for thing in (thing for thing in things if inspect.isfunction(thing) or inspect.isclass(thing)):
        name = f"{thing.__module__}.{thing.__qualname__}"
        if not name.startswith("vardrop"):
            continue
        if inspect.isfunction(thing):
            yield name, thing
        else:
            if not inspect.isabstract(thing) and not issubclass(thing, Exception):
                yield name, thing
            above = {n for base in thing.__mro__[1:] for n in vars(base)}
            for n in vars(thing).keys() - above:
                method = getattr(vars(thing)[n], "__func__", vars(thing)[n])  # of a class method
                if n[0] != "_" and inspect.isfunction(method):
                    yield f"{name}.{n}", method


def test_every_public_callable_describes_its_parameters_and_what_it_returns():
    things = dict(public_callables())
    assert len(things) > 300
    assert {name: lacking(thing) for name, thing in things.items() if lacking(thing)} == {}


def test_a_section_that_a_docstring_lacks_is_found():
    def scale(x: float) -> float:
        """Twice the number.

        Args:
            x: the number.
        """

    assert lacking(scale) == ["Returns:"]


def test_a_name_that_no_page_has_is_found():
    assert missing(["fit", "magic"], "Take `vd.fit(x)`, which is magic.") == ["magic"]


# The tree in docs/architecture.md is the tree of src/vardrop, in the order of the import contract.


LINE = re.compile(r"^( +)((?:\w+(?:/|\.py)(?: +|$))+)", re.MULTILINE)


def lines(indent):
    """The entries of each line of the page's tree with this indent, from top to bottom."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    (tree,) = re.findall(r"^```\nsrc/vardrop/\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [names.split() for spaces, names in LINE.findall(tree) if len(spaces) == indent]


def test_the_page_shows_every_module_and_package():
    source = ROOT / "src" / "vardrop"
    for indent, folder in ((2, source), (4, source / "app")):
        shown = [name for line in lines(indent) for name in line]
        assert len(shown) == len(set(shown))
        modules = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        assert set(shown) == modules | {f"{p.parent.name}/" for p in folder.glob("*/__init__.py")}


def test_its_lines_are_the_layers_of_the_import_contract():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    contracts = tools["importlinter"]["contracts"]
    for indent, contract in zip((2, 4), contracts, strict=True):
        shown = [{re.sub(r"(/|\.py)$", "", name) for name in line} for line in lines(indent)]
        assert shown == [set(layer.split(" | ")) for layer in contract["layers"]]

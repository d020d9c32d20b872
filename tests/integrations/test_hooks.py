"""Other libraries behind one door: hooks of the core, which entry points fill."""

import ast
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.integrations.models import MODELS
from tests.running import ROOT
from vardrop._core import integrations
from vardrop._core.calls import check_named

NAMES = ("transformers", "timm", "torchvision", "peft", "lightning", "vardrop.integrations")


def strings(tree):
    """The strings of a file that are no docstrings, and the modules that it imports."""
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (getattr(node, "module", None) or "", *(a.name for a in node.names))


def test_no_core_file_names_another_library():
    package = ROOT / "src" / "vardrop"
    core = [f for f in package.rglob("*.py") if f.relative_to(package).parts[0] not in ("app", "integrations")]  # fmt: skip
    found = {
        (str(file.relative_to(package)), text)
        for file in core
        for text in strings(ast.parse(file.read_text()))
        if text != "vardrop.integrations" and text.startswith(NAMES)
    }
    assert not found


def test_the_package_registers_its_integration():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = project["entry-points"]["vardrop.integrations"]
    assert set(modules) == {"transformers", "transformers_modules"}
    assert all((ROOT / "src" / Path(*m.split("."))).with_suffix(".py").is_file() for m in modules.values())  # fmt: skip


def test_an_entry_point_is_loaded_once_for_a_class_of_its_package(monkeypatch):
    def check(name, value):
        raise ValueError(f"{name} {tuple(value.shape)}")

    point = SimpleNamespace(load=lambda: integrations.register_input_check("odd_input", check))
    monkeypatch.setattr(integrations, "input_checks", {})
    asked = []

    def entry_points(group, name):
        asked.append((group, name))
        return [point] if name == "foreign" else []

    monkeypatch.setattr(integrations, "entry_points", entry_points)
    monkeypatch.setattr(integrations, "_loaded", {"torch"})
    kind = type("Layer", (nn.Module,), {"__module__": "foreign.layers"})
    check_named({"odd_input": torch.zeros(2, 3)})
    for _ in range(2):
        integrations.load_integration(kind)
    assert asked == [("vardrop.integrations", "foreign")]
    with pytest.raises(ValueError, match=r"odd_input \(2, 3\)"):
        check_named({"odd_input": torch.zeros(2, 3)})


def test_a_model_of_transformers_tells_its_positions():
    model = MODELS["gpt2"]().eval()
    vd.plan(model, vd.ard())  # loads the integration
    span, tokens = integrations.position_span(model), torch.ones(1, 5, dtype=torch.long)
    cache = model(tokens, use_cache=True).past_key_values
    step = {"input_ids": tokens[:, :1], "past_key_values": cache}
    assert (span((tokens,), {}), span((), step)) == ((0, None), (5, None))
    assert span((), {**step, "logits_to_keep": 1}) == (5, 6)
    assert integrations.position_span(nn.Linear(2, 1)) is None

"""What is shipped: files beside the code, public names."""

import re
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

import vardrop as vd

ROOT = Path(__file__).parent.parent
BESIDE = ("py.typed", "report/page.html")


def test_files_beside_the_code_are_found():
    assert all(files("vardrop").joinpath(name).is_file() for name in BESIDE)


def test_the_wheel_holds_them(tmp_path):
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling")
    (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    assert names >= {f"vardrop/{name}" for name in BESIDE}
    source = ROOT / "src"
    code = {str(p.relative_to(source)) for p in source.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == code  # and no experiments
    assert not any("experiments" in name or name.endswith(".toml") for name in names)


UNSAFE = re.compile(
    r"\btorch\.load\(|\bpickle\.\w|\bimport pickle|\bjoblib\b|\bdill\b|allow_pickle=True|(?<!\.)\beval\("
)


def test_no_file_is_read_through_pickle():
    folders = (ROOT / "src", ROOT / "experiments")
    code = [p for folder in folders for p in folder.rglob("*.py") if "testing" not in p.parts]
    assert len(code) > 100
    found = [f"{p}: {line}" for p in code for line in UNSAFE.findall(p.read_text())]
    assert not found


def test_public_names_are_there_and_once():
    assert len(set(vd.__all__)) == len(vd.__all__)
    assert all(hasattr(vd, name) for name in vd.__all__)
    assert set(vd.__all__) <= set(dir(vd))  # what a prompt completes
    assert vd.report.__name__ == "vardrop.report"
    with pytest.raises(AttributeError, match="has no attribute 'magic'"):
        _ = vd.magic

"""What is shipped: files beside the code, public names."""

import ast
import json
import re
import tomllib
import zipfile

import pytest

import vardrop as vd
from tests.running import ROOT, python
from vardrop import recipes

BESIDE = ("py.typed", "app/report/page.html")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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
    assert not [f"{p}: {line}" for p in code for line in UNSAFE.findall(p.read_text())]


# By a package of the extra, if it has another name.
BROUGHT = {"numpy": "constriction", "PIL": "matplotlib", "scipy": "scikit-learn", "sklearn": "scikit-learn"}  # fmt: skip


def test_a_package_that_is_missing_is_sought_in_an_extra_that_has_it():
    extras = PROJECT["optional-dependencies"]
    extras = {**extras, "app": extras["app"] + extras["compress"]}
    code = "\n".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))
    calls = re.findall(r'(?<!>>> )import_optional\("(\w+)[\w.]*"(?:, "(\w+)")?\)', code)
    assert {"safetensors", "pandas"} <= {package for package, _ in calls}
    for package, extra in calls:
        names = {line.partition(">=")[0] for line in extras[extra or "app"]}
        assert BROUGHT.get(package, package) in names, package


def test_every_dependency_of_an_extra_has_a_lower_bound():
    extras = PROJECT["optional-dependencies"]
    shipped = [extras[name] for name in ("compress", "app", "rl", "huggingface", "lightning")]
    lines = [line for lines in (PROJECT["dependencies"], *shipped) for line in lines]
    assert all(">=" in line or line.startswith("vardrop[") for line in lines)


def test_type_checkers_are_told_the_same_names():
    source = ast.parse((ROOT / "src" / "vardrop" / "__init__.py").read_text())
    (checked,) = (s for s in source.body if isinstance(s, ast.If))  # TYPE_CHECKING
    imports = [s for s in (*source.body, *checked.body) if isinstance(s, ast.ImportFrom)]
    told = [a.asname for s in imports for a in s.names if a.asname]
    assert sorted([*told, *recipes.__all__]) == vd.__all__


def test_placeholder_addresses_are_in_one_place():
    names = [
        *ROOT.glob("[!.]*.*"),
        *(ROOT / ".github").rglob("*.*"),
        *(ROOT / "docs").rglob("*.md"),
    ]
    texts = {path.name: path.read_text() for path in names if path.is_file()}
    assert [name for name, text in texts.items() if "example.invalid" in text] == ["pyproject.toml"]


def test_the_version_is_written_alike_everywhere():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert PROJECT["version"] == vd.__version__ == cited[1]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(\d\S+)\]", changes, re.MULTILINE)[0] == vd.__version__


MAIN = "__import__('vardrop.app.cli', fromlist=['main']).main"
MISSING = [
    # The missing package, the call, and the extra that installs the package.
    ("typer", f"{MAIN}()", "app"),
    ("matplotlib", "__import__('vardrop.app.report')", "app"),
    ("numpy", "vd.pack(torch.nn.Linear(2, 2), 'x')", "compress"),
    ("safetensors", "vd.save(torch.nn.Linear(2, 2), 'x')", "compress"),
    ("transformers", "__import__('vardrop.integrations.huggingface')", "huggingface"),
]
MISSING_SLOW = [
    ("typer", "__import__('runpy').run_module('vardrop', run_name='__main__')", "app"),
    ("jinja2", f"{MAIN}(['report', 'x'])", "app"),
    ("rich", f"{MAIN}(['methods'])", "app"),
    ("sklearn", "vd.fit('iris')", "app"),
    ("pandas", "vd.fit(([[1.0], [2.0]] * 20, [0, 1] * 20))", "app"),
    ("sklearn", "__import__('vardrop.sklearn')", "app"),
    ("safetensors", f"{MAIN}(['fit', 'iris', '--epochs', '1', '--out', 'x'])", "app"),
    ("safetensors", "vd.save_noisy(vd.Linear(2, 2), 'x')", "compress"),
]
# What the import adds, then every call in a fork of this process, without its package.
FRESH = """
import json, os, sys
import torch, vardrop as vd
print(json.dumps([sorted(sys.modules), dir(vd)]), flush=True)
for number, (package, call, _) in enumerate(json.loads(sys.argv.pop())):
    if os.fork() == 0:
        os.mkdir(f"{number}")
        os.dup2(os.open(f"{number}.txt", os.O_CREAT | os.O_WRONLY), 2)
        os.chdir(f"{number}")
        sys.modules[package] = None
        exec(call)
    else:
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def check_missing(calls, folder):
    """Make the calls in one fresh process; return the modules and names after the import."""
    done = python("-c", FRESH, json.dumps(calls), cwd=folder, check=True)
    first, *codes = map(json.loads, done.stdout.splitlines())
    assert codes == [1] * len(calls)
    for number, (package, call, extra) in enumerate(calls):
        stderr = (folder / f"{number}.txt").read_text()
        message = stderr.strip().splitlines()[-1]
        assert f"Expected the package {package} to be installed" in message
        assert f"pip install 'vardrop[{extra}]'" in message
        assert list((folder / str(number)).iterdir()) == []
        assert stderr.count("\n") == 1 or "main" not in call  # the program: one line
    return first


def test_a_missing_package_is_reported_with_its_extra_and_the_import_is_light(tmp_path):
    modules, names = check_missing(MISSING, tmp_path)
    later = ("transformers", "torch._dynamo", "sympy", "safetensors", "pandas", "sklearn")
    assert not {*later, "matplotlib", "rich", "typer", "jinja2"} & set(modules)
    assert set(names) == {*vd.__all__, "__version__"}  # before they are used
    assert not [name for name in vd.__all__ if name.startswith("_")]


@pytest.mark.slow
def test_a_missing_package_is_reported_by_fit_and_files(tmp_path):
    check_missing(MISSING_SLOW, tmp_path)


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="has no attribute 'magic'"):
        _ = vd.magic

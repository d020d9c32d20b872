"""Broken inputs: each gets one clear line and an exit code, and leaves no file behind."""

import pytest

from tests.app.cli.calling import printed

# What is typed, the exit code, and a part of the line that answers.
BROKEN = [
    ("methods --loud", 2, "No such option: --loud. Try `vardrop methods --help`."),
    ("demo --out full", 1, "full already holds files"),
    ("evalute a", 2, "No such command 'evalute'. Did you mean 'evaluate'? Try `vardrop --help`."),
    ("fit digits --recipie l0", 2, "No such option: --recipie. Did you mean '--recipe'? Try"),
    ("fit digits --recipe sparse-vd", 2, "Unknown method 'sparse-vd'. Did you mean 'sparse_vd'?"),
    ("fit digits --recipe l0 --option drop-rate=1", 2, "Did you mean 'drop_rate'?"),
    ("fit digits --rate cosin", 2, "but got 'cosin'. Did you mean 'cosine'?"),
    ("fit digit --out x", 1, "but got 'digit'. Did you mean 'digits'?"),
    ("fit houses.csv --target Prices --out x", 1, "'price'. Did you mean 'price'?"),
    ("fit houses.csv --target price --drop tow --out x", 1, "Did you mean 'town'?"),
    ("evaluate a --ood photo", 1, "but got 'photo'. Did you mean 'photos'?"),
    ("predict h twon.csv --out p.csv", 1, "no 'town'. Did you mean 'twon'?"),
    ("fit --config absent.toml", 2, "File not found: absent.toml"),
    ("fit --config houses.csv", 2, "Expected houses.csv to hold TOML, but got: "),
    ("fit --config key.toml", 2, "Unknown option 'epoch' in key.toml. Did you mean 'epochs'?"),
    ("fit --config half.toml", 2, "valid integer, unable to parse string as an integer. It is set in half.toml."),
    ("fit --config flag.toml", 2, "Expected 'compare' in flag.toml to be true or false, but got 'no'"),
    ("fit --config day.toml", 2, "Expected 'target' in day.toml to be a text, a number or a list of them, but got datetime.date(2020, 1, 1)"),
    ("fit --config deep.toml", 2, "Expected deep.toml to hold TOML, but got: "),
    ("fit --config true.toml", 2, "Expected 'target' in true.toml to be a text, a number or a list of them, but got True"),
    ("fit --config data.toml --resume --out h", 2, "cannot be combined with --resume"),
    ("fit iris --import absent.py", 2, "No module 'absent.py' is installed or in"),
    ("--import failing methods", 1, "Importing failing failed: ZeroDivisionError: division by zero. See"),
    ("--import wanting methods", 1, "Importing wanting failed: ModuleNotFoundError: No module named 'absent_package'"),
    ("fit iris --import", 2, "No module '' is installed or in"),
    ("fit", 2, "Expected DATA"),
    ("fit digits --patience 0", 2, "`patience` to be an integer of at least 1"),
    ("fit digits --warmup 5", 2, "two numbers such as 5,20"),
    ("fit digits --option rate", 2, "name=value"),
    ("fit digits --option drop_rate=0.2", 2, "--option requires --recipe"),
    ("fit iris --heteroscedastic --out x", 1, "`heteroscedastic` needs a regression"),
    ("fit digits --include nothing --out x", 1, "`include` to match a module, but got 'nothing'"),
    ("fit digits --recipe mc_dropout --out x", 1, "the net has no dropout module"),
    ("fit iris --recipe recurrent_dropout --out x", 1, "one mask per sequence is for recurrent layers"),
    ("fit iris --out a", 1, "--resume, overwrite with --force"),
    ("fit digits --recipe dropconnect --option drop_rate=7", 2, "drop_rate"),
    ("fit houses.csv --target price --task ranking", 2, "'ranking' is not one of"),
    ("fit --resume", 2, "--resume requires --out"),
    ("fit digits --resume --out a", 2, "cannot be combined with --resume"),
    ("predict h new.csv", 2, "Missing option '--out'"),
    ("predict h new.csv --out p.csv --samples 0", 2, "Invalid value for '--samples'"),
    ("compress a --max-drop 0.1 --sparsity 0.5", 2, "--max-drop cannot be combined with --sparsity"),
    ("fit mnist --data-dir broken --out x", 1, "Expected the MD5 of broken/mnist/train-images"),
    ("fit digits --out houses.csv", 1, "to be a directory, but it is a file"),
    ("fit digits --out full", 1, "overwrite with --force"),
    ("predict h new.csv --out nowhere/p.csv", 1, "nowhere/p.csv, but got: No such file"),
    ("predict a none.npy --out p.csv", 1, "(N, 1, 8, 8), but got torch.float64 of shape (0, 1, 8, 8)"),
    ("predict a complex.npy --out p.csv", 1, "(N, 1, 8, 8), but got torch.complex128"),
    ("predict torn new.csv --out p.csv", 1, "torn/best.safetensors to be a safetensors file"),
    ("predict a bad.npy --out p.csv", 1, "bad.npy to hold numbers"),
    ("predict a new.csv --out p.csv", 1, "an .npy file of shape (N, 1, 8, 8)"),
    ("predict a small.npy --out p.csv", 1, "of shape (2, 1, 5, 5)"),
    ("evaluate absent", 1, "Is this the directory of a run"),
    ("evaluate notarun", 1, "config.json to hold JSON"),
    ("evaluate future", 1, "a run of version 1"),
    ("evaluate a --ood notmnist --data-dir broken", 1, "File not found: broken/notmnist"),
    ("compress a --onnx nowhere/a.onnx", 1, "Directory not found: nowhere"),
    ("compare", 2, "Expected two or more runs, or data and --recipes"),
    ("compare a plain --epochs 3", 2, "--epochs requires --recipes"),
    ("compare a plain --scores nl", 2, "Unknown score 'nl'. Did you mean 'nll'?"),
    ("compare --recipes l0", 2, "Expected one data set with --recipes, but got none"),
    ("compare iris wine --recipes l0", 2, "Expected one data set with --recipes, but got iris, wine"),
    ("compare iris --recipes l0 --net lenet", 2, "Did you mean 'lenet5'?"),
    ("compare iris --recipes l0 --scores nl", 2, "Unknown score 'nl'. Did you mean 'nll'?"),
    ("report", 2, "Missing argument"),
    ("report a --out full", 1, "bytes to full, but got: Is a directory"),
    ("report a --out houses.csv/a.html", 1, "Making the directory houses.csv"),
    ("report a --out a/results.json", 1, "but got a/results.json, which is in use"),
]  # fmt: skip


def content(folder):
    """All files with the time of their last change, and all directories."""
    return {p: p.is_file() and p.stat().st_mtime_ns for p in sorted(folder.rglob("*"))}


def test_the_table_has_a_row_for_every_command():
    assert len(BROKEN) >= 30
    known = {"demo", "methods", "fit", "predict", "evaluate", "compress", "report", "compare"}
    assert {row[0].split()[0] for row in BROKEN} >= known


@pytest.mark.parametrize("typed, code, answer", BROKEN, ids=[b[0] for b in BROKEN])
def test_broken_inputs_get_one_line(folder, monkeypatch, capsys, typed, code, answer):
    monkeypatch.chdir(folder)
    before = content(folder)
    lines = printed(capsys, *typed.split(), code=code).err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("vardrop: ")
    assert answer in lines[0]
    assert "Traceback" not in lines[0]
    assert content(folder) == before

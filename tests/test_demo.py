"""The demo: accurate with a tenth of the weights, and a report at the end."""

from vardrop.demo import main


def percent(cell):
    return float(cell.split("%")[0].split("(")[-1])


def test_the_demo_prunes_and_stays_accurate(tmp_path, capsys):
    table = main(tmp_path / "demo")
    names, accuracy, weights = (list(table.columns[i].cells) for i in (0, 1, 5))
    assert names == ["plain", "sparse VD", "pruned"]
    assert percent(accuracy[2]) >= 97.0
    assert percent(weights[2]) <= 10.0
    out = capsys.readouterr().out
    assert out.rstrip().endswith(str(tmp_path / "demo" / "report.html"))
    assert (tmp_path / "demo" / "report.html").stat().st_size > 50_000

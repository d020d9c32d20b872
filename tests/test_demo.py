from vardrop.demo import main


def test_the_demo_sparsifies_and_stays_accurate(tmp_path, capsys):
    table = main(tmp_path / "demo")
    accuracy = [float(cell.rstrip(" %")) for cell in table.columns[1].cells]
    left = float(list(table.columns[-1].cells)[-1].split("(")[1].rstrip(" %)"))
    assert min(accuracy) >= 97.0
    assert left <= 10.0
    assert (tmp_path / "demo" / "report.html").is_file()
    assert "sparse VD" in capsys.readouterr().out

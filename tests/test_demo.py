from vardrop.demo import main


def test_the_demo_sparsifies_and_stays_accurate(capsys):
    table = main()
    accuracy = [float(cell.rstrip("%")) for cell in table.columns[1].cells]
    left = float(list(table.columns[4].cells)[1].split("(")[1].rstrip("%)"))
    assert min(accuracy) >= 95.0
    assert left <= 20.0
    assert "sparse VD" in capsys.readouterr().out

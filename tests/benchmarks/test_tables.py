import pytest
import tables


@pytest.mark.parametrize("name", tables.TABLES)
def test_both_are_scored_on_the_same_rows(name):
    found = tables.measured(name, 400, epochs=1, beta=1.0, compare=False)
    seconds = [found[name]["seconds"] for name in ("fit", "MLPRegressor")]
    assert found["times"] == pytest.approx(seconds[0] / seconds[1])
    assert found["goal"] in (True, False)
    frame = tables.table(name, 400)
    assert frame["part"].value_counts().to_dict() == {"train": 280, "test": 80, "validation": 40}
    assert frame.shape[1] == tables.COLUMNS + 2

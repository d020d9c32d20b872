"""Settings: checks, JSON, schedules."""

import json

import pytest

from tests.refusals import assert_refused
from vardrop.app.runs import Settings


@pytest.mark.parametrize("change, text", [
    ({"epochs": 0}, "`epochs` to be an integer of at least 1, but got 0"),
    ({"lr": 0.0}, "`lr` to be a finite number and above 0, but got 0"),
    ({"lr": float("nan")}, "`lr` to be a finite number and above 0, but got nan"),
    ({"rate": "steep"}, "`rate` to be one of 'constant', 'linear', 'late', 'cosine'"),
    ({"precision": "half"}, "`precision` to be one of 'float32', 'bfloat16', but got 'half'"),
    ({"epochs": 2.5}, "`epochs` to be an integer of at least 1, but got 2.5"),
    ({"seed": "x"}, "`seed` to be an integer of at least 0, but got 'x'"),
    ({"seed": 2**63}, "`seed` to be a finite number and below 4.61169e.18, but got 922337"),
    ({"beta": -1.0}, "`beta` to be a finite number and at least 0, but got -1"),
    ({"weight_decay": None}, "`weight_decay` to be a finite number and at least 0, but got None"),
    ({"folds": 2, "patience": 3}, "`patience` needs a validation part, but got folds=2"),
    ({"folds": 0}, "`folds` to be an integer of at least 1, but got 0"),
    ({"warmup": [5]}, r"`warmup` to be two epochs, such as \(5, 20\), but got \(5,\)"),
    ({"warmup": "x"}, "`warmup` to be two epochs, such as .* but got 'x'"),
    ({"compile": 1}, "`compile` to be True or False, but got 1"),
    ({"device": 0}, "`device` to be the name of a device, but got 0"),
    ({"warmup": [5, 2]}, "0 <= `start` < `end`, but got 5 and 2"),
    ({"speed": 3}, r"Unknown setting 'speed'. Did you mean 'seed'"),
])  # fmt: skip
def test_settings_are_checked(change, text):
    assert_refused(text, Settings.from_json, change)


def test_settings_travel_as_json():
    settings = Settings(epochs=7, warmup=(1, 3), clip=0.5)
    assert Settings.from_json(json.loads(json.dumps(vars(settings)))) == settings
    assert Settings(warmup=(0, 0)).schedule(1.0)(0) == 1.0
    assert [Settings(rate=r).factor(10)(5) for r in ("constant", "linear", "late")] == [1, 0.5, 1]
    assert Settings(rate="cosine").factor(10)(5) == pytest.approx(0.5)
    assert_refused("`device` to be available", Settings(device="abacus").torch_device)

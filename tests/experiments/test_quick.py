"""The quick version of every experiment keeps its bounds, which fail when a method stops working."""

from pathlib import Path

import pytest

from experiments.command import FUNCTIONS
from experiments.runner import experiments, outside, reproduce
from vardrop.app.data import data_directory

KNOWN = experiments(Path(__file__).parents[2] / "experiments")


@pytest.mark.slow
@pytest.mark.skipif(
    not (data_directory() or Path()).joinpath("mnist").is_dir(),
    reason="MNIST is not there (VARDROP_DATA)",
)
@pytest.mark.parametrize("name", KNOWN)
def test_the_quick_version_keeps_its_bounds(name: str, tmp_path: Path) -> None:
    if name == "neklyudov/cartpole":
        pytest.importorskip("gymnasium", reason="needs the extra `rl`")
    (result,) = reproduce(KNOWN[name], FUNCTIONS, tmp_path / "run.json", quick=True)
    assert outside(result["figures"], KNOWN[name].bounds) == []

"""DropMax against softmax on MNIST-1K, three seeds, in one run."""

from pathlib import Path

import pytest
import torch

from vardrop.data import Images, data_directory
from vardrop.experiments import dropmax


def test_first_of_each_class_keeps_the_order_of_the_file() -> None:
    y = torch.tensor([2, 0, 1, 0, 2, 1, 0, 2])
    images = Images(torch.arange(8.0).view(8, 1), y)
    chosen = dropmax.first_of_each_class(images, 1, skip=1)
    assert chosen.x.flatten().tolist() == [3, 4, 5]
    assert chosen.y.tolist() == [0, 2, 1]


@pytest.mark.slow
@pytest.mark.skipif(
    not (data_directory() / "mnist").is_dir(), reason="MNIST is not in the data directory"
)
def test_dropmax_beats_softmax_on_mnist_1k(tmp_path: Path) -> None:
    done = dropmax.mnist_1k(tmp_path / "dropmax.json", ["softmax", "dropmax"])

    def mean(method: str, name: str) -> float:
        return sum(done[f"{method}/{seed}"][name] for seed in range(3)) / 3

    assert mean("dropmax", "error") <= mean("softmax", "error") - 0.7
    assert mean("dropmax", "ece") < mean("softmax", "ece")

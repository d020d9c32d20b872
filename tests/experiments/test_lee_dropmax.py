"""DropMax against softmax on MNIST-1K, three seeds, in one run."""

from pathlib import Path

import pytest
import torch

from experiments import lee_dropmax
from vardrop.app.data import Images, data_directory


def test_first_of_each_class_keeps_the_order_of_the_file() -> None:
    y = torch.tensor([2, 0, 1, 0, 2, 1, 0, 2])
    images = Images(torch.arange(8.0).view(8, 1), y)
    chosen = lee_dropmax.first_of_each_class(images, 2)
    assert chosen.x.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert chosen.y.tolist() == [2, 0, 1, 0, 2, 1]


@pytest.mark.slow
@pytest.mark.skipif(
    not (data_directory() or Path()).joinpath("mnist").is_dir(),
    reason="MNIST is not in the data directory",
)
def test_dropmax_beats_softmax_on_mnist_1k() -> None:
    methods = ("softmax", "dropmax")
    runs = [lee_dropmax.class_heads(seed, methods=methods)["figures"] for seed in range(3)]

    def gain(score: str) -> float:
        found = [run[f"{score} of softmax, %"] - run[f"{score} of dropmax, %"] for run in runs]
        return sum(found) / len(found)

    assert gain("error") >= 0.7
    assert gain("ECE") > 0

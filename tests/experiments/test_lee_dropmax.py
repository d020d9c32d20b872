"""DropMax against softmax on MNIST-1K, three seeds, in one run."""

import torch

from experiments import lee_dropmax
from vardrop.app.data import Images


def test_first_of_each_class_keeps_the_order_of_the_file() -> None:
    y = torch.tensor([2, 0, 1, 0, 2, 1, 0, 2])
    images = Images(torch.arange(8.0).view(8, 1), y)
    chosen = lee_dropmax.first_of_each_class(images, 2)
    assert chosen.x.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert chosen.y.tolist() == [2, 0, 1, 0, 2, 1]

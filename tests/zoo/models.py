"""A zoo of small models of the kinds that people have, built without downloads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.compression.nets import Classifier
from tests.integrations.models import batch_of, make, one_row
from tests.zoo import sequences, vision


@dataclass(frozen=True)
class Entry:
    """A model: how it is made, a batch of some examples, and the tensor of its output."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    pick: Callable[[Any], torch.Tensor] = lambda output: output
    batched: bool = True

    def build(self):
        torch.manual_seed(0)
        net = self.make()
        with torch.no_grad():  # statistics and factors as after training
            for module in net.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.running_mean.normal_(std=0.1)
                    module.running_var.uniform_(0.5, 1.5)
                    module.weight.uniform_(0.5, 1.5)
                    module.bias.normal_(std=0.3)
        return net.eval()


def images(rows, size=16):
    return torch.randn(rows, 3, size, size)


def tokens(rows):
    return torch.randint(1, 20, (rows, 8))


def packed(rows):
    return {"x": torch.randint(1, 40, (rows, 6)), "lengths": torch.arange(rows) % 3 + 4}


def graph(rows):
    """One graph: as many nodes as `rows`, and three edges per node."""
    edges = torch.stack([torch.arange(3 * rows) % rows, torch.randint(rows, (3 * rows,))])
    return {"x": torch.randn(rows, 6), "edge_index": edges}


def noised(rows):
    return {"x": torch.randn(rows, 3, 8, 8), "time": torch.arange(rows) % 7}


PLAIN = {
    "resnet": Entry(vision.ResNet, images),
    "resnext": Entry(partial(vision.ResNet, groups=4), images),
    "resnet, frozen norms": Entry(partial(vision.ResNet, vision.FrozenBatchNorm2d), images),
    "resnet, synchronised norms": Entry(partial(vision.ResNet, nn.SyncBatchNorm), images),
    "resnet, norms over groups": Entry(
        partial(vision.ResNet, lambda width: nn.GroupNorm(4, width)), images
    ),
    "efficientnet of timm": Entry(vision.efficientnet_timm, images),
    "efficientnet of torchvision": Entry(vision.efficientnet_torchvision, images),
    "mobilenet v2": Entry(vision.mobilenet_v2, images),
    "mobilenet v3": Entry(vision.mobilenet_v3, images),
    "vit of torchvision": Entry(vision.VisionTransformer, images),
    "repvgg": Entry(vision.repvgg, images),
    "densenet": Entry(vision.DenseNet, images),
    "u-net": Entry(vision.UNet, images),
    "diffusion u-net": Entry(sequences.DiffusionUNet, noised),
    "vit of timm": Entry(vision.TimmViT, images),
    "mlp mixer": Entry(vision.mixer, images),
    "text encoder": Entry(Classifier, tokens),
    "packed lstm": Entry(sequences.PackedLSTM, packed),
    "gru": Entry(sequences.gru_classifier, lambda rows: torch.randn(rows, 5, 6)),
    "tcn": Entry(sequences.tcn, lambda rows: torch.randn(rows, 3, 12)),
    "pointnet": Entry(sequences.pointnet, lambda rows: torch.randn(rows, 20, 3)),
    "graph network": Entry(sequences.GraphNet, graph, batched=False),
    "graph network, own layers": Entry(
        partial(sequences.GraphNet, sequences.GraphLinear), graph, batched=False
    ),
}


NAMES = """bert distilbert roberta modernbert deberta_v2 gpt2 llama mistral qwen3 gemma3 phi3 qwen3_moe
mamba vit dinov2 convnext swinv2 t5 bart whisper wav2vec2 segformer clip patchtst"""
PICKS = {
    "segformer": lambda output: output.logits, "clip": lambda output: output.image_embeds,
    "patchtst": lambda output: output.prediction_outputs.flatten(1),
}  # fmt: skip
ZOO = PLAIN | {
    name: Entry(partial(make, name), partial(batch_of, name), PICKS.get(name, one_row))
    for name in NAMES.split()
}

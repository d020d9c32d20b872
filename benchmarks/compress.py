"""How much faster a shrunken LeNet runs than the dense one: ratios, measured in one run.

    python benchmarks/compress.py [share of weights kept]

The weights are random; what counts here is the shape. Trained nets: `experiments/`.
"""

import sys
from functools import partial

import torch

from nets import lenet5, mlp
from vardrop.compression import shrink
from vardrop.compression.probes import time_interleaved

NETS = {
    "LeNet-300-100": lambda: mlp(784, 300, 100, 10),
    "LeNet-5": lambda: lenet5().to(memory_format=torch.channels_last),
}


@torch.no_grad()
def main(kept: float = 0.02) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for name, make in NETS.items():
        dense, masked = make().eval(), make().eval()
        for parameter in masked.parameters():
            if parameter.dim() > 1:
                # Zeros gather in rows and columns, as those of a trained net do.
                rows = torch.rand(len(parameter), generator=generator)
                columns = torch.rand(parameter.shape[1], generator=generator)
                score = rows[:, None] * columns
                keep = score >= score.flatten().quantile(1 - min(1.0, 4 * kept))
                parameter.mul_(keep.view(*keep.shape, *(1,) * (parameter.dim() - 2)))
        small, plan = shrink(masked, torch.zeros(1, 1, 28, 28), drop_inputs=True)
        print(f"{name}\n{plan}")
        for batch in (256, 1):
            x = torch.randn(batch, 1, 28, 28, generator=generator)
            nets = {"dense": dense, "shrunken": small}
            times = time_interleaved({n: partial(net, x) for n, net in nets.items()})
            for n, t in times.items():
                print(f"  batch {batch:3}  {n:9} {t * 1e6:9.1f} us  {times['dense'] / t:6.2f} x")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))

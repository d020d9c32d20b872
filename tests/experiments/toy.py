"""A toy experiment with a training, for the runner, the command line and the page."""

from pathlib import Path

import torch
from torch import nn

from experiments.trainings import Watch
from vardrop.objective import ELBO, Categorical
from vardrop.tuning import Loop


def toy_training(seed: int, epochs: int = 4, stop_after: int = 0, watch: Watch | None = None):
    """Two small trainings; `stop_after` epochs of the second it is cut off."""
    x, y, curve = torch.arange(12.0).view(6, 2) / 12, torch.arange(6) % 2, []
    watch = watch or Watch()
    watch.seconds = 0.0  # a checkpoint every epoch, if there is a directory
    with torch.random.fork_rng(devices=[]):
        for name in ("first", "second"):
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 2))
            elbo = ELBO(net, Categorical(), len(x), beta=0.0)
            loop = Loop(elbo, torch.optim.Adam(net.parameters()), x, y, epochs, 2, seed=seed)

            def measure(epoch, name=name):
                if name == "second" and stop_after and epoch.epoch == stop_after:
                    raise KeyboardInterrupt
                return {"loss": epoch.loss}

            curve += watch.fit(name, loop, measure, fraction=0.5)
    return {"figures": {"loss": curve[-1]["loss"], "seed": float(seed)}, "curve": curve}


def describe(folder: Path, more: str = "", name: str = "toy/run") -> Path:
    """Write a description of the toy; the directory of descriptions."""
    path = folder / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        'row = 3\ntitle = "A toy"\npaper = "Nobody 2020"\nsource = "table 7"\n'
        'function = "toy_training"\nseeds = [0, 1, 2]\nminutes = 2\nnotes = "For tests."\n'
        '[arguments]\nepochs = 4\n[expected]\n"loss" = 0.5\n[quick]\nepochs = 2\n'
        f'[bounds]\n"loss" = [0.0, 2.0]\n{more}'
    )
    return folder

"""Train, predict, compile and shrink a small model on a GPU, and compare it with the CPU.

    python examples/gpu_smoke.py            # the first GPU, or MPS
    python examples/gpu_smoke.py --device cpu

vardrop is developed without a GPU. If a step fails, or the last line reports a difference, open an
issue with the complete output, which contains the versions and the device.
"""

import argparse
import platform
import time
import traceback

import torch
from torch import nn

import vardrop as vd


def default_device():
    """The first GPU, MPS, or the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def make_elbo(device):
    """A small convolutional model with the same weights on every device."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))
    net = vd.convert(net, vd.sparse_vd()).to(device)
    return vd.ELBO(net, vd.Categorical(), num_data=64).to(device)


def train(elbo, x, y, dtype=None):
    """Take ten steps; return the last loss."""
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-2))
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
            loss = elbo(x, y).loss
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main():
    """Run every step, and report the ones that failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default=default_device())
    device = parser.parse_args().device
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    print(
        f"vardrop {vd.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    print(f"device: {name}, {platform.platform()}")
    x, y = torch.randn(64, 1, 8, 8), torch.arange(64) % 3
    there, labels = x.to(device), y.to(device)
    elbo, reference = make_elbo(device), make_elbo("cpu")
    steps = {
        "train": lambda: train(elbo, there, labels),
        "train with bfloat16": lambda: train(make_elbo(device), there, labels, torch.bfloat16),
        "compile": lambda: float(torch.compile(make_elbo(device))(there, labels).loss.detach()),
        "predict": lambda: vd.predict(elbo, there, samples=16, seed=0).probs.device,
        "moments": lambda: vd.predict(elbo, there, samples=16, mode="moments").probs.device,
        "freeze": lambda: vd.freeze(elbo.eval(), samples=4)(there, seed=0).probs.device,
        "shrink": lambda: next(vd.shrink(elbo.net, there).net.parameters()).device,
        "largest difference of the KL from the CPU": lambda: float(
            (vd.kl(make_elbo(device).net).cpu() - vd.kl(reference.net)).detach().abs()
        ),
    }
    failed = 0
    for step, call in steps.items():
        start = time.perf_counter()
        try:
            print(f"{step}: {call()}, {time.perf_counter() - start:.1f} s", flush=True)
        except Exception:  # the other steps are still informative
            failed += 1
            print(f"{step}: FAILED\n{traceback.format_exc()}", flush=True)
    print(f"{len(steps) - failed} of {len(steps)} steps passed")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()

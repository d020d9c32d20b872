"""Sparse VD by Ray Train, on two CPU workers.

python examples/ray_train.py
"""

import tempfile

import ray
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vardrop as vd

ROWS, CLASSES = 2048, 4


def train(config: dict) -> None:
    """What every worker does; `prepare_model` wraps the ELBO for data-parallel training."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, 16)
    y = (x[:, :CLASSES] + 0.3 * x[:, CLASSES : 2 * CLASSES]).argmax(1)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    elbo = vd.ELBO(vd.convert(net, vd.sparse_vd()), vd.Categorical(), num_data=ROWS)
    objective = ray.train.torch.prepare_model(elbo)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, config["lr"]))
    torch.manual_seed(1 + ray.train.get_context().get_world_rank())  # noise of its own
    for epoch in range(4):
        elbo.set_beta(min(1.0, (epoch + 1) / 4))
        for batch in loader:
            parts = objective(*batch)
            optimizer.zero_grad()
            parts.loss.backward()
            optimizer.step()
        report(elbo, {"nll": parts.nll.item(), "kl": parts.kl.item()})


def report(elbo: vd.ELBO, metrics: dict[str, float]) -> None:
    """The figures of an epoch, with a checkpoint from the first worker."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(elbo.state_dict(), f"{folder}/elbo.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def main() -> None:
    """Two workers, and what the last epoch reported."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    scaling = ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
    trainer = ray.train.torch.TorchTrainer(
        train, train_loop_config={"lr": 1e-2}, scaling_config=scaling, run_config=RunConfig()
    )
    print(trainer.fit().metrics, flush=True)


if __name__ == "__main__":
    main()

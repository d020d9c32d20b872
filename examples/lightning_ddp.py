"""Sparse VD under a Lightning Trainer, on two CPU processes.

python examples/lightning_ddp.py
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vardrop as vd
from vardrop.integrations.lightning import KLWarmUp, LightningELBO, NoiseLog

ROWS, CLASSES = 2048, 4


def loader(rows: int, seed: int) -> DataLoader:
    """Batches of a problem with four classes."""
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))
    y = (x[:, :CLASSES] + 0.3 * x[:, CLASSES : 2 * CLASSES]).argmax(1)
    return DataLoader(TensorDataset(x, y), batch_size=64, shuffle=seed == 0)


def main() -> None:
    """Train and validate."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    elbo = vd.ELBO(vd.convert(net, vd.sparse_vd()), vd.Categorical(), num_data=ROWS)
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[KLWarmUp(vd.linear_warmup(0, 2)), NoiseLog()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(LightningELBO(elbo, lr=1e-2), loader(ROWS, 0), loader(512, 1))
    if trainer.is_global_zero:
        found = {name: round(float(value), 3) for name, value in trainer.callback_metrics.items()}
        print(found, flush=True)


if __name__ == "__main__":
    main()

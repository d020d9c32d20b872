"""A training loop of one's own under Accelerate: the ELBO is prepared like any model.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vardrop as vd

ROWS, CLASSES = 2048, 4


def main() -> None:
    """Train, with gradients of two batches gathered, and predict."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(ROWS, 16)
    y = (x[:, :CLASSES] + 0.3 * x[:, CLASSES : 2 * CLASSES]).argmax(1)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    elbo = vd.ELBO(vd.convert(net, vd.sparse_vd()), vd.Categorical(), num_data=ROWS)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, 1e-2))
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    objective, optimizer, loader = accelerator.prepare(elbo, optimizer, loader)
    torch.manual_seed(1 + accelerator.process_index)  # other noise in every process
    for epoch in range(4):
        elbo.set_beta(min(1.0, (epoch + 1) / 4))
        for batch in loader:
            with accelerator.accumulate(objective):
                parts = objective(*batch)
                accelerator.backward(parts.loss)
                optimizer.step()
                optimizer.zero_grad()
    found = vd.predict(accelerator.unwrap_model(objective), x[:512].to(accelerator.device))
    accuracy = float((found.probs.argmax(1).cpu() == y[:512]).float().mean())
    accelerator.print(f"{accelerator.num_processes} processes, accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()

"""The ELBO under a Lightning Trainer."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vardrop as vd
from tests.refusals import assert_refused

lightning = pytest.importorskip("lightning.pytorch")

from vardrop.integrations.lightning import KLWarmUp, LightningELBO, NoiseLog  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The '\w+' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]


def loader(count=24):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)


def make(recipe=None):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        vd.convert(net, recipe or vd.sparse_vd())
    return vd.ELBO(net, vd.Categorical(), num_data=24)


def trainer(folder, **options):
    given = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False} | options
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(default_root_dir=folder, **given, **quiet)


def test_training_is_that_of_a_loop(tmp_path):
    module = LightningELBO(make(), lr=1e-2, noise_lr=3e-2)
    torch.manual_seed(3)
    used = trainer(tmp_path, callbacks=[KLWarmUp(vd.linear_warmup(0, 2))], limit_val_batches=0)
    used.fit(module, loader(), loader(8))
    elbo = make()
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, 1e-2, 3e-2))
    torch.manual_seed(3)
    elbo.train()
    for epoch in range(2):
        for k, (x, y) in enumerate(loader()):
            elbo.set_beta(vd.linear_warmup(0, 2)(epoch + k / 3))
            optimizer.zero_grad()
            elbo(x, y).loss.backward()
            optimizer.step()
    torch.testing.assert_close(module.elbo.state_dict(), elbo.state_dict())


def test_what_is_logged(tmp_path):
    module, used = LightningELBO(make()), trainer(tmp_path, callbacks=[NoiseLog()])
    used.fit(module, loader(), loader(16))
    found = used.callback_metrics
    assert {"loss", "nll", "kl", "beta", "val_nll", "sparsity", "log_alpha"} <= set(found)
    assert all(math.isfinite(value) for value in found.values())
    expected = torch.cat([a.flatten() for a in vd.log_alpha(module.elbo.net).values()]).mean()
    torch.testing.assert_close(found["log_alpha"], expected)
    module.elbo.eval()
    x, y = (torch.cat(parts) for parts in zip(*loader(16), strict=True))
    torch.testing.assert_close(found["val_nll"], module.elbo(x, y).nll.detach())
    assert "test_nll" in used.test(module, loader(16), verbose=False)[0]


def test_predictions_are_distributions(tmp_path):
    found = trainer(tmp_path).predict(LightningELBO(make(), samples=4), loader(16))
    assert [p["probs"].shape for p in found] == [(8, 3), (8, 3)]
    assert [p["epistemic"].shape for p in found] == [(8,), (8,)]


def test_a_checkpoint_is_resumed(tmp_path):
    first, used = LightningELBO(make()), trainer(tmp_path, max_epochs=1)
    used.fit(first, loader(), loader(8))
    used.save_checkpoint(tmp_path / "one.ckpt")
    second, again, seen = LightningELBO(make()), trainer(tmp_path, max_epochs=2), {}

    class Look(lightning.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            seen[trainer.current_epoch] = {k: v.clone() for k, v in pl_module.state_dict().items()}
            seen["moments"] = len(trainer.optimizers[0].state)

    again.callbacks.append(Look())
    again.fit(second, loader(), loader(8), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert again.current_epoch == 2
    assert 0 not in seen
    torch.testing.assert_close(seen[1], first.state_dict())
    assert seen["moments"] == len(list(first.parameters()))


def test_half_precision(tmp_path):
    module = LightningELBO(make())
    trainer(tmp_path, precision="bf16-mixed").fit(module, loader(), loader(8))
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert all(bool(p.isfinite().all()) for p in module.parameters())


def test_bad_arguments():
    assert_refused("Expected `elbo` to be a vardrop.ELBO", LightningELBO, nn.Linear(2, 1))
    assert_refused("Expected `schedule` to be a function", KLWarmUp, 0.5)

"""Two processes that are seeded alike draw different noise on the same inputs."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import vardrop as vd
from tests.nets import is_same_state
from tests.running import TORCHRUN, python
from vardrop._core.rng import process_noise

CPU = torch.device("cpu")

# All examples are one, and there is no dropout: outputs differ by their noise alone.
TRAINER = """
import sys, torch, transformers, vardrop as vd
from tests.integrations.models import make
from vardrop.integrations.trainer import ELBOTrainer
torch.set_num_threads(1)
data = [{"input_ids": torch.arange(3, 10), "labels": torch.tensor(1)}] * 16
def run(start=None):
    torch.manual_seed(0)
    model = make("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    vd.convert(model, vd.bayes_by_backprop(log_sigma2=-4.0))
    args = transformers.TrainingArguments(
        sys.argv[1], num_train_epochs=2, per_device_train_batch_size=4, save_strategy="epoch",
        use_cpu=True, report_to=[], disable_tqdm=True, ddp_backend="gloo", learning_rate=1e-2,
        gradient_checkpointing=True,
    )
    seen = []
    def output(found):
        seen.append(found.logits.detach().clone())
        return found.logits
    ELBOTrainer(model, args, train_dataset=data, output=output).train(resume_from_checkpoint=start)
    return model.state_dict(), seen, torch.get_rng_state()
whole, resumed = run(), run(f"{sys.argv[1]}/checkpoint-2")
rank = torch.distributed.get_rank()
torch.save([*whole, resumed[0]], f"{sys.argv[1]}/{rank}.pt")
torch.distributed.destroy_process_group()
"""

LIGHTNING = """
import sys, torch, lightning.pytorch as pl, vardrop as vd
from vardrop.integrations.lightning import LightningELBO
torch.set_num_threads(1)
class Look(pl.Callback):
    losses = []
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.losses.append(outputs["loss"].detach())
    def on_train_end(self, trainer, module):
        found = [module.state_dict(), self.losses, torch.get_rng_state()]
        torch.save(found, f"{sys.argv[1]}/{trainer.global_rank}.pt")
pl.seed_everything(0)
net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop(log_sigma2=-2.0))
data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.zeros(16, dtype=torch.long))
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp",
                     enable_checkpointing=False, callbacks=[Look()], **quiet)
elbo = vd.ELBO(net, vd.Categorical(), num_data=16)
trainer.fit(LightningELBO(elbo), torch.utils.data.DataLoader(data, batch_size=4))
"""


def run(folder, script, *launch):
    (folder / "script.py").write_text(script)
    found = python("-W", "ignore", *launch, folder / "script.py", folder)
    assert found.returncode == 0, found.stderr[-2000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_processes_of_the_trainer_draw_their_own_noise(tmp_path):
    first, second = run(tmp_path, TRAINER, *TORCHRUN)
    for mine, others in zip(first[1], second[1], strict=True):
        assert not torch.equal(mine, others)
    assert is_same_state(first[0], second[0])  # one model
    assert torch.equal(first[2], second[2])  # torch's generators are as equal as they were
    assert is_same_state(first[3], first[0])  # training that was resumed


@pytest.mark.slow
def test_processes_of_lightning_draw_their_own_noise(tmp_path):
    first, second = run(tmp_path, LIGHTNING)
    assert len(first[1]) == 2
    assert not any(torch.equal(*both) for both in zip(first[1], second[1], strict=True))
    assert is_same_state(first[0], second[0])
    assert torch.equal(first[2], second[2])


def test_one_process_draws_as_always():
    expected = torch.randn(3)
    torch.manual_seed(0)
    with process_noise(0, 1, CPU):
        assert torch.equal(torch.randn(3), expected)


def test_activations_that_are_computed_again_have_the_same_noise():
    """Backward, outside of the block, repeats the pass that was inside."""
    net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop(log_sigma2=0.0)).train()
    gradients = []
    for again in (True, False):
        net.zero_grad()
        torch.manual_seed(0)
        with process_noise(1, 2, CPU):
            x = torch.ones(2, 4)
            y = checkpoint(net, x, use_reentrant=False) if again else net(x)
        y.square().sum().backward()
        gradients.append(net.log_sigma2.grad.clone())
    assert torch.equal(*gradients)

"""A small model from import to ONNX, step by step, for any environment with torch.

    python tests/smoke.py

Steps that need an optional package are skipped if it is not installed. It takes a few seconds.
"""

import platform
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import vardrop as vd

STARTED = time.perf_counter()


class Cnn(nn.Module):
    """A class with `forward`: BatchNorm, max pool and in-place ReLU."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.pool, self.relu = nn.MaxPool2d(2), nn.ReLU(inplace=True)
        self.hidden, self.last = nn.Linear(96, 20), nn.Linear(20, 3)

    def forward(self, x):
        x = self.pool(self.relu(self.norm(self.conv(x))))
        return self.last(self.relu(self.hidden(x.flatten(1))))


def size(net):
    return sum(p.numel() for p in net.parameters())


def train(x, y):
    """Train and return the ELBO. Half of the hidden units are off, so that shrink removes them."""
    elbo = vd.ELBO(vd.convert(Cnn(), vd.sparse_vd()), vd.Categorical(), num_data=len(x))
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-2))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = elbo(x, y).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    elbo.net.hidden.weight.data[::2] = 0
    return elbo.eval()


def predict(elbo, x):
    probs = vd.predict(elbo, x, samples=8, seed=0).probs
    assert probs.shape == (len(x), 3)
    assert float((probs.sum(1) - 1).abs().max()) < 1e-5
    assert torch.equal(probs, vd.predict(elbo, x, samples=8, seed=0).probs)
    assert vd.predict(elbo, x, samples=4, draw="functions").probs.shape == (len(x), 3)
    assert vd.freeze(elbo, samples=4)(x, seed=0).probs.shape == (len(x), 3)


def compile_training(elbo, x, y):
    assert bool(torch.compile(elbo, backend="aot_eager", fullgraph=True)(x, y).loss.isfinite())


def shrink(elbo, x):
    small = vd.shrink(elbo.net, x).net
    assert size(small) < size(Cnn())
    assert small(x).shape == (len(x), 3)
    return small


def load_in_fresh_process(small, elbo, x, folder):
    """Save, then load in another process and compare the outputs there."""
    vd.save(small, folder / "small.safetensors")
    vd.save_noisy(elbo.net, folder / "noisy.safetensors")
    torch.save((x, small(x), elbo.net(x)), folder / "expected.pt")
    subprocess.run([sys.executable, __file__, "--load", folder], check=True)


@torch.no_grad()
def load(folder):
    x, small, noisy = torch.load(folder / "expected.pt", weights_only=True)
    loaded = vd.load(folder / "small.safetensors", into=Cnn()).eval()
    assert float((loaded(x) - small).abs().max()) < 1e-5
    loaded = vd.load_noisy(folder / "noisy.safetensors", into=Cnn()).eval()
    assert torch.equal(loaded(x), noisy)


def pack(small, x, folder):
    vd.pack(small, folder / "small.vdp")
    unpacked = vd.unpack(folder / "small.vdp", into=Cnn()).eval()
    assert torch.equal(unpacked(x).argmax(1), small(x).argmax(1))


def export(small, x, folder):
    vd.export_onnx(small, x[:2], folder / "small.onnx")
    if find_spec("onnxruntime"):
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / "small.onnx")
        (outputs,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert float((torch.from_numpy(outputs) - small(x)).abs().max()) < 1e-4


def train_with_lightning(x, y, folder):
    """One epoch with Lightning's trainer."""
    import lightning

    from vardrop.integrations.lightning import LightningELBO

    elbo = vd.ELBO(vd.convert(Cnn(), vd.sparse_vd()), vd.Categorical(), num_data=len(x))
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    batches = torch.utils.data.TensorDataset(x, y)
    trainer.fit(LightningELBO(elbo), torch.utils.data.DataLoader(batches, batch_size=32))
    assert trainer.global_step == 2


def convert_transformer():
    """A small BERT with random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, num_labels=3,
    )  # fmt: skip
    net = vd.convert(BertForSequenceClassification(config), vd.bayes_by_backprop())
    tokens = {"input_ids": torch.randint(50, (4, 7))}
    assert vd.predict(net, tokens, samples=2, seed=0).probs.shape == (4, 3)


def fit_estimator(x, y):
    from vardrop.sklearn import VardropClassifier

    estimator = VardropClassifier(epochs=5, random_state=0).fit(x.flatten(1).numpy(), y.numpy())
    assert estimator.predict_proba(x.flatten(1).numpy()).shape == (len(x), 3)


def run(step, *arguments, needs=()):
    """Run one step and print how it went. A step without its packages is skipped."""
    name = step.__name__.replace("_", " ")
    if missing := [package for package in needs if find_spec(package) is None]:
        print(f"{name}: skipped, {', '.join(missing)} not installed", flush=True)
        return None
    made = step(*arguments)
    print(f"{name}: ok, {time.perf_counter() - STARTED:.1f} s", flush=True)
    return made


def main():
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"import: vardrop {vd.__version__}, {versions}", flush=True)
    torch.manual_seed(0)
    x, y = torch.randn(64, 1, 8, 8), torch.arange(64) % 3
    elbo = run(train, x, y)
    run(predict, elbo, x)
    run(compile_training, elbo, x, y)
    with torch.no_grad(), tempfile.TemporaryDirectory() as name:
        small, folder = run(shrink, elbo, x), Path(name)
        run(load_in_fresh_process, small, elbo, x, folder, needs=("safetensors", "numpy"))
        run(pack, small, x, folder, needs=("constriction",))
        run(export, small, x, folder, needs=("onnx", "onnxscript"))
        with torch.enable_grad():
            run(train_with_lightning, x, y, folder, needs=("lightning",))
            run(convert_transformer, needs=("transformers",))
            run(fit_estimator, x, y, needs=("sklearn", "pandas"))
    print(f"all steps passed, {time.perf_counter() - STARTED:.1f} s")


if __name__ == "__main__":
    if "--load" in sys.argv:
        load(Path(sys.argv[-1]))
    else:
        main()

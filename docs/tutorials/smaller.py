# %% [markdown]
# # 2 Make it smaller, and ship it
#
# From a net on digits to a file of a few kilobytes and to a graph that answers in onnxruntime: sparse
# variational dropout for bytes, `slim` for speed.

# %%
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import torch
from torch import nn

import vardrop as vd
from vardrop.tuning import train

torch.manual_seed(0)
data = vd.load_dataset("digits")


def fresh():
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10)),
    )


def accuracy(net, part=data.test):
    with torch.no_grad():
        return (net.eval()(part.x).argmax(1) == part.y).float().mean().item()


net = fresh()
print(sum(p.numel() for p in net.parameters()), "weights")

# %% [markdown]
# ## Train it with noise
#
# The KL comes in slowly, and at a tenth of its weight: with 1258 images the whole of it would take out more
# than the accuracy bears. That weight is the knob between size and accuracy.

# %%
vd.convert(net, vd.sparse_vd())
elbo = vd.ELBO(net, vd.Categorical(), num_data=len(data.train.x))
optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=3e-3))
warmup = vd.linear_warmup(3, 15, beta=0.1)
kept = []
x, y = data.train.x, data.train.y
for _ in train(elbo, optimizer, x, y, epochs=25, batch_size=64, beta=warmup):
    kept.append({name: 1 - part for name, part in vd.sparsity(net).by_layer.items()})
print(vd.sparsity(net))
print("accuracy of the means", accuracy(net))

# %%
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for name in kept[0]:
    axis.plot([100 * k[name] for k in kept], label=f"layer {name}")
axis.set(xlabel="epoch", ylabel="weights left, %", ylim=(0, 105))
axis.legend()
plt.show()

# %% [markdown]
# ## Take the dead weights out
#
# The threshold is chosen on validation rows: the smallest net that loses no more than half a point. The plan
# says what goes, layer by layer, and what was compared to be sure that nothing else changes.

# %%
validation = (data.validation.x, data.validation.y)


def metric(logits, y):
    return vd.metrics.accuracy(logits.softmax(1), y)


found = vd.choose_threshold(net, [validation], metric, max_drop=0.005)
shrunk = vd.shrink(net, x[:64], threshold=found.value)
small = shrunk.net  # a plain nn.Module
print(shrunk.plan)
print("accuracy", accuracy(small))

# %% [markdown]
# ## Files
#
# `save` writes it as it is, without pickle, and `pack` with as many bits per weight as the posterior allows.
# Both are read into a fresh net of your own class.

# %%
vd.save(fresh(), "plain.safetensors")
vd.save(small, "small.safetensors")
vd.pack(shrunk, "small.vdp")
for name in ("plain.safetensors", "small.safetensors", "small.vdp"):
    print(f"{name:18} {Path(name).stat().st_size:>8,} bytes")
print("unpacked:", accuracy(vd.unpack("small.vdp", into=fresh())))

# %% [markdown]
# ## Speed is another matter
#
# Single weights went, so the file is small and the products are as large as before. `slim` takes out whole
# channels and units, to a budget.

# %%
torch.manual_seed(0)
plain = fresh()
optimizer = torch.optim.Adam(plain.parameters(), lr=3e-3)
for _ in range(12):
    for batch in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x[batch]), y[batch]).backward()
        optimizer.step()
thin = vd.slim(plain, (x, y), validation, macs=0.5, epochs=10, lr=3e-3)
print(thin)
print("accuracy", accuracy(plain), "->", accuracy(thin.net))

# %% [markdown]
# ## Ship it
#
# As ONNX, which needs neither torch nor vardrop to run. Of a net that is still noisy, `freeze` keeps the
# doubt: here one analytic pass that answers with probabilities and what the draws would disagree about.

# %%
vd.export_onnx(thin.net, "thin.onnx", example_input=x[:1])
vd.export_onnx(
    vd.freeze(net.eval(), mode="moments"), "sure.onnx", x[:1], outputs=("probs", "epistemic")
)

images = data.test.x.numpy()
thin_session = onnxruntime.InferenceSession("thin.onnx")
name = thin_session.get_inputs()[0].name
start = time.perf_counter()
(logits,) = thin_session.run(None, {name: images})
print(f"thin.onnx: {(time.perf_counter() - start) * 1e3:.1f} ms for {len(images)} images")

session = onnxruntime.InferenceSession("sure.onnx")
probs, epistemic = session.run(None, {"x": images})
right = probs.argmax(1) == data.test.y.numpy()
print(f"sure.onnx: accuracy {right.mean():.3f}")
print(
    f"epistemic of right answers {epistemic[right].mean():.4f}, of errors {epistemic[~right].mean():.4f}"
)
assert np.isfinite(epistemic).all()

# %% [markdown]
# More: [compression](../compression.md), [slim](../slim.md), [serve](../serve.md), also in a browser.

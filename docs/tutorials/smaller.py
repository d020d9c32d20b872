# %% [markdown]
# # 2 Make a model smaller and deploy it
#
# This tutorial prunes a convolutional model with sparse variational dropout to reduce its file size, slims it to reduce computation, and exports
# both to ONNX.

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


def build():
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10)),
    )


def accuracy(net, part=data.test):
    with torch.no_grad():
        return (net.eval()(part.x).argmax(1) == part.y).float().mean().item()


net = build()
print(sum(p.numel() for p in net.parameters()), "weights")

# %% [markdown]
# ## Train with noise
#
# The KL weight rises slowly to 0.1. With 1258 images, a weight of 1 would remove too many weights. A larger weight gives a smaller model, and a smaller
# weight gives a more accurate one.

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
# ## Prune
#
# The threshold is chosen on validation data: the smallest model that loses at most half a point of accuracy. The plan lists what is removed from each
# layer and how the result was checked.

# %%
validation = (data.validation.x, data.validation.y)


def metric(logits, y):
    return vd.metrics.accuracy(logits.softmax(1), y)


threshold = vd.choose_threshold(net, [validation], metric, max_drop=0.005)
shrunk = vd.shrink(net, x[:64], threshold=threshold.value)
small = shrunk.net  # a plain nn.Module
print(shrunk.plan)
print("accuracy", accuracy(small))

# %% [markdown]
# ## Files
#
# `save` writes the model with its original precision. `pack` uses as many bits per weight as the posterior variance requires. Both are read without
# pickle into a new instance of your model class.

# %%
vd.save(build(), "plain.safetensors")
vd.save(small, "small.safetensors")
vd.pack(shrunk, "small.vdp")
for name in ("plain.safetensors", "small.safetensors", "small.vdp"):
    print(f"{name:18} {Path(name).stat().st_size:>8,} bytes")
print("unpacked:", accuracy(vd.unpack("small.vdp", into=build())))

# %% [markdown]
# ## Fewer operations
#
# Pruning removed single weights, so the file is small, but the number of operations is almost unchanged. `slim` removes whole channels and units until a
# budget is reached.

# %%
torch.manual_seed(0)
plain = build()
optimizer = torch.optim.Adam(plain.parameters(), lr=3e-3)
for _ in range(12):
    for batch in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x[batch]), y[batch]).backward()
        optimizer.step()
slimmed = vd.slim(plain, (x, y), validation, macs=0.5, epochs=10, lr=3e-3)
print(slimmed)
print("accuracy", accuracy(plain), "->", accuracy(slimmed.net))

# %% [markdown]
# ## Deploy with ONNX
#
# An ONNX graph runs without torch and vardrop. `freeze` exports a noisy model with its uncertainty, here as one deterministic pass that returns
# probabilities and epistemic uncertainty.

# %%
vd.export_onnx(slimmed.net, x[:1], "slim.onnx")
vd.export_onnx(
    vd.freeze(net.eval(), mode="moments"), x[:1], "noisy.onnx", outputs=("probs", "epistemic")
)

images = data.test.x.numpy()
slim_session = onnxruntime.InferenceSession("slim.onnx")
name = slim_session.get_inputs()[0].name
start = time.perf_counter()
(logits,) = slim_session.run(None, {name: images})
print(f"slim.onnx: {(time.perf_counter() - start) * 1e3:.1f} ms for {len(images)} images")

session = onnxruntime.InferenceSession("noisy.onnx")
probs, epistemic = session.run(None, {"x": images})
right = probs.argmax(1) == data.test.y.numpy()
print(f"noisy.onnx: accuracy {right.mean():.3f}")
print(
    f"epistemic uncertainty of correct predictions {epistemic[right].mean():.4f}, of errors {epistemic[~right].mean():.4f}"
)
assert np.isfinite(epistemic).all()

# %% [markdown]
# More: [prune and pack](../compression.md), [slim](../slim.md), [export and serve](../serve.md).

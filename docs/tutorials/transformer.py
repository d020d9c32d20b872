# %% [markdown]
# # 5 A transformer
#
# A small transformer encoder reads a digit row by row: eight tokens with eight pixels each. This tutorial estimates its uncertainty with MC dropout, removes
# attention heads and feed-forward units, and returns a plain torch model. [Hugging Face models](../huggingface.md) work in the same way.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import vardrop as vd

torch.manual_seed(0)
data = vd.load_dataset("digits")


class Reader(nn.Module):
    def __init__(self, width=32, heads=4, layers=2):
        super().__init__()
        self.rows = nn.Linear(8, width)
        self.places = nn.Parameter(0.1 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, heads, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classes = nn.Linear(width, 10)

    def forward(self, x):
        return self.classes(self.encoder(self.rows(x.squeeze(1)) + self.places).mean(1))


def learn(loss, parameters, epochs, after=lambda epoch: None):
    optimizer = torch.optim.Adam(parameters)
    for epoch in range(epochs):
        for batch in torch.randperm(len(data.train.x)).split(64):
            optimizer.zero_grad()
            loss(data.train.x[batch], data.train.y[batch]).backward()
            optimizer.step()
        after(epoch)


def accuracy(p):
    return (p.probs.argmax(1) == data.test.y).float().mean().item()


net = Reader()
learn(
    lambda x, y: nn.functional.cross_entropy(net(x), y),
    [{"params": net.parameters(), "lr": 2e-3}],
    15,
)
print(f"{accuracy(vd.predict(net.eval(), data.test.x, mode='mean')):.3f}")

# %% [markdown]
# ## Uncertainty without training
#
# The encoder has dropout in modules and inside attention. The plan shows that both are controlled.

# %%
print(vd.plan(net, vd.mc_dropout()))
vd.convert(net, vd.mc_dropout())
p = vd.predict(net, data.test.x, samples=16, seed=0)
shuffled = data.test.x[:, :, torch.randperm(8)]  # digits with their rows in another order
q = vd.predict(net, shuffled, samples=16, seed=0)
print(f"accuracy {accuracy(p):.3f}")
print(
    f"epistemic uncertainty: digits {p.epistemic.mean():.4f}, shuffled rows {q.epistemic.mean():.4f}"
)
vd.revert(net)

# %% [markdown]
# ## Fewer heads and units
#
# Each head and each feed-forward unit gets a hard concrete gate. Gates start open, so the outputs do not change at first. The penalty is the cost of a weight
# and can differ between kinds of units.

# %%
vd.convert(net.train(), vd.l0(penalty=1.0), include="*self_attn")
vd.convert(net, vd.l0(penalty=0.3), include="*linear2")
elbo = vd.ELBO(net, vd.Categorical(), num_data=len(data.train.x))
left = []


def count(epoch):
    kept = {n: r.kept for n, r in vd.relevance(net).items()}
    left.append({n: int(k.sum()) for n, k in kept.items()})


groups = vd.parameter_groups(elbo, lr=2e-3, noise_lr=3e-2)
learn(lambda x, y: elbo(x, y).loss, groups, 15, count)
print(left[-1])

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for axis, kind, title in zip(axes, ("self_attn", "linear2"), ("heads", "units"), strict=True):
    for name in left[0]:
        if kind in name:
            axis.plot([k[name] for k in left], label=f"layer {name.split('.')[2]}")
    axis.set(xlabel="epoch", ylabel=f"{title} left", ylim=(0, None))
    axis.legend()
plt.show()

# %% [markdown]
# ## A smaller plain model

# %%
small, plan = vd.shrink(net.eval(), data.test.x[:32])
print(plan)
right = (small.eval()(data.test.x).argmax(1) == data.test.y).float().mean().item()
print(f"accuracy {right:.3f}")
vd.save(small, "reader.safetensors")
again = vd.load("reader.safetensors", into=Reader())

# %% [markdown]
# More: [recurrent layers and attention](../convert.md#recurrent-layers), and [Hugging Face](../huggingface.md) with the Trainer, text generation and
# checkpoints.

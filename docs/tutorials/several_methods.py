# %% [markdown]
# # 6 Compare several methods
#
# One model and one training loop, six methods. The method is a value, so only one argument changes. Then `compare_methods` repeats the comparison with
# confidence intervals over seeds, because a single run says little.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import vardrop as vd
from vardrop.app.data import load_out_of_distribution

data = vd.load_dataset("digits")
x, y = data.train.x[:600], data.train.y[:600]
photos = load_out_of_distribution("photos", (1, 8, 8))

methods = {
    "plain": None,
    "binary dropout": vd.binary_dropout(0.3),
    "concrete dropout": vd.concrete_dropout(),
    "variational dropout": vd.variational_dropout(),
    "sparse VD": vd.sparse_vd(),
    "Bayes by Backprop": vd.bayes_by_backprop(prior=vd.Normal(learned=True)),
}
print(methods["sparse VD"])

# %% [markdown]
# ## One training loop for all methods
#
# All methods use a KL weight of 0.1 with a warm-up. A plain model has no KL, so its weight is 0.

# %%


def train(recipe, seed, epochs=40):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    if recipe is not None:
        vd.convert(net, recipe)
    elbo = vd.ELBO(net, vd.Categorical(), num_data=len(x), beta=0.0)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=3e-3))
    warmup = vd.linear_warmup(5, 15, beta=0.1 if recipe is not None else 0.0)
    for epoch in range(epochs):
        elbo.set_beta(warmup(epoch))
        for batch in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            elbo(x[batch], y[batch]).loss.backward()
            optimizer.step()
    return elbo.eval()


def scores(elbo, noisy):
    mode = "sample" if noisy else "mean"
    p, q = (vd.predict(elbo, part, mode=mode, seed=0) for part in (data.test.x, photos))
    return {
        "error, %": 100 * (p.probs.argmax(1) != data.test.y).float().mean().item(),
        "NLL": -p.log_prob(data.test.y).mean().item(),
        "ECE, %": 100 * vd.metrics.ece(p.probs, data.test.y).item(),
        "OOD AUROC": vd.metrics.auroc(p.entropy, q.entropy).item(),
    }


results = {
    name: [scores(train(recipe, seed), recipe is not None) for seed in range(3)]
    for name, recipe in methods.items()
}
for name, runs in results.items():
    means = {what: sum(r[what] for r in runs) / len(runs) for what in runs[0]}
    print(f"{name:20}", "  ".join(f"{what} {value:.3f}" for what, value in means.items()))

# %%
figure, axes = plt.subplots(1, 4, figsize=(12, 2.8), layout="constrained")
for axis, what in zip(axes, results["plain"][0], strict=True):
    for row, runs in enumerate(results.values()):
        axis.plot([r[what] for r in runs], [row] * len(runs), "o", color="tab:blue", alpha=0.6)
    axis.set(title=what, yticks=range(len(results)))
    axis.set_yticklabels(results if axis is axes[0] else [])
    axis.invert_yaxis()
plt.show()

# %% [markdown]
# Each point is a seed. In some columns, the differences between methods are as large as the differences between seeds. Confidence intervals are
# needed.
#
# ## Confidence intervals
#
# `compare_methods` fits every method with every seed on the same splits. The intervals of the differences account for overlapping splits. All runs are stored,
# and an interrupted comparison can be continued.

# %%
table = vd.compare_methods(
    "wine",
    {"plain": None, "Bayes by Backprop": "bayes_by_backprop", "sparse VD": "sparse_vd"},
    seeds=3,
    out="runs/wine",
    epochs=20,
    folds=1,
)
print(table)

# %% [markdown]
# ## Inspect the noise
#
# The noise level of each layer, and the fraction of weights that could be pruned:

# %%
sparse = train(vd.sparse_vd(), seed=0)
print(vd.alpha_summary(sparse.net))
print(vd.sparsity(sparse.net))

# %% [markdown]
# More: [which method to choose](../choose.md), [compare runs and methods](../evaluate.md#compare-runs), [custom components](../extend.md).

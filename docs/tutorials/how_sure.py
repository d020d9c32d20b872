# %% [markdown]
# # 1 How sure is a trained net?
#
# You have a trained net. It gives probabilities, and you do not know whether to believe them. This
# tutorial takes a small convolutional net on 8 × 8 digits through three ways to find out, from the
# cheapest on, and scores them by what counts: are the probabilities honest, are errors unsure, and are
# strangers (patches of photographs) noticed?

# %%
import copy

import matplotlib.pyplot as plt
import torch
from torch import nn

import vardrop as vd
from vardrop.app.data import load_out_of_distribution

torch.manual_seed(0)
data = vd.load_dataset("digits")
train, validation, test = data.train, data.validation, data.test
strangers = load_out_of_distribution("photos", (1, 8, 8))
print(len(train.x), len(validation.x), len(test.x), len(strangers))

# %% [markdown]
# ## The net, trained as you always do
#
# On 120 images, until it knows them by heart: so it is too sure of itself. It has dropout, as many nets do.

# %%
net = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)),
)
x, y = train.x[:120], train.y[:120]
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for _ in range(80):
    for batch in torch.randperm(len(x)).split(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
net.eval()

# %% [markdown]
# ## Scores
#
# The NLL and the expected calibration error say whether the probabilities are honest. The two areas under
# the ROC curve say whether the entropy tells errors from right answers, and photographs from digits.

# %%
scores = {}


def score(name, predict):
    p, strange = predict(test.x), predict(strangers)
    wrong = p.probs.argmax(1) != test.y
    scores[name] = {
        "accuracy": 1 - wrong.float().mean().item(),
        "NLL": -p.log_prob(test.y).mean().item(),
        "ECE": vd.metrics.ece(p.probs, test.y).item(),
        "errors": vd.metrics.auroc(p.entropy[~wrong], p.entropy[wrong]).item(),
        "strangers": vd.metrics.auroc(p.entropy, strange.entropy).item(),
    }
    print(f"{name:12}", "  ".join(f"{k} {v:.3f}" for k, v in scores[name].items()))


score("plain", lambda x: vd.predict(net, x, mode="mean"))

# %% [markdown]
# ## 1. A temperature
#
# One number, fitted on rows that trained nothing. It makes the probabilities honest on average; the order of
# the rows, by which errors and strangers are told, hardly changes.

# %%
tempered = vd.calibrate(net, validation.x, validation.y)
print(tempered)
score("temperature", lambda x: vd.predict(net, x, mode="mean", likelihood=tempered))

# %% [markdown]
# ## 2. The dropout that it has
#
# `mc_dropout` puts it under a switch, BatchNorm and the rest stay in eval mode. No training.

# %%
dropped = vd.convert(copy.deepcopy(net), vd.mc_dropout())
likelihood = vd.calibrate(dropped, validation.x, validation.y, seed=0)
score("MC dropout", lambda x: vd.predict(dropped, x, likelihood=likelihood, seed=0))

# %% [markdown]
# ## 3. Fine-tuning: noise that is learned
#
# All weights get a variance, and a few epochs of the ELBO learn it together with the weights.

# %%
batches = list(zip(x.split(40), y.split(40), strict=True))
held_out = (validation.x, validation.y)
noisy = vd.convert(copy.deepcopy(net), vd.bayes_by_backprop())
tuned = vd.fine_tune(noisy, batches, validation=held_out, epochs=10)
score("fine-tuned", lambda x: vd.predict(tuned, x, seed=0))

# %% [markdown]
# ## Side by side

# %%
figure, axes = plt.subplots(1, 4, figsize=(11, 2.6), layout="constrained")
for axis, what in zip(axes, ("NLL", "ECE", "errors", "strangers"), strict=True):
    axis.barh(list(scores), [s[what] for s in scores.values()], color="tab:blue")
    axis.invert_yaxis()
    axis.set_title(
        f"{what}, {'lower' if what in ('NLL', 'ECE') else 'higher'} is better", fontsize=9
    )
    if axis is not axes[0]:
        axis.set_yticklabels([])
plt.show()

# %% [markdown]
# One seed of one small net: take the order with a grain of salt, and measure on your own. A temperature is the
# least that should be done. Draws from the net's own dropout cost nothing more to train, and noise that was learned
# has the best probabilities here.
#
# ## Decide
#
# A conformal rule turns probabilities into sets that hold the true class as often as you ask, whatever the
# net. An unsure row has a larger set.

# %%
p = vd.predict(tuned, validation.x, seed=0)
rule = vd.conformal(p, validation.y, level=0.95)
sets = rule.classes(vd.predict(tuned, test.x, seed=0))
inside = sets[torch.arange(len(sets)), test.y].float().mean().item()
print(f"coverage {inside:.3f}, classes in a set {sets.sum(1).float().mean():.2f}")

# %% [markdown]
# Next: [make it smaller and ship it](smaller.md), and the how-to on [calibration](../calibrate.md).

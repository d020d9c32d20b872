# %% [markdown]
# # 1 Uncertainty of a trained model
#
# You have a trained classifier and want to know whether its probabilities can be trusted. This tutorial applies three ways to a small
# convolutional model on 8 × 8 digits: temperature scaling, MC dropout, and fine-tuning with learned noise. It measures calibration, the
# detection of errors, and the detection of out-of-distribution (OOD) inputs, here patches of photographs.

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
photos = load_out_of_distribution("photos", (1, 8, 8))
print(len(train.x), len(validation.x), len(test.x), len(photos))

# %% [markdown]
# ## The trained model
#
# The model is trained on only 120 images until it fits them perfectly, so it is overconfident. It has a dropout layer, as many models do.

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
# - NLL and expected calibration error (ECE) measure calibration. Lower is better.
# - "errors" is the AUROC of detecting wrong predictions with the entropy. Higher is better.
# - "OOD" is the AUROC of detecting photographs with the entropy. Higher is better.

# %%
scores = {}


def score(name, predict):
    p, ood = predict(test.x), predict(photos)
    wrong = p.probs.argmax(1) != test.y
    scores[name] = {
        "accuracy": 1 - wrong.float().mean().item(),
        "NLL": -p.log_prob(test.y).mean().item(),
        "ECE": vd.metrics.ece(p.probs, test.y).item(),
        "errors": vd.metrics.auroc(p.entropy[~wrong], p.entropy[wrong]).item(),
        "OOD": vd.metrics.auroc(p.entropy, ood.entropy).item(),
    }
    print(f"{name:12}", "  ".join(f"{k} {v:.3f}" for k, v in scores[name].items()))


score("plain", lambda x: vd.predict(net, x, mode="mean"))

# %% [markdown]
# ## 1. Temperature scaling
#
# One number is fitted on validation data that was not used for training. It reduces the NLL and the ECE strongly. It does not change the predicted
# classes, so the accuracy stays the same.

# %%
calibrated = vd.calibrate(net, (validation.x, validation.y))
print(calibrated)
score("temperature", lambda x: vd.predict(net, x, mode="mean", likelihood=calibrated))

# %% [markdown]
# ## 2. MC dropout
#
# `mc_dropout` samples from the existing dropout layer at prediction time. No training is needed, and all other layers stay in evaluation mode.

# %%
dropped = vd.convert(copy.deepcopy(net), vd.mc_dropout())
likelihood = vd.calibrate(dropped, (validation.x, validation.y), seed=0)
score("MC dropout", lambda x: vd.predict(dropped, x, likelihood=likelihood, seed=0))

# %% [markdown]
# ## 3. Fine-tuning with learned noise
#
# Every weight gets a variance, and a few epochs with the ELBO learn the variances together with the weights.

# %%
batches = list(zip(x.split(40), y.split(40), strict=True))
held_out = (validation.x, validation.y)
noisy = vd.convert(copy.deepcopy(net), vd.bayes_by_backprop())
tuned = vd.fine_tune(noisy, batches, validation=held_out, epochs=10)
score("fine-tuned", lambda x: vd.predict(tuned, x, seed=0))

# %% [markdown]
# ## Comparison

# %%
figure, axes = plt.subplots(1, 4, figsize=(11, 2.6), layout="constrained")
for axis, metric in zip(axes, ("NLL", "ECE", "errors", "OOD"), strict=True):
    axis.barh(list(scores), [s[metric] for s in scores.values()], color="tab:blue")
    axis.invert_yaxis()
    axis.set_title(
        f"{metric}, {'lower' if metric in ('NLL', 'ECE') else 'higher'} is better", fontsize=9
    )
    if axis is not axes[0]:
        axis.set_yticklabels([])
plt.show()

# %% [markdown]
# These are the results of one seed of one small model, so measure on your own data. Here temperature scaling accounts for almost all of the calibration
# gain. Fine-tuning with learned noise detects OOD inputs best, with a slightly lower accuracy. MC dropout is between the two and needs no training.
#
# ## Prediction sets
#
# A conformal rule turns probabilities into sets that contain the true class with a given probability, whatever the model. If the model is
# uncertain, the set is larger.

# %%
p = vd.predict(tuned, validation.x, seed=0)
rule = vd.conformal(p, validation.y, level=0.95)
sets = rule.classes(vd.predict(tuned, test.x, seed=0))
inside = sets[torch.arange(len(sets)), test.y].float().mean().item()
print(f"coverage {inside:.3f}, classes in a set {sets.sum(1).float().mean():.2f}")

# %% [markdown]
# Next: [make the model smaller and deploy it](smaller.md). The page on [calibration](../calibrate.md) compares these ways on a larger model.

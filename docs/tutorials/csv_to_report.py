# %% [markdown]
# # 3 A CSV, from the command line to a report
#
# A table in, a trained run, its scores, predictions with intervals and one HTML file out. Here the commands are
# called from Python, so that this page can be run; in a shell type what stands behind `vardrop`.

# %%
import shlex
import subprocess

import matplotlib.pyplot as plt
import pandas as pd
from sklearn.datasets import load_diabetes


def shell(command):
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    print((done.stdout + done.stderr).strip())
    assert done.returncode == 0


# %% [markdown]
# ## The table
#
# 442 patients, with a column of texts and some holes, as tables have them. The last rows arrive later.

# %%
table = load_diabetes(as_frame=True, scaled=False).frame
table["sex"] = table["sex"].map({1: "f", 2: "m"})
table.loc[::17, "bp"] = None
table.insert(0, "patient", range(len(table)))
table[:400].to_csv("patients.csv", index=False)
table[400:].to_csv("new.csv", index=False)
print(table.head(3).to_string())

# %% [markdown]
# ## Fit
#
# What is inferred of every column is printed. Without `--epochs` and `--folds` the defaults take a minute or
# two and choose the weight of the KL by folds; the short training here is enough to see how it goes.

# %%
shell(
    "vardrop fit patients.csv --target target --id patient --epochs 60 --folds 1 --no-compare "
    "--quiet --out runs/patients"
)
shell("vardrop evaluate runs/patients")

# %% [markdown]
# ## Predict
#
# New rows, with an interval that covers 95 % of them. Missing values and texts are treated as in training.

# %%
shell("vardrop predict runs/patients new.csv --out predictions.csv --quiet")
predictions = pd.read_csv("predictions.csv")
print(predictions.head(3).to_string())
truth = table["target"][400:].to_numpy()
inside = predictions["lower"].le(truth) & predictions["upper"].ge(truth)
print(f"{inside.mean():.0%} of the new patients are inside their interval")

# %%
order = predictions["mean"].argsort()
figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
low, high = predictions["lower"][order], predictions["upper"][order]
axis.vlines(range(len(order)), low, high, color="tab:blue", alpha=0.4, label="95 % interval")
axis.plot(predictions["mean"][order].to_numpy(), ".", color="tab:blue", label="mean")
axis.plot(truth[order], "x", color="black", markersize=4, label="truth")
axis.set(xlabel="new patients, by prediction", ylabel="progression")
axis.legend()
plt.show()

# %% [markdown]
# ## On new rows with their truth, and the report

# %%
shell("vardrop evaluate runs/patients --data new.csv")
shell("vardrop report runs/patients")
shell("vardrop export runs/patients --onnx patients.onnx --samples 0")

# %% [markdown]
# `report.html` is one file: what is predicted, how good against the mean, how sure, what was run. The ONNX file
# takes the raw columns. A run that was stopped goes on with `vardrop fit --resume --out runs/patients`.
#
# More: [fit](../fit.md), [evaluate](../evaluate.md), [compare](../compare.md), [export](../export.md).

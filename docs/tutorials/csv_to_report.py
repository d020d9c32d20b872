# %% [markdown]
# # 3 A CSV file, from the command line to a report
#
# This tutorial trains a model on a CSV file, scores it, predicts new examples with intervals, and writes an HTML report. The commands are called from
# Python so that the page can be executed. In a shell, type the text after `shell`.

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
# The table has 442 patients, one text column and some missing values. The last 42 patients are kept as new data.

# %%
table = load_diabetes(as_frame=True, scaled=False).frame
table["sex"] = table["sex"].map({1: "f", 2: "m"})
table.loc[::17, "bp"] = None
table.insert(0, "patient", range(len(table)))
table[:400].to_csv("patients.csv", index=False)
table[400:].to_csv("new.csv", index=False)
print(table.head(3).to_string())

# %% [markdown]
# ## Train
#
# `fit` infers the type of every column. Without `--epochs` and `--folds`, it selects the KL weight with cross-validation, which takes a minute or two. This
# short training is enough for a first look.

# %%
shell(
    "vardrop fit patients.csv --target target --id patient --epochs 60 --folds 1 --no-compare "
    "--quiet --out runs/patients"
)
shell("vardrop evaluate runs/patients")

# %% [markdown]
# ## Predict
#
# The predictions of new patients include a 95% interval. Missing values and texts are handled as in training.

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
axis.vlines(range(len(order)), low, high, color="tab:blue", alpha=0.4, label="95% interval")
axis.plot(predictions["mean"][order].to_numpy(), ".", color="tab:blue", label="mean")
axis.plot(truth[order], "x", color="black", markersize=4, label="truth")
axis.set(xlabel="new patients, sorted by prediction", ylabel="progression")
axis.legend()
plt.show()

# %% [markdown]
# ## Score new data, and write a report

# %%
shell("vardrop evaluate runs/patients --data new.csv")
shell("vardrop report runs/patients")
shell("vardrop export runs/patients --onnx patients.onnx --samples 0")

# %% [markdown]
# `report.html` is one file with the scores, the baseline, the uncertainty and the configuration. The ONNX file takes the raw columns. If training is
# interrupted, continue it with `vardrop fit --resume --out runs/patients`.
#
# More: [fit](../fit.md), [evaluate, compare and report](../evaluate.md), [export a run](../serve.md#export-a-run).

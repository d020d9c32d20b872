# %% [markdown]
# # 4 scikit-learn estimators
#
# `VardropRegressor` and `VardropClassifier` are scikit-learn compatible estimators. They work in pipelines and searches, train like
# [`vardrop fit`](../fit.md), and predict with uncertainty. They need the extra `app`.

# %%
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import BayesianRidge
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import QuantileTransformer

from vardrop.sklearn import VardropClassifier, VardropRegressor

X, y = load_diabetes(return_X_y=True, as_frame=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.25, random_state=0)

# %% [markdown]
# ## Regression with intervals
#
# `epochs`, `folds` and the KL weight `beta` are set here to save time. Without them, the estimator selects the KL weight with cross-validation. This is more
# accurate and takes minutes instead of seconds.

# %%
model = VardropRegressor(epochs=60, folds=1, beta=1.0, random_state=0).fit(X_train, y_train)
mean, std = model.predict(X_test, return_std=True)
lower, upper = model.predict_interval(X_test, coverage=0.9)
print(f"R² {model.score(X_test, y_test):.3f}")
print(f"coverage of 90% intervals {np.mean((lower <= y_test) & (y_test <= upper)):.3f}")

linear = BayesianRidge().fit(X_train, y_train)
print(f"R² of BayesianRidge {linear.score(X_test, y_test):.3f}")

# %% [markdown]
# Always compare with a linear model. On this table, after such a short training, it is better. The estimator adds calibrated intervals and splits the
# uncertainty. Here almost all of it is noise of the target, which more examples would not reduce.

# %%
p = model.predict_dist(X_test)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.errorbar(mean, y_test, xerr=1.64 * std, fmt=".", alpha=0.5)
left.plot([50, 300], [50, 300], color="black", linewidth=0.8)
left.set(xlabel="predicted, with its 90% interval", ylabel="true")
right.hist(p.aleatoric.sqrt().flatten(), 20, alpha=0.7, label="aleatoric")
right.hist(p.epistemic.sqrt().flatten(), 20, alpha=0.7, label="epistemic")
right.set(xlabel="standard deviation")
right.legend()
plt.show()

# %% [markdown]
# ## Classification with prediction sets
#
# A prediction set contains the true class with the given probability. If the model is uncertain, the set contains both classes.

# %%
X, y = load_breast_cancer(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.3, random_state=0, stratify=y)
classifier = VardropClassifier((16,), "sparse_vd", epochs=30, folds=1, random_state=0)
classifier.fit(X_train, y_train)
sets = classifier.predict_set(X_test, coverage=0.95)
print(f"AUROC {roc_auc_score(y_test, classifier.predict_proba(X_test)[:, 1]):.4f}")
print(
    f"coverage {sets[np.arange(len(sets)), y_test].mean():.3f}, sets of two {np.mean(sets.sum(1) == 2):.3f}"
)

# %% [markdown]
# ## Pipelines and searches

# %%
pipeline = make_pipeline(
    QuantileTransformer(n_quantiles=50),
    VardropClassifier((16,), epochs=10, folds=1, random_state=0),
)
search = GridSearchCV(
    pipeline, {"vardropclassifier__recipe": ["bayes_by_backprop", "sparse_vd"]}, cv=2
)
search.fit(X_train, y_train)
print(search.best_params_, round(search.score(X_test, y_test), 3))

# %% [markdown]
# ## Compress and save

# %%
small, plan = classifier.compress(max_drop=0.01)
print(plan)
classifier.save("model.vardrop")
again = VardropClassifier.load("model.vardrop")
assert (again.predict(X_test) == classifier.predict(X_test)).all()

# %% [markdown]
# ## Parameters and methods
#
# | name | meaning |
# |---|---|
# | `module` | hidden widths, or a custom model, which is copied |
# | `recipe` | a method or its name, None for a plain model |
# | `sample_weight` | an example with weight 2 counts as two |
# | `class_weight` | "balanced", or weights by class ([effect on probabilities](../fit.md#rare-classes)) |
# | `warm_start` | start with the weights of the last fit |
# | `predict(return_std=True)`, `predict_interval`, `predict_quantiles` | standard deviation, conformal intervals, quantiles (regression) |
# | `predict_proba`, `predict_set` | probabilities, conformal sets (classification) |
# | `predict_dist` | a `Prediction` with aleatoric and epistemic uncertainty and samples |
# | `compress(max_drop=)` | a smaller plain model and its plan |
# | `save`, `load` | one file with a checksum, without pickle. Pickle works too |
#
# - pandas and polars DataFrames can have texts, dates and missing values.
# - Samples are whole functions in double precision, so an example has the same prediction alone and in any batch.
# - There is no `partial_fit`, because the prior cannot be weighed against examples that are no longer available.
# - All checks of scikit-learn pass except one, which scikit-learn's own shuffling estimators fail as well: an example with weight 2 is not bit-identical to
#   the example given twice, because examples see different noise and folds. The objective itself is exact.

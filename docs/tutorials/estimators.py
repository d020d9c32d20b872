# %% [markdown]
# # 4 scikit-learn
#
# An estimator that says how sure it is, in pipelines and searches, on data that scikit-learn brings.

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
# ## Values with intervals
#
# `epochs`, `folds` and the KL weight `beta` are given here, to be quick. Left out, folds choose the weight, which
# is better and takes a minute or two.

# %%
model = VardropRegressor(epochs=60, folds=1, beta=1.0, random_state=0).fit(X_train, y_train)
mean, std = model.predict(X_test, return_std=True)
lower, upper = model.predict_interval(X_test, coverage=0.9)
print(f"R² {model.score(X_test, y_test):.3f}")
print(f"coverage of 90 % intervals {np.mean((lower <= y_test) & (y_test <= upper)):.3f}")

linear = BayesianRidge().fit(X_train, y_train)
print(f"R² of BayesianRidge {linear.score(X_test, y_test):.3f}")

# %% [markdown]
# Look at a linear model too before you take a net: on this table, and after so short a training, it is the better
# one. What the estimator adds are intervals that hold what they promise, and the split of the uncertainty: here
# nearly all of it is noise of the target, which more rows would not take away.

# %%
p = model.predict_dist(X_test)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.errorbar(mean, y_test, xerr=1.64 * std, fmt=".", alpha=0.5)
left.plot([50, 300], [50, 300], color="black", linewidth=0.8)
left.set(xlabel="predicted, with its 90 % band", ylabel="true")
right.hist(p.aleatoric.sqrt().flatten(), 20, alpha=0.7, label="noise of the target")
right.hist(p.epistemic.sqrt().flatten(), 20, alpha=0.7, label="doubt of the net")
right.set(xlabel="standard deviation")
right.legend()
plt.show()

# %% [markdown]
# ## Classes with sets
#
# A set holds the true class as often as asked; a row in doubt has both classes.

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
# ## In a pipeline and a search

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
# ## Smaller, and saved

# %%
small, plan = classifier.compress(max_drop=0.01)
print(plan)
classifier.save("model.vardrop")
again = VardropClassifier.load("model.vardrop")
assert (again.predict(X_test) == classifier.predict(X_test)).all()

# %% [markdown]
# More: [the estimators](../sklearn.md).

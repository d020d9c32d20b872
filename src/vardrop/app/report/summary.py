"""A run in a few sentences, for the person who has to decide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vardrop._core.values import to_json
from vardrop.app.report.score_texts import BASELINES, MEANINGS, number, title
from vardrop.app.report.tables import flatten, show
from vardrop.app.store import StoredRun
from vardrop.recipes import METHODS


class Figure(NamedTuple):
    """One thing to know: the question, the answer in large type, and what it means."""

    question: str
    value: str
    text: str


def method_name(stored: Any) -> str:
    """The name of a method from its description, with what is not as usual.

    >>> import vardrop as vd
    >>> method_name(to_json(vd.sparse_vd())), method_name(None)
    ('sparse_vd', 'none')
    >>> method_name(to_json(vd.bayes_by_backprop(prior=vd.priors.Normal(learned=True))))
    'bayes_by_backprop (prior learned=True)'
    """
    if not isinstance(stored, Mapping):
        return show(stored)
    found, best, fewest = _leaves(stored), "", math.inf
    for name, make in METHODS.items():
        usual = _leaves(to_json(make()))
        other = [k for k in found if found[k] != usual.get(k)]
        if _kinds(found) == _kinds(usual) and len(other) < fewest:
            fewest = len(other)
            changed = (f"{k.removesuffix(' type')}={show(found[k])}" for k in other)
            best = f"{name} ({', '.join(changed)})" if other else name
    return best or show(stored)  # of a package that is not imported here


def _leaves(value: Mapping[str, Any]) -> dict[str, Any]:
    """What a description says, by the path to it."""
    flat: dict[str, Any] = {}
    for key, part in value.items():
        if isinstance(part, Mapping):
            flat |= {f"{key} {k}": v for k, v in _leaves(part).items()}
        elif key != "version" and part is not None and part is not False:
            flat[key] = part
    return flat


def _kinds(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a method: the types of its parts, whatever estimates them."""
    return {k: v for k, v in leaves.items() if k.endswith("type") and "estimator" not in k}


def predicts(run: StoredRun) -> str:
    """What a run predicts, from what, and by which net and method."""
    config = run.config
    data = config.get("data") or {}
    name = "data given in Python" if data.get("given") else Path(str(data.get("name") or "")).name
    what = f"a class of {name}" if run.task == "classification" else f"a number of {name}"
    if run.target:
        what = f"{run.target!r} of {name}"
    classes = [str(c) for c in config.get("classes") or []]
    if classes:
        shown = ", ".join(classes[:10]) + (", …" if len(classes) > 10 else "")
        what += f", one of {len(classes)} classes ({shown})"
    shape = config.get("shape") or []
    columns = run.preprocessing.get("columns")
    source = ""
    if isinstance(columns, list):
        source = f" from {len(columns)} column{'s' if len(columns) != 1 else ''}"
    elif len(shape) == 3:
        source = f" from images of {shape[1]} by {shape[2]} pixels"
    sizes = config.get("sizes") or {}
    rows = f" on {sizes['train']:,} rows" if isinstance(sizes.get("train"), int) else ""
    return (
        f"Predicts {what}{source}, by the net {config.get('net', '?')} trained{rows} with the "
        f"method {method_name(config.get('method'))}."
    )


def figures(run: StoredRun) -> list[Figure]:
    """How good, against what, how sure, how small."""
    scores, baseline = run.results.get("metrics") or {}, run.results.get("baseline") or {}
    question = "How good"
    if not scores:
        scores, baseline = _held_out(run)
        question = "How good on held-out rows"
    names = list(scores)
    good = names[: 2 if names[:1] == ["balanced_accuracy"] else 1]
    if run.task == "regression":
        good = [name for name in ("rmse", "r2") if name in scores]
    found = [_score(question, name, scores, baseline) for name in good]
    if good == ["accuracy"] and question == "How good":
        found[0] = found[0]._replace(text=f"{found[0].text}{_plausible(run)}")
    sure = [name for name in ("ece", "coverage95") if name in scores]
    found += [_score("How sure", name, scores, {}) for name in sure]
    return [*found, *_against(run), *_small(run)]


def _held_out(run: StoredRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores of the net, NLL last, and of none, where rows were held out and none kept to test."""
    held = run.results.get("held_out") or {}
    net = dict(held["net"]) if isinstance(held.get("net"), Mapping) else {}
    net |= {"nll": net.pop("nll")} if "nll" in net else {}
    for name in ("majority", "mean"):
        if isinstance(held.get(name), Mapping):
            return net, {"name": name, **held[name]}
    return net, {}


def _score(
    question: str, name: str, scores: Mapping[str, Any], baseline: Mapping[str, Any]
) -> Figure:
    meaning = MEANINGS.get(name)
    text = f"{meaning.sentence[0].upper()}{meaning.sentence[1:]}." if meaning else ""
    if name == "coverage95" and "width95" in scores:
        text += f" The interval is {number(scores['width95'])} wide on average."
    if name in baseline:
        other = BASELINES.get(str(baseline.get("name")), "no net")
        text += f" The {other} alone: {number(baseline[name])}."
        if name == "balanced_accuracy" and "accuracy" in baseline:
            both = (number(found.get("accuracy")) for found in (scores, baseline))
            text += " Accuracy, which is easy here: {}, and {} by that class alone.".format(*both)
    label = title(name)
    return Figure(f"{question}: {label[0].upper()}{label[1:]}", number(scores[name]), text)


def _plausible(run: StoredRun) -> str:
    """Wilson's 95 % interval of an accuracy, which few rows leave wide."""
    accuracy, rows = run.results["metrics"]["accuracy"], len(run.arrays.get("labels", ()))
    if not isinstance(accuracy, float) or not rows:
        return ""
    z = 1.96 / math.sqrt(rows)
    middle, scale = accuracy + z * z / 2, 1 + z * z
    half = z * math.sqrt(accuracy * (1 - accuracy) + z * z / 4)
    low, high = (middle - half) / scale, (middle + half) / scale
    return f" {rows:,} test rows leave open {low:.3f} to {min(high, 1.0):.3f}."


def _against(run: StoredRun) -> list[Figure]:
    """The plain net, where the run was compared with it; two standard errors tell them apart."""
    held, against = run.results.get("held_out") or {}, run.results.get("against") or {}
    net, plain, found = held.get("net"), held.get("plain"), against.get("plain")
    if not (isinstance(net, Mapping) and isinstance(plain, Mapping) and isinstance(found, Mapping)):
        return []
    gap, error = found.get("nll"), found.get("error")
    if not isinstance(gap, float) or not isinstance(error, float):
        return []
    word = "no clear difference" if abs(gap) < 2 * error else "better" if gap < 0 else "worse"
    both = "; ".join(
        f"{title(name)} {number(net[name])}, plain {number(plain[name])}"
        for name in net
        if name in plain
    )
    apart = f"{number(abs(gap))} \N{PLUS-MINUS SIGN} {number(error)}"
    text = f"On held-out rows: {both}. The NLLs differ by {apart}."
    return [Figure("Against the plain net", word, text)]


def _small(run: StoredRun) -> list[Figure]:
    found = run.results.get("compression") or {}
    before, after = found.get("weights_before"), found.get("weights_after")
    if isinstance(before, int) and isinstance(after, int) and before:
        score = str(found.get("score", "score"))
        scores = [number(found.get(f"test_score_{when}")) for when in ("before", "after")]
        text = (
            f"{after:,} of {before:,} weights are left; {title(score)} on test data "
            f"{' before, '.join(scores)} after."
        )
        if isinstance(found.get("packed_bytes"), int):
            text += f" Packed, the net takes {found['packed_bytes']:,} bytes."
        return [Figure("How small: weights left", f"{after / before:.1%}", text)]
    layers = run.results.get("layers") or []
    weights = sum(row["weights"] for row in layers)
    if not weights:
        return []
    method = run.config.get("method") is not None
    how = "`vardrop compress` would tell what can go" if method else "trained without noise"
    return [Figure("How small: weights", f"{weights:,}", f"Not compressed; {how}.")]


def remarks(run: StoredRun) -> list[str]:
    """What has to be told beside the figures: where something simpler is as good, what is open."""
    held, notes = run.results.get("held_out") or {}, run.results.get("notes") or []
    said = [str(held["advice"])] if held.get("advice") else []
    return [*said, *map(str, notes)]


def facts(run: StoredRun, apart: bool) -> dict[str, str]:
    """What was run, by name; settings and versions one by one where they are `apart`."""
    config = {k: v for k, v in run.config.items() if k != "version"}
    settings = config.get("settings")
    if isinstance(settings, Mapping) and "seed" in settings:
        config.pop("seed", None)
    recipe = config.get("method")
    config["method"] = method_name(recipe)
    if recipe is not None and show(recipe) != config["method"]:
        config["recipe"] = show(recipe)
    if apart:
        config = flatten(config)
    pairs = {
        key.replace("_", " "): show(value)
        for key, value in config.items()
        if value is not None and value is not False and value != []
    }
    if run.history:
        seconds = sum(float(row.get("seconds") or 0) for row in run.history)
        pairs["trained"] = f"{len(run.history)} epochs, {seconds:,.1f} seconds"
    return pairs

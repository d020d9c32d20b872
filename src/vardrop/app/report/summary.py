"""A run in a few sentences: what it predicts, how well, and what was run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vardrop._core.values import to_json
from vardrop.app.score_texts import (
    MODEL,
    estimate_text,
    judge_difference,
    number,
    score_columns,
    title,
)
from vardrop.app.store import StoredRun
from vardrop.metrics.intervals import Estimate
from vardrop.recipes import METHODS


def show(value: Any) -> str:
    """A JSON value in one line of text, values of the library as `Type(field=value)`.

    >>> show({"type": "Normal", "version": 1, "scale": 0.1})
    'Normal(scale=0.1)'
    >>> show({"torch": "2.13.0", "seeds": [0, 1]}), show(0.123456), show(None)
    ('torch 2.13.0, seeds 0, 1', '0.1235', 'none')
    """
    if isinstance(value, Mapping):
        fields = {k: v for k, v in value.items() if k not in ("type", "version") and _is_set(v)}
        if "type" in value:
            return f"{value['type']}({', '.join(f'{k}={show(v)}' for k, v in fields.items())})"
        return ", ".join(f"{k} {show(v)}" for k, v in fields.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(show, value))
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "none" if value is None else str(value)


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != []


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with the names joined.

    >>> flatten({"data": {"name": "iris", "given": False}, "seed": 0})
    {'data name': 'iris', 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping)
        flat |= flatten(value, f"{prefix}{key} ") if nested else {f"{prefix}{key}": value}
    return {key: value for key, value in flat.items() if _is_set(value)}


def method_name(stored: Any) -> str:
    """The name of the method that a recipe is nearest to, with the options that differ.

    >>> import vardrop as vd
    >>> method_name(to_json(vd.sparse_vd())), method_name(None)
    ('sparse_vd', 'none')
    >>> method_name(to_json(vd.bayes_by_backprop(prior=vd.priors.Normal(learned=True))))
    'bayes_by_backprop (prior learned=True)'
    """
    if not isinstance(stored, Mapping):
        return show(stored)
    leaves, best, fewest = flatten(stored), show(stored), math.inf
    for name, make in METHODS.items():
        usual = flatten(to_json(make()))
        changed = {k: v for k, v in leaves.items() if usual.get(k) != v and "version" not in k}
        if _types(leaves) == _types(usual) and len(changed) < fewest:
            options = ", ".join(f"{k.removesuffix(' type')}={show(v)}" for k, v in changed.items())
            best, fewest = f"{name} ({options})" if changed else name, len(changed)
    return best


def _types(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The types of the parts of a recipe, which make the method, without the estimator."""
    return {k: v for k, v in leaves.items() if k.endswith("type") and "estimator" not in k}


def describe(run: StoredRun) -> str:
    """What a run predicts, with which model and method."""
    config, sizes = run.config, run.config.get("sizes") or {}
    data = Path(str((config.get("data") or {}).get("name") or "data")).name
    classes = len(config.get("classes") or [])
    what = repr(run.target) if run.target else f"one of {classes} classes" if classes else "a value"
    examples = f" on {sizes['train']:,} examples" if "train" in sizes else ""
    return (
        f"Predicts {what} of {data} with the model {config.get('net', '?')}, trained{examples} "
        f"with the method {method_name(config.get('method'))}."
    )


def verdict(run: StoredRun, scores: Mapping[str, Estimate]) -> list[tuple[str, str]]:
    """The results to decide by, each in a few words and a sentence."""
    return [_quality(run, scores), *_against_plain(run), *_compression(run)]


def _quality(run: StoredRun, scores: Mapping[str, Estimate]) -> tuple[str, str]:
    """The main score, compared with the baselines."""
    columns = score_columns(run.results)
    values = columns.pop(MODEL, None)
    if values is None:
        return "not evaluated yet", "Try `vardrop evaluate`."
    name = next((n for n in values if n != "nll"), "nll")
    text = "on test data" if run.results.get("metrics") else "on held-out examples"
    for label, other in columns.items():
        text += f"; {label}: {number(other.get(name))}"
    return f"{title(name)} {estimate_text(scores.get(name, Estimate(values[name])))}", f"{text}."


def _against_plain(run: StoredRun) -> list[tuple[str, str]]:
    """The plain model on held-out examples, if the run was compared with it."""
    held_out = run.results.get("held_out") or {}
    against = (run.results.get("against") or {}).get("plain")
    if not against:
        return []
    word = judge_difference("nll", Estimate(against["nll"], against["error"]))
    head = f"{word} than the plain model" if word else "no clear difference from the plain model"
    nll, plain = (number(held_out[name]["nll"]) for name in ("net", "plain"))
    gap = f"{number(against['nll'])} \N{PLUS-MINUS SIGN} {number(against['error'])}"
    text = f"on held-out examples: NLL {nll}, plain model {plain}; difference {gap}."
    return [(head, text)]


def _compression(run: StoredRun) -> list[tuple[str, str]]:
    results = run.results.get("compression") or {}
    if not results:
        return []
    weights, macs = (results[f"{k}_after"] / results[f"{k}_before"] for k in ("weights", "macs"))
    before, after = (number(results[f"test_score_{when}"]) for when in ("before", "after"))
    head = f"{weights:.1%} of the weights and {macs:.1%} of the multiplications left"
    return [
        (head, f"after compression; {title(results['score'])} on test data {before} to {after}.")
    ]


def notes(run: StoredRun) -> list[str]:
    """What qualifies the results: advice, and notes of the evaluation."""
    advice = (run.results.get("held_out") or {}).get("advice")
    return [str(note) for note in (advice, *(run.results.get("notes") or [])) if note]


def facts(run: StoredRun, flat: bool) -> dict[str, str]:
    """The configuration of a run by name, settings one by one if `flat`, and its training time."""
    config = {k: v for k, v in run.config.items() if k not in ("version", "rows") and _is_set(v)}
    config["method"] = method_name(run.config.get("method"))
    values = flatten(config) if flat else config
    pairs = {name.replace("_", " "): show(value) for name, value in values.items()}
    if run.history:
        pairs["trained"] = f"{len(run.history)} epochs, {run.seconds:,.1f} seconds"
    return pairs

"""A run in a few sentences: its target, its scores and its configuration."""

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
from vardrop.app.store import Record, StoredRun
from vardrop.metrics.intervals import Estimate
from vardrop.recipes import METHODS


def show(stored: Any) -> str:
    """Stored JSON in one line of text, values of the library as `Type(field=value)`.

    >>> show({"type": "Normal", "version": 1, "scale": 0.1})
    'Normal(scale=0.1)'
    >>> show({"torch": "2.13.0", "seeds": [0, 1]}), show(0.123456), show(None)
    ('torch 2.13.0, seeds 0, 1', '0.1235', 'none')
    """
    if isinstance(stored, Mapping):
        fields = {k: v for k, v in stored.items() if k not in ("type", "version") and _is_set(v)}
        if "type" in stored:
            return f"{stored['type']}({', '.join(f'{k}={show(v)}' for k, v in fields.items())})"
        return ", ".join(f"{k} {show(v)}" for k, v in fields.items())
    if isinstance(stored, list | tuple):
        return ", ".join(map(show, stored))
    if isinstance(stored, float) and math.isfinite(stored):
        return f"{stored:.4g}" if abs(stored) < 1e4 else f"{stored:,.0f}"
    return "none" if stored is None else str(stored)


def _is_set(stored: object) -> bool:
    return stored is not None and stored is not False and stored != []


def flatten(stored: Mapping[str, Any], prefix: str = "") -> Record:
    """Nested mappings as one, with the names joined.

    >>> flatten({"data": {"name": "iris", "in_memory": False}, "seed": 0})
    {'data name': 'iris', 'seed': 0}
    """
    flat: Record = {}
    for key, entry in stored.items():
        nested = isinstance(entry, Mapping)
        flat |= flatten(entry, f"{prefix}{key} ") if nested else {f"{prefix}{key}": entry}
    return {key: entry for key, entry in flat.items() if _is_set(entry)}


def method_name(stored: Mapping[str, Any] | str | None) -> str:
    """The name of the method that is nearest to a recipe, with the options that differ.

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


def _types(leaves: Record) -> Record:
    """The types of the parts of a recipe, which identify the method, without the estimator."""
    return {k: v for k, v in leaves.items() if k.endswith("type") and "estimator" not in k}


def describe(run: StoredRun) -> str:
    """The target, the model and the method of a run."""
    config, sizes = run.config, run.config.get("sizes") or {}
    source = Path(str((config.get("data") or {}).get("name") or "data")).name
    classes = len(config.get("classes") or [])
    what = repr(run.target) if run.target else f"one of {classes} classes" if classes else "a value"
    examples = f" on {sizes['train']:,} examples" if "train" in sizes else ""
    return (
        f"Predicts {what} of {source} with the model {config.get('net', '?')}, trained{examples} "
        f"with the method {method_name(config.get('method'))}."
    )


def verdict(run: StoredRun, scores: Mapping[str, Estimate]) -> list[tuple[str, str]]:
    """The main results, each in a few words and a sentence."""
    return [_quality(run, scores), *_against_plain(run), *_compression(run)]


def _quality(run: StoredRun, scores: Mapping[str, Estimate]) -> tuple[str, str]:
    """The main score, compared with the baselines."""
    columns = score_columns(run.results)
    metrics = columns.pop(MODEL, None)
    if metrics is None:
        return "not evaluated yet", "Try `vardrop evaluate`."
    name = next((n for n in metrics if n != "nll"), "nll")
    text = "on test data" if run.results.get("metrics") else "on held-out examples"
    for label, other in columns.items():
        text += f"; {label}: {number(other.get(name))}"
    score = estimate_text(scores[name]) if name in scores else number(metrics[name])
    return f"{title(name)} {score}", f"{text}."


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
    stored = run.results.get("compression") or {}
    if not stored:
        return []
    weights, macs = (stored[f"{k}_after"] / stored[f"{k}_before"] for k in ("weights", "macs"))
    before, after = (number(stored[f"test_score_{when}"]) for when in ("before", "after"))
    head = f"{weights:.1%} of the weights and {macs:.1%} of the multiplications left"
    text = f"after compression; {title(stored['score'])} on test data {before} to {after}."
    return [(head, text)]


def notes(run: StoredRun) -> list[str]:
    """Limits of the results: advice, and notes of the evaluation."""
    advice = (run.results.get("held_out") or {}).get("advice")
    return [str(note) for note in (advice, *(run.results.get("notes") or [])) if note]


def facts(run: StoredRun, flat: bool) -> dict[str, str]:
    """The configuration of a run by name, settings one by one if `flat`, and its training time."""
    config = {k: v for k, v in run.config.items() if k not in ("version", "rows") and _is_set(v)}
    config["method"] = method_name(run.config.get("method"))
    entries = flatten(config) if flat else config
    pairs = {name.replace("_", " "): show(entry) for name, entry in entries.items()}
    if run.history:
        pairs["trained"] = f"{len(run.history)} epochs, {run.seconds:,.1f} seconds"
    return pairs

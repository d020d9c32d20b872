"""A run in a few sentences: its target, its scores and its limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from vardrop.app.report.comparison import Comparison
from vardrop.app.score_texts import (
    MODEL,
    estimate_text,
    judge_difference,
    number,
    score_columns,
    title,
)
from vardrop.app.store import StoredRun, method_name
from vardrop.metrics.intervals import Estimate


def describe(run: StoredRun) -> str:
    """The target, the model and the method of a run."""
    config, sizes = run.config, run.config.get("sizes") or {}
    data = config.get("data") or {}
    name = config.get("name") if data.get("in_memory") else data.get("name")
    source = Path(str(name or "data")).name
    classes = len(config.get("classes") or [])
    what = repr(run.target) if run.target else f"one of {classes} classes" if classes else "a value"
    examples = f" on {sizes['train']:,} examples" if "train" in sizes else ""
    return (
        f"Predicts {what} of {source} with the model {config.get('net', '?')}, trained{examples} "
        f"with the method {method_name(config.get('method'))}."
    )


def verdict(name: str, run: StoredRun, compared: Comparison) -> list[tuple[str, str]]:
    """The main results, each in a few words and a sentence."""
    first, against = compared.reference, compared.differences.get(name, {})
    main = [score for score in compared.select() if score in against]
    words = {title(score): judge_difference(score, against[score]) for score in main}
    clear = ", ".join(f"{word} in {score}" for score, word in words.items() if word)
    head = f"{clear} than {first}" if clear else f"no clear difference from {first}"
    text = "; ".join(f"{title(score)} {compared.difference_text(name, score)}" for score in main)
    findings = [_quality(run, compared.scores[name]), (head, f"on test data: {text}.")]
    return [*findings[: 2 if main else 1], *_against_plain(run), *_compression(run)]


def _quality(run: StoredRun, scores: Mapping[str, Estimate]) -> tuple[str, str]:
    """The main score, compared with the baselines."""
    columns = score_columns(run.results)
    metrics = columns.pop(MODEL, None)
    if metrics is None:
        return "not evaluated yet", "Try `vardrop evaluate`."
    name = next((n for n in metrics if n != "nll"), "nll")
    text = "on test data" if run.results.get("metrics") else "on held-out examples"
    for label, other in columns.items():
        text += f"; {label}: {number(other[name])}" if name in other else ""
    score = estimate_text(scores[name]) if name in scores else number(metrics[name])
    return f"{title(name)} {score}", f"{text}."


def _against_plain(run: StoredRun) -> Iterator[tuple[str, str]]:
    """The plain model on held-out examples, if the run was compared with it."""
    held_out = run.results.get("held_out") or {}
    if against := (run.results.get("against") or {}).get("plain"):
        word = judge_difference("nll", Estimate(against["nll"], against["error"]))
        head = f"{word} than" if word else "no clear difference from"
        nll, plain = (number(held_out[name]["nll"]) for name in ("net", "plain"))
        gap = f"{number(against['nll'])} \N{PLUS-MINUS SIGN} {number(against['error'])}"
        text = f"on held-out examples: NLL {nll}, plain model {plain}; difference {gap}."
        yield f"{head} the plain model", text


def _compression(run: StoredRun) -> Iterator[tuple[str, str]]:
    if stored := run.results.get("compression"):
        weights, macs = (stored[f"{k}_after"] / stored[f"{k}_before"] for k in ("weights", "macs"))
        before, after = (number(stored[f"test_score_{when}"]) for when in ("before", "after"))
        head = f"{weights:.1%} of the weights and {macs:.1%} of the multiplications left"
        size = f"; packed file: {packed:,} bytes" if (packed := stored.get("packed_bytes")) else ""
        scores = f"{title(stored['score'])} on test data {before} to {after}"
        yield head, f"after compression; {scores}{size}."


def notes(runs: Mapping[str, StoredRun]) -> Iterator[str]:
    """Limits of the results: advice, and notes of the evaluation. Several runs are named."""
    for name, run in runs.items():
        advice = (run.results.get("held_out") or {}).get("advice")
        limits = filter(None, (advice, *(run.results.get("notes") or [])))
        yield from (f"{name}: {note}" if len(runs) > 1 else str(note) for note in limits)

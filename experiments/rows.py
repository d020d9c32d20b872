"""The table of results as plain data: what the descriptions state beside what was measured."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.descriptions import Experiment
from experiments.runner import finished, result_path
from vardrop.files import read_json


def rows(known: dict[str, Experiment], results: Path) -> list[dict[str, Any]]:
    """For each experiment its description, its `result` or None, and the result's `digest`.

    A result that was measured with other arguments than the description states is left out.
    """
    found = []
    for experiment in known.values():
        path, row = result_path(experiment, results), asdict(experiment)
        done = bool(finished(experiment, path))
        row["result"] = read_json(path) if done else None
        row["digest"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if done else ""
        found.append(row)
    return found

"""Print a table of the zoo: `python -m tests.zoo.table [part of a name ...]`."""

import sys
import time
import warnings

import torch

from tests.zoo.checks import CHECKS
from tests.zoo.models import ZOO
from vardrop import VardropError


def cell(check, entry):
    try:
        return check(entry)
    except VardropError as error:
        return f"refused: {' '.join(str(error).split())}"
    except Exception as error:
        return f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def main(parts):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| model |", " | ".join(CHECKS), "| s |")
    print("|" + "---|" * (len(CHECKS) + 2))
    notes = []
    for name, entry in ZOO.items():
        if parts and not any(part in name for part in parts):
            continue
        start, cells = time.process_time(), []
        for title, check in CHECKS.items():
            text = cell(check, entry)
            if text.startswith(("refused", "FAILED")):
                notes.append(f"- {name}, {title}: {text}")
                text = text.split(":")[0]
            cells.append(text)
        print(
            f"| {name} |", " | ".join(cells), f"| {time.process_time() - start:.0f} |", flush=True
        )
    print("", *notes, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])

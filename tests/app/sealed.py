"""JSON files of a run with other values and a right checksum."""

import json

from vardrop._core.files import with_checksum


def reseal(path, **changes):
    """Give keys of a file other values, as if they had been written there; None takes one out."""
    value = {**json.loads(path.read_text()), "sha256": None, **changes}
    value = {k: v for k, v in value.items() if v is not None}
    path.write_text(json.dumps(with_checksum(value)))

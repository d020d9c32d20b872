"""JSON files of a run with other values and a right checksum."""

import json

from vardrop._core.files import with_checksum


def reseal(path, **changes):
    """Give keys of a file other values, as if they had been written there; None takes one out."""
    value = {**json.loads(path.read_text()), **changes}
    gone = {"sha256", *(key for key, new in changes.items() if new is None)}
    value = {key: v for key, v in value.items() if key not in gone}
    path.write_text(json.dumps(with_checksum(value)))

"""Run commands of the command line in this process."""

import pytest

from vardrop.app.cli import main


def call(*arguments):
    """Run a command; its exit code."""
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in arguments])
    return left.value.code

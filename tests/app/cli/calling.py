"""Run commands of the command line in this process."""

import pytest

from vardrop.app.cli import main


def call(*arguments):
    """Run a command; its exit code."""
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in arguments])
    return left.value.code


def printed(capsys, *arguments, code=0):
    """Run a command that ends with this exit code; what it printed, and its complaints."""
    assert call(*arguments) == code
    return capsys.readouterr()

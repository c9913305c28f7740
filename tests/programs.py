"""The experiments as a user starts them: programs of their own, from the root of the project."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def command(*arguments):
    return [sys.executable, "-m", "experiments", *map(str, arguments)]


def run(*arguments):
    """The finished program, with what it printed."""
    return subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=500)


def run_to(code, *arguments):
    """The same, which must end with this exit status."""
    result = run(*arguments)
    assert result.returncode == code, result.stderr
    return result

"""The experiments as a user starts them: programs of their own, from the root of the project."""

import os
import subprocess
import sys
from pathlib import Path

from experiments.__main__ import main

ROOT = Path(__file__).parent.parent


def command(*arguments):
    return [sys.executable, "-m", "experiments", *map(str, arguments)]


def run(*arguments):
    """The finished program, with what it printed."""
    return subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=500)


def run_inside(capsys, *arguments):
    """The same within this process: for a program that ends before it computes anything."""
    before = dict(os.environ)
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    finally:
        os.environ.clear()
        os.environ.update(before)
    return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())


def run_to(code, *arguments):
    """The same, which must end with this exit status."""
    result = run(*arguments)
    assert result.returncode == code, result.stderr
    return result

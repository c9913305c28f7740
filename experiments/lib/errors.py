"""What a user can mend, on one line: full disks, files that cannot be read or written, damaged contents.

Everything that goes wrong with files ends here, whichever library noticed it: NumPy and Python raise OSError, the
checkpoints' store writes the number of the error into the text of another one.
"""

import contextlib
import errno
import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.lib.cli import UserError

__all__ = ["check_row", "line_of", "read_json", "reading", "shortened"]

# Not of files: a process that has lost its peers must not blame the disk.
OF_OTHERS = (ConnectionError, TimeoutError, ChildProcessError, ProcessLookupError)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def line_of(error: BaseException) -> str | None:
    """What went wrong with which file, if that, or what the error came from, is something a user can mend."""
    if isinstance(error, UserError):
        return str(error)
    number, path = _of_file(error)
    if number is not None and number in errno.errorcode:  # those of a name server are not
        reason = os.strerror(number)
        reason = reason[:1].lower() + reason[1:] + ("; make room" if number in FULL else "")
        return f"{path}: {reason}" if path else reason
    if isinstance(error, MemoryError):
        return f"not enough memory: {shortened(error)}"
    inner = (*getattr(error, "exceptions", ()), error.__cause__)  # not what it was raised beside of
    return next(filter(None, (line_of(each) for each in inner if each is not None)), None)


def _of_file(error: BaseException) -> tuple[int | None, str]:
    """errno and path."""
    if isinstance(error, OSError):
        names = [str(name) for name in (error.filename2, error.filename) if name is not None]
        return None if isinstance(error, OF_OTHERS) else error.errno, names[0] if names else ""
    text = str(error)
    number, path = re.search(r"os_error_code='(\d+)'", text), re.search(r'"(/[^"]+)"', text)
    return (int(number[1]) if number else None), path[1] if path else ""


def shortened(error: BaseException) -> str:
    """The message of an error on one line that is not too long."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


@contextlib.contextmanager
def reading(what: str, cure: str) -> Iterator[None]:
    """Whatever goes wrong with contents that somebody else reads becomes a UserError: what, why, and the cure."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} cannot be read: {line_of(error) or shortened(error)}; {cure}") from None


KINDS: dict[type, str] = {str: "text", int: "an integer", float: "a number", bool: "true or false"}
KINDS |= {list: "a list", dict: "an object", object: "a value or null"}


def check_row(row: Any, needs: Mapping[str, type]) -> dict[str, Any]:
    """The row, which is an object of JSON and has what it needs, each of its kind; a whole number is a number, too.

    >>> check_row({"seed": "a"}, {"seed": int})
    Traceback (most recent call last):
    ValueError: seed must be an integer; got 'a'
    """
    if not isinstance(row, dict):
        raise ValueError(f"it must hold an object; got {row!r}")
    for key, kind in needs.items():
        value = row.get(key)
        fits = key in row and isinstance(value, int | float if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{key} must be {KINDS[kind]}; got {repr(value) if key in row else 'nothing'}")
    return row


def read_json(path: Path, kind: type, cure: str) -> Any:
    """The content of a JSON file, a dict or a list. cure: what a user may do if it is something else."""
    with reading(str(path), cure):
        content = json.loads(path.read_text())
        if not isinstance(content, kind):
            raise ValueError(f"it must hold a JSON {'list' if kind is list else 'object'}")
        return content

"""What a user can mend, on one line: full disks, files that cannot be read or written, damaged contents.

Everything that goes wrong with files ends here, whichever library noticed it: NumPy and Python raise OSError, the
checkpoints' store writes the number of the error into the text of another one.
"""

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.lib.cli import UserError

__all__ = ["line_of", "read_json", "reading", "shortened"]

# Of files, not of connections: a process that has lost its peers must not blame the disk.
OF_FILES = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENOENT,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.EMFILE,
    errno.ENFILE,
    errno.ELOOP,
    errno.ENOTEMPTY,
    errno.EBUSY,
    errno.ESTALE,
    errno.EXDEV,
}
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
LONGEST = 300  # characters of somebody else's message


def line_of(error: BaseException) -> str | None:
    """What went wrong with which file, if that, or what the error came from, is something a user can mend."""
    for each in _chain(error):
        if isinstance(each, UserError):
            return str(each)
        number, path = _of_file(each)
        if number in OF_FILES:
            reason = os.strerror(number)
            reason = reason[:1].lower() + reason[1:]
            more = "; make room" if number in FULL else ""
            return f"{path}: {reason}{more}" if path else f"{reason}{more}"
        if isinstance(each, MemoryError):
            return f"not enough memory: {shortened(each)}"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what it came from, and those that it holds."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += getattr(each, "exceptions", ())
        waiting += [each.__cause__] if each.__cause__ is not None else []  # not what it was raised beside of


def _of_file(error: BaseException) -> tuple[int | None, str]:
    """errno and path."""
    if isinstance(error, OSError) and error.errno is not None:
        names = [str(name) for name in (error.filename2, error.filename) if name is not None]
        return error.errno, names[0] if names else ""
    text = str(error)
    number = re.search(r"os_error_code='(\d+)'", text)
    path = re.findall(r'"(/[^"]+)"', text)
    return (int(number[1]) if number else None), path[0] if path else ""


def shortened(error: BaseException) -> str:
    """The message of an error on one line that is not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else text[: LONGEST - 4] + " ..."


@contextlib.contextmanager
def reading(what: str, cure: str) -> Iterator[None]:
    """Whatever goes wrong with contents that somebody else reads becomes a UserError: what, why, and the cure."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} cannot be read: {line_of(error) or shortened(error)}; {cure}") from None


def read_json(path: Path, check: Callable[[Any], str | None], cure: str) -> Any:
    """The content of a JSON file.

    Args:
        path: of the file.
        check: says what is wrong with the content, or None.
        cure: what the user may do.

    Raises:
        UserError: it is no JSON, or wrong.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:  # of UTF-8, too
        raise UserError(f"{path} is damaged: {shortened(error)}; {cure}") from None
    wrong = check(content)
    if wrong:
        raise UserError(f"{path} is damaged: {wrong}; {cure}")
    return content

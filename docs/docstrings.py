"""Docstrings of this project as reStructuredText.

They are written to be read in an editor: formulas with bars and underscores, tables by indentation, lines of
"name: meaning". This turns them into what Sphinx sets in the same way. Sections of Google form are left to napoleon.
"""

import re

__all__ = ["readable", "skipped"]

SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Example|Examples|Note|Warns):\s*$")
MEANING = re.compile(r"([a-z_][\w, .*]*(?:\[[^]]*\])?(?: \([^)]*\))?):\s+(\S.*)$")
TABLE = re.compile(r"=+( +=+)+$")
CODE = re.compile(r"(``.+?``|`[^`]+`)")


def escaped(line: str) -> str:
    """Marks of reStructuredText as they are, outside of code."""
    parts = CODE.split(line)
    whole = "".join(part if i % 2 else re.sub(r"([\\*|_])", r"\\\1", part) for i, part in enumerate(parts))
    return re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", whole)  # code ends before a letter, as in the plural of a type


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def paragraphs(lines: list[str]) -> list[list[str]]:
    """What stands between empty lines."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [each for each in found if each]


def meanings(paragraph: list[str]) -> list[str]:
    """Lines "name: meaning" as a list; a line that begins no meaning goes on with the one before."""
    out: list[str] = []
    for line in paragraph:
        found = MEANING.match(line)
        if found:
            out.append(f"* ``{found[1]}``: {escaped(found[2])}")
        else:
            out.append(f"  {escaped(line.strip())}")
    return out


def set_paragraph(paragraph: list[str], literal: bool) -> list[str]:
    """One paragraph outside of sections. literal: the one before ended with a double colon."""
    if literal and indent_of(paragraph[0]):
        return paragraph
    if paragraph[0].lstrip().startswith(">>>"):
        return paragraph
    begins = [line for line in paragraph if MEANING.match(line)]
    if MEANING.match(paragraph[0]) and (len(begins) > 1 or len(paragraph) == 1 or indent_of(paragraph[1])):
        return meanings(paragraph)
    if any(indent_of(line) for line in paragraph) or TABLE.match(paragraph[0]):
        return ["::", "", *("    " + line for line in paragraph)]
    return [escaped(line) for line in paragraph]


def set_section(lines: list[str]) -> list[str]:
    """A section of Google form: escaped, apart from literal blocks."""
    out: list[str] = []
    below: int | None = None  # indentation of the line that ended with a double colon
    for line in lines:
        if below is not None and line.strip() and indent_of(line) <= below:
            below = None
        out.append(line if below is not None else escaped(line))
        if below is None and line.rstrip().endswith("::"):
            below = indent_of(line)
    return out


def converted(lines: list[str]) -> list[str]:
    """A docstring, without its indentation."""
    out: list[str] = []
    plain: list[str] = []
    section: list[str] = []

    def flush() -> None:
        literal = False
        for paragraph in paragraphs(plain):
            out.extend([*set_paragraph(paragraph, literal), ""])
            literal = paragraph[-1].rstrip().endswith("::")
        plain.clear()
        if section:
            out.extend([section[0], *set_section(section[1:]), ""])
            section.clear()

    for line in lines:
        if SECTION.match(line):
            flush()
            section.append(line)
        elif section and (indent_of(line) or not line.strip()):
            section.append(line)
        else:
            if section:
                flush()
            plain.append(line)
    flush()
    return out


def readable(app, what, name, obj, options, lines) -> None:
    """For `autodoc-process-docstring`."""
    lines[:] = converted(list(lines))


def skipped(app, what, name, obj, skip, options) -> bool | None:
    """For `autodoc-skip-member`: fields of a NamedTuple stand in its docstring."""
    return True if type(obj).__name__ == "_tuplegetter" else None

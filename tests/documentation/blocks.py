"""The code of the documentation: which blocks a page has, and what each of them is.

A block is fenced or indented. A fence says what it is: python, bash, text (output, layouts, formulas) and so on. An
indented block is a list of commands, or Python. Commands that are shown with their output begin with ``$``.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
)

SHELL = ("psm", "make", "pip", "python", "bash", "git", "open", "head", "hf", "ray", "torchrun", "unzip", "docker")
INLINE = re.compile(r"(?<!`)`(psm [a-z]+ [^`]+)`(?!`)")
PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]{3,}\b|=(?=\s|$)")


@dataclass(frozen=True)
class Code:
    """One piece of code of a page, in the order of the page."""

    page: str
    line: int
    kind: str  # command, python, script or text; unknown: none of these
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def page_code(page: Path) -> list[Code]:
    """All code of a page: its blocks, commands one by one, and whole commands within sentences."""
    name = str(page.relative_to(ROOT))
    found = [code for line, language, lines in _blocks(page.read_text()) for code in _read(name, line, language, lines)]
    return sorted(found, key=lambda code: code.line)


def _blocks(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Line, language and lines of each block; ``indented`` and ``inline`` stand for a language."""
    lines = text.splitlines()
    prose = [""] * len(lines)
    place, after_blank = 0, True
    while place < len(lines):
        line, start = lines[place], place
        fence = re.match(r" *```(\w*)$", line)
        if fence:
            place = next(i for i in range(place + 1, len(lines)) if lines[i].strip() == "```")
            yield start + 1, fence[1], lines[start + 1 : place]
        elif line.startswith("    ") and after_blank:
            while place < len(lines) and (lines[place].startswith("    ") or not lines[place].strip()):
                place += 1
            place -= 1
            yield start + 1, "indented", lines[start : place + 1]
        else:
            prose[place] = line
        after_blank = not lines[place].strip()
        place += 1
    text = "\n".join(prose)
    for match in INLINE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, "inline", [" ".join(match[1].split())]


def _read(page: str, line: int, language: str, lines: list[str]) -> Iterator[Code]:
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    first = text.split()[0] if text.strip() else ""
    if language == "inline":
        if not PLACEHOLDER.search(text):
            yield Code(page, line, "command", text)
    elif language in ("", "indented", "bash") and first == "$":
        yield from _commands(page, line, [row if row.startswith("$ ") else "" for row in text.splitlines()])
    elif language == "indented" and first in SHELL:
        yield from _commands(page, line, text.splitlines())
    elif language == "bash":
        yield Code(page, line, "script", text)
    elif language == "python" or (language == "indented" and _is_python(text)):
        yield Code(page, line, "python", text)
    else:
        yield Code(page, line, "unknown" if language in ("", "indented") else "text", text)


def _commands(page: str, line: int, rows: list[str]) -> Iterator[Code]:
    """Each command of some lines, without its comment; a backslash joins two lines."""
    begun = ""
    for offset, row in enumerate(rows):
        command = begun + re.sub(r"\s+# .*$", "", row.removeprefix("$ ")).strip()
        begun = command.removesuffix("\\") if command.endswith("\\") else ""
        if command and not begun and not command.startswith("#"):
            yield Code(page, line + offset, "command", command)


def _is_python(text: str) -> bool:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return bool(tree.body)

"""Hooks of mkdocs: the page of the command line, made from the settings, and links to files outside docs/."""

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

os.environ["COLUMNS"] = "100"
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the command line's page and the study's figures, which lie outside docs/."""
    files.append(File.generated(config, "cli.md", content=command_line()))
    root = Path(config["config_file_path"]).parent
    for path in sorted((root / "study" / "report").glob("*.svg")):
        files.append(File.generated(config, f"study/report/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at files of the repository, outside docs/, to where the site has them, or make them plain text."""

    def moved(match: re.Match[str]) -> str:
        return f"]({match[1]})" if files.get_file_from_path(match[1]) else "](#)"

    if "/" in page.file.src_uri:  # a guide: one folder up is docs/ itself
        return markdown
    linked = OUTSIDE.sub(moved, markdown)
    return re.sub(r"\[([^\]]+)\]\(#\)", r"\1", linked)


def command_line() -> str:
    """Every command with all its keys, from the tables that `psm COMMAND --help` prints."""
    from psm.cli.main import COMMANDS, USAGE
    from psm.config.help import grouped, summary

    parts = ["# The command line", "", "```text", USAGE, "```"]
    for name in COMMANDS:
        schema = import_module(f"psm.cli.{name}").Config
        parts += ["", f"## psm {name}", "", escaped(summary(schema).partition(": ")[2])]
        for group in grouped(schema):
            parts += ["", *([f"### {name}: {group.name}", "", escaped(group.about), ""] if group.name else [])]
            parts += ["| key | |", "| --- | --- |", *map(key_row, group.rows)]
    return "\n".join(parts)


def key_row(row: Any) -> str:
    """A key with its default and its meaning, type and bounds, as a row of a table."""
    from psm.config.help import describe, with_default

    key = with_default(row).replace("|", "\\|")
    return f"| `{key}` | {escaped(row.meaning + describe(row))} |"


def escaped(text: str) -> str:
    """Text of `--help` as Markdown: code stays code, all else is taken literally."""
    plain = iter(re.split(r"(`[^`]*`)", text))
    return "".join(re.sub(r"([\\*_\[\]<>|])", r"\\\1", part) + next(plain, "") for part in plain)

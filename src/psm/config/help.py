"""The text of ``--help``, from the same table that settings are checked with, wrapped to the terminal."""

import inspect
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple, get_origin

from psm.config.keys import Row, group_class, rows
from psm.utils.errors import UserError, did_you_mean

COLUMN = 28  # where meanings begin, if the terminal is wide enough

# Keys of the top level that are rarer, by the topic that `key` gives them.
TOPICS = {
    "parts": "What a method is made of; `--help positives` and so on show the settings of each part.",
    "machine": "Where a run computes, in which precision, and what it compiles.",
    "extras": "Loggers, callbacks, plugins and what else goes to Lightning's Trainer.",
}
PASSED_ON = "These keys of `psm pretrain` go to every run, unless an experiment sets them itself:"


class Group(NamedTuple):
    """Keys that belong together; the common ones have no name."""

    name: str
    about: str
    rows: list[Row]


def help_text(command: str, schemas: Sequence[type], topic: str = "", hidden: Sequence[str] = ()) -> str:
    """What a command does and its keys.

    Args:
        command: as it is typed, for example ``psm pretrain``.
        schemas: the command's configuration class; more where it passes keys on to other commands.
        topic: empty for the common keys and the names of groups, or one group, one key, or ``all``.
        hidden: keys of the later schemas that cannot be given.
    """
    schema, *passed_on = schemas
    groups = grouped(schema)
    names = {group.name for group in groups}
    for other in passed_on:
        more = [Group(g.name, g.about, [r for r in g.rows if r.key not in hidden]) for g in grouped(other)]
        groups += [group for group in more if not group.name or group.name not in names]
    if topic and topic != "all":
        return "\n".join(_one_topic(command, groups, topic))
    lines = [
        *wrapped(summary(schema)),
        "",
        *wrapped("key=value, nested keys dotted; config=FILE.yaml reads keys from a file."),
    ]
    for place, group in enumerate(groups):
        if group.name and topic != "all":
            continue
        about = "" if place == 0 else group.about or PASSED_ON
        lines += ["", *([*wrapped(about), ""] if about else []), *key_lines(group.rows)]
    named = [group for group in groups if group.name]
    if topic != "all" and named:
        lines += ["", "Groups of keys:", "", *_group_lines(named), ""]
        lines += wrapped(f"`{command} --help GROUP` shows the keys of a group, `{command} --help all` every key.")
    return "\n".join(lines)


def summary(schema: type) -> str:
    """What a class of settings is for, in a line."""
    return inspect.cleandoc(schema.__doc__ or "").replace("\n", " ")


def grouped(schema: type) -> list[Group]:
    """The common keys, then those of each topic and of each nested group."""
    table = list(rows(schema))
    top = [row for row in table if "." not in row.key]
    groups = [Group("", "", [row for row in top if not row.topic])]
    for topic, about in TOPICS.items():
        if found := [row for row in top if row.topic == topic]:
            groups.append(Group(topic, about, found))
    nested = [(f.name, group) for f in fields(schema) if (group := group_class(f.type)) is not None]
    return groups + [
        Group(name, summary(group), [row for row in table if row.key.startswith(f"{name}.")]) for name, group in nested
    ]


def key_lines(table: Sequence[Row]) -> list[str]:
    """An entry for each key: key=default, its meaning, then its type and bounds."""
    return [line for row in table for line in entry(with_default(row), f"{row.meaning}{describe(row)}")]


def with_default(row: Row) -> str:
    """A key as it is written, with its default."""
    if get_origin(row.hint) is dict:
        return f"{row.key}=[NAME]" if row.named else f"{row.key}=NAME" if row.open else f"{row.key}.KEY="
    return f"{row.key}={'' if row.default == '-' else row.default}"


def describe(row: Row) -> str:
    """A key's type and bounds in parentheses: ' (whole number or none, 1 or more)'; nothing for plain text."""
    bounds = str(row.bounds)
    if row.bounds.choices:
        return f" ({bounds})"
    kind = "" if row.kinds == (str,) else row.type
    said = ", ".join(word for word in (kind, bounds) if word)
    return f" ({said})" if said else ""


def entry(head: str, text: str) -> list[str]:
    """``head`` and the text beside it, or below it in a narrow terminal, with a hanging indent."""
    width = terminal_width()
    column = COLUMN if width >= 80 else 6
    lines = textwrap.wrap(
        text, width, initial_indent=" " * column, subsequent_indent=" " * column, break_on_hyphens=False
    )
    if len(head) + 4 > column:
        return [f"  {head}", *lines]
    return [f"  {head}".ljust(column) + lines[0][column:], *lines[1:]]


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, terminal_width(), break_on_hyphens=False)


def terminal_width() -> int:
    return max(30, min(shutil.get_terminal_size((100, 24)).columns, 120))


def _group_lines(groups: Sequence[Group]) -> list[str]:
    lines = []
    for group in groups:
        keys = ", ".join(row.key.removeprefix(f"{group.name}.") for row in group.rows)
        lines += entry(group.name, f"{group.about} Keys: {keys}")
    return lines


def _one_topic(command: str, groups: Sequence[Group], topic: str) -> list[str]:
    for group in groups:
        if group.name == topic:
            return [*wrapped(f"{topic}: {group.about}"), "", *key_lines(group.rows)]
    table = {row.key: row for group in groups for row in group.rows}
    if topic in table:
        return key_lines([table[topic]])
    names = [group.name for group in groups if group.name]
    hint = did_you_mean(topic, [*names, *table])
    some = ", ".join([*names, "all"])
    raise UserError(f"{topic!r} is neither a group nor a key of `{command}`{hint}: ask for one of {some}.")

"""Merging files, `key=value` arguments and Python arguments into a typed configuration; mistakes as sentences."""

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml

from psm.config.field_words import advice
from psm.config.keys import Row, group_class, rows, show, value_at
from psm.config.renamed import current_key
from psm.config.schema import CALL_KEYS, PretrainConfig, ResolvedPretrainConfig
from psm.config.values import check_values, convert, read_freely
from psm.config.yaml_text import Plain, read_file, read_text, split_texts
from psm.utils.errors import UserError, did_you_mean

__all__ = [
    *("build", "check_values", "flatten", "parse", "read_yaml", "refuse_call_keys", "rows", "to_dict", "to_yaml"),
    *("Row", "resolve_as", "resolved_config", "stored_overrides", "type_name", "value_at"),
]

T = TypeVar("T")


def build(schema: type[T], *overrides: Mapping[str, Any], base: Any = None) -> T:
    """An instance of the schema, every value within its bounds.

    Args:
        schema: a configuration class.
        overrides: nested or dotted keys with their values, the later ones winning.
        base: a configuration that the overrides change; the defaults if None.
    """
    known = {row.key: row for row in rows(schema)}
    start = schema() if base is None else base
    values = {dotted: value_at(start, dotted) for dotted in known}
    for override in overrides:
        _merge(values, override, known, schema)
    config = _assemble(schema, values)
    check_values(config)
    return config


def resolved_config(config: PretrainConfig, **groups: Any) -> ResolvedPretrainConfig:
    """The settings of a pretraining run: the user's with some groups or keys put in."""
    return resolve_as(ResolvedPretrainConfig, config, **groups)


def resolve_as(schema: type[T], config: Any, **groups: Any) -> T:
    """A run's settings: the user's with some groups or keys put in; nothing may be left to decide.

    Args:
        schema: the class of resolved settings.
        config: the user's, with the same fields.
        groups: what replaces them.
    """
    resolved = schema(**{f.name: getattr(config, f.name) for f in fields(config)} | groups)
    for row in rows(resolved):
        if row.resolvable and value_at(resolved, row.key) is None:
            raise UserError(f"{row.key} is missing in the settings of a run: {row.meaning}.")
    return resolved


def _merge(values: dict[str, Any], override: Mapping[str, Any], known: Mapping[str, Row], schema: type) -> None:
    """Put one source of settings over what is there; free-form groups are merged entry by entry."""
    seen: set[str] = set()
    groups: dict[str, dict[str, Any]] = {}
    for written, value in flatten(override, known):
        dotted = current_key(written, known)
        row = _find(dotted, known, schema)
        name = f"{dotted}.{row.open}" if row.open and dotted == row.key else dotted
        if name in seen:
            raise UserError(f"{name} is set twice: keep one of them.")
        seen.add(name)
        if get_origin(row.hint) is not dict:
            values[dotted] = convert(dotted, value, row)
        elif dotted != row.key:
            entry = _nested(dotted.removeprefix(f"{row.key}."), convert(dotted, value, row))
            groups[row.key] = _deep_merge(groups.get(row.key, {}), entry)
        elif row.named:
            before = values[dotted]
            values[dotted] = {name: before.get(name) or {} for name in _names(dotted, value)}
        elif value is not None and value != "null":
            groups[row.key] = _deep_merge(groups.get(row.key, {}), {row.open: _part_name(dotted, value, row)})
    for group, given in groups.items():
        values[group] = _merged_group(values[group], given, known[group].open)


def _names(dotted: str, value: Any) -> list[str]:
    """Names that stand for entries of a free-form group: `loggers=[csv,wandb]`, or one of them alone."""
    names = [] if value is None or value == "none" else value if isinstance(value, (list, tuple)) else [value]
    if not all(name and isinstance(read_freely(name), str) for name in names):
        example = f"{dotted}=[NAME] or {dotted}.NAME.KEY=VALUE"
        raise UserError(f"{dotted}={show(value, '')} is not keys and values: write {example}.")
    return [str(name) for name in names]


def _part_name(dotted: str, value: Any, row: Row) -> str:
    """The text that stands for a whole free-form group."""
    if row.open and isinstance(value, str) and value.strip():
        return str(value)
    example = f"{dotted}=NAME or " if row.open else ""
    raise UserError(f"{dotted}={show(value, '')} is not keys and values: write {example}{dotted}.KEY=VALUE.")


def _merged_group(before: Mapping[str, Any], given: Mapping[str, Any], names: str) -> dict[str, Any]:
    """A free-form group with new entries; where they name another part, the former part's entries are dropped."""
    former, named = before.get(names), given.get(names)
    another = bool(names) and named is not None and former is not None and named != former
    return _deep_merge({} if another else before, given)


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    first, _, rest = dotted.partition(".")
    return {first: _nested(rest, value) if rest else value}


def _deep_merge(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(before)
    for name, value in given.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _deep_merge(merged[name], value) if both else value
    return merged


def _assemble(schema: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    given = {}
    for f in fields(schema):  # type: ignore[arg-type]
        dotted, group = f"{prefix}{f.name}", group_class(f.type)
        given[f.name] = values[dotted] if group is None else _assemble(group, values, f"{dotted}.")
    return schema(**given)


def parse(arguments: Iterable[str], schema: type) -> tuple[dict[str, Any], ...]:
    """Overrides from `key=value` arguments; `config=FILE.yaml` (any number) comes before all other keys."""
    known = {row.key: row for row in rows(schema)}
    arguments = list(arguments)
    files: list[dict[str, Any]] = []
    given: dict[str, Any] = {}
    for position, argument in enumerate(arguments):
        dotted, equals, text = argument.partition("=")
        if not equals or argument.startswith("-"):
            raise UserError(_not_key_value(argument, [*arguments, ""][position + 1], known, schema))
        if dotted == "config":
            files.append(dict(refuse_call_keys(read_yaml(text), argument)))
            continue
        dotted = current_key(dotted, known)
        if dotted in given:
            raise UserError(f"{dotted} is given twice, the second time as {argument}: keep one of them.")
        given[dotted] = _argument_value(dotted, text, _find(dotted, known, schema))
    return (*files, given)


def _not_key_value(argument: str, following: str, known: Mapping[str, Row], schema: type) -> str:
    """The answer to an argument that is not key=value; to ``--epochs 3`` what to write instead."""
    name, equals, text = argument.lstrip("-").partition("=")
    name = name.replace("-", "_")
    value = text if equals else following
    value = "..." if not value or "=" in value or value.startswith("--") else value
    if argument.startswith("-") and _row_of(name, known) is not None:
        return f"{argument!r} is not key=value: write {name}={value}."
    if argument.startswith("-") and (said := advice(name, known, value)):
        return f"{argument!r} is not key=value: {said}."
    return f"{argument!r} is not key=value: write for example {next(iter(known))}=..., see `{_command(schema)} --help`."


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file as nested dictionaries for `build`, which reads unquoted values by the type of their key.

    A run's config.yaml may be edited to start another run: where it differs from its checksum a warning says so.
    """
    return read_file(path)


def refuse_call_keys(content: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The content of a configuration file, which describes a run and not one call."""
    for name in CALL_KEYS:
        if name in content:
            raise UserError(
                f"{source} sets {name}, which is about one call: remove it there and give {name}= with the command."
            )
    return content


def stored_overrides(config: str | Path | Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The content of ``config=`` of a Python call, a file or a mapping, as a list of at most one."""
    if isinstance(config, (str, Path)):
        return [refuse_call_keys(read_yaml(config), f"config={config}")]
    return [refuse_call_keys(config, "config=")] if config else []


def to_yaml(config: Any) -> str:
    """The configuration as YAML that `config=FILE` reads back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True, width=120)


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as nested plain dictionaries, without what is about one call."""
    return {name: value for name, value in _plain(config).items() if name not in CALL_KEYS}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def flatten(
    nested: Mapping[str, Any], known: Mapping[str, Row] = types.MappingProxyType({}), prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) pairs of nested dictionaries; entries of free-form keys such as ``trainer`` stay whole."""
    for name, value in nested.items():
        dotted = f"{prefix}{name}"
        if is_dataclass(value) and not isinstance(value, type):
            value = {f.name: getattr(value, f.name) for f in fields(value)}
        if isinstance(value, Mapping) and dotted not in known:
            yield from flatten(value, known, f"{dotted}.")
        elif isinstance(value, Mapping):
            yield from ((f"{dotted}.{key}", item) for key, item in value.items())
        else:
            yield dotted, value


def _row_of(dotted: str, known: Mapping[str, Row]) -> Row | None:
    """The key itself, or the free-form group that it is an entry of."""
    if dotted in known:
        return known[dotted]
    group = known.get(dotted.partition(".")[0])
    return group if group is not None and get_origin(group.hint) is dict else None


def _find(dotted: str, known: Mapping[str, Row], schema: type) -> Row:
    if (row := _row_of(dotted, known)) is not None:
        return row
    inner = [key for key in known if key.startswith(f"{dotted}.")]
    if inner:
        raise UserError(f"{dotted} is a group of keys: set one of {', '.join(inner)}.")
    command = _command(schema)
    group, dot, entry = dotted.partition(".")
    others = [key for key in known if dot and key.startswith(f"{group}.")]
    if said := advice(dotted, known) or (advice(entry, known) if others else ""):
        raise UserError(f"{dotted!r} is not a key of `{command}`: {said}.")
    same_ending = [key for key in known if key.rpartition(".")[2] == dotted.rpartition(".")[2]]
    if others and not same_ending:
        hint = did_you_mean(dotted, others) or f": {group} has {', '.join(others)}"
        raise UserError(f"{dotted!r} is not a key of `{command}`{hint}; all keys: `{command} --help all`.")
    entries = [f"{key}{dot}{entry}" for key, row in known.items() if dot and get_origin(row.hint) is dict]
    hint = did_you_mean(same_ending[0] if same_ending else dotted, [*known, *entries])
    raise UserError(f"{dotted!r} is not a key of `{command}`{hint}; all keys: `{command} --help all`.")


def _command(schema: type) -> str:
    return (schema.__doc__ or "").partition(":")[0]


def _argument_value(dotted: str, text: str, row: Row) -> Any:
    """What a text stands for; text keys take it to the letter, so that a path is never read as YAML."""
    if str in row.kinds and list[str] in row.kinds and text.strip().startswith("[") and text.strip().endswith("]"):
        return split_texts(text)
    if str in row.kinds or not text.lstrip().startswith(("[", "{", "'", '"')):
        return Plain(text)
    try:
        return read_text(text, f"{dotted}={show(text)}")
    except UserError as error:
        raise UserError(f"{error} Lists are written [1,2].") from None

"""Merging files, `key=value` arguments and Python arguments into a typed configuration; mistakes as sentences."""

import math
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from psm.config.schema import CALL_KEYS, NAMED
from psm.utils.errors import UserError, did_you_mean


class Row(NamedTuple):
    """One key of a command as ``--help`` shows it."""

    key: str
    type: str
    default: str
    meaning: str
    hint: Any


def rows(schema: type, prefix: str = "") -> Iterator[Row]:
    """Every key of a configuration class, nested ones dotted."""
    hints = get_type_hints(schema)
    blank = schema()
    for f in fields(schema):
        hint, default = hints[f.name], getattr(blank, f.name)
        if is_dataclass(hint):
            yield from rows(hint, f"{prefix}{f.name}.")
        else:
            yield Row(f"{prefix}{f.name}", type_name(hint), _shown(default), f.metadata["meaning"], hint)


def build(schema: type, *overrides: Mapping[str, Any], base: Any = None) -> Any:
    """An instance of the schema: ``base`` (or its defaults) with nested overrides merged in, the later ones winning."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    merged = OmegaConf.structured(schema() if base is None else base)
    known = {row.key: row for row in rows(schema)}
    for override in overrides:
        for dotted, value in flatten(override, known):
            row = _known(dotted, known, schema)
            value = value.item() if hasattr(value, "item") and hasattr(value, "dtype") else value  # numpy's numbers
            if isinstance(value, bool) and row.hint is str:
                value = str(value).lower()
            if get_origin(row.hint) is dict and row.key == dotted:
                _set_names(merged, dotted, value, row)
                continue
            for number in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(number, float) and not math.isfinite(number):
                    raise UserError(f"{dotted}={_shown(value)} is not finite: {row.meaning}.")
            try:
                OmegaConf.update(merged, dotted, value, force_add=row.key != dotted)
            except OmegaConfBaseException:
                raise UserError(f"{dotted}={_shown(value)} is not {_article(row.type)}: {row.meaning}.") from None
    try:
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key} cannot be read: ${{...}} and ??? mean something there.") from None


def _set_names(merged: Any, dotted: str, value: Any, row: Row) -> None:
    """Shorthand for a mapping: `loggers=[csv,wandb]` names its entries; what was set below them stays."""
    from omegaconf import OmegaConf

    names = [] if value is None else [value] if isinstance(value, str) else value
    if dotted not in NAMED or not isinstance(names, (list, tuple)) or not all(isinstance(x, str) for x in names):
        raise UserError(f"{dotted}={_shown(value)} is not {row.type}: {row.meaning}.")
    before = OmegaConf.to_container(merged[dotted])
    merged[dotted] = {name: before.get(name) or {} for name in names}


def parse(arguments: Iterable[str], schema: type) -> tuple[dict[str, Any], ...]:
    """Wishes from `key=value` arguments; `config=FILE.yaml` (any number) comes before all other keys."""
    known = {row.key: row for row in rows(schema)}
    files, given = [], {}
    for argument in arguments:
        dotted, equals, text = argument.partition("=")
        if not equals:
            raise UserError(f"{argument!r} is not key=value: write for example {next(iter(known))}=..., see --help.")
        if dotted == "config":
            files.append(refuse_call_keys(read_yaml(text), argument))
        else:
            given[dotted] = _parsed(dotted, text, _known(dotted, known, schema).hint)
    return (*files, given)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file as nested dictionaries."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).expanduser().read_text())
    except OSError as error:
        raise UserError(f"config={path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"config={path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content or {}, dict):
        raise UserError(f"config={path} must hold keys and values, such as `epochs: 200`.")
    return content or {}


def refuse_call_keys(content: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The content of a configuration file, which describes a run and not one call."""
    for name in CALL_KEYS:
        if name in content:
            raise UserError(
                f"{source} sets {name}, which is about one call: remove it there and give {name}= with the command."
            )
    return content


def to_yaml(config: Any) -> str:
    """The configuration as YAML that `config=FILE` reads back."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as nested plain dictionaries, without what is about one call."""
    from omegaconf import OmegaConf

    content = OmegaConf.to_container(OmegaConf.structured(config))
    return {name: value for name, value in content.items() if name not in CALL_KEYS}


def flatten(nested: Mapping[str, Any], known: Mapping[str, Row] = types.MappingProxyType({}), prefix: str = ""):
    """(dotted key, value) pairs of nested dictionaries; free-form keys such as ``trainer`` stay whole."""
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


def type_name(hint: Any) -> str:
    """A type as users read it: text, whole number, number, true/false, list of numbers."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or none".join([type_name(a) for a in get_args(hint) if a is not type(None)]) + " or none"
    if get_origin(hint) is list:
        return f"list of {type_name(get_args(hint)[0])}s"
    if get_origin(hint) is dict:
        return "keys and values"
    return {str: "text", int: "whole number", float: "number", bool: "true/false"}[hint]


def _known(dotted: str, known: Mapping[str, Row], schema: type) -> Row:
    if dotted in known:
        return known[dotted]
    for name, row in known.items():
        if get_origin(row.hint) is dict and dotted.startswith(f"{name}."):
            return row
    inner = [key for key in known if key.startswith(f"{dotted}.")]
    if inner:
        raise UserError(f"{dotted} is a group of keys: set one of {', '.join(inner)}.")
    command = (schema.__doc__ or "").partition(":")[0]
    same_ending = [key for key in known if key.rpartition(".")[2] == dotted.rpartition(".")[2]]
    hint = did_you_mean(same_ending[0] if same_ending else dotted, known)
    raise UserError(f"{dotted!r} is not a key of `{command}`{hint}; all keys: `{command} --help`.")


def _parsed(dotted: str, text: str, hint: Any) -> Any:
    """The value that a text stands for; text keys take it to the letter, so that a path is never read as YAML."""
    import yaml

    optional = get_origin(hint) in (Union, types.UnionType)
    kinds = get_args(hint) if optional else (hint,)
    nothing = text.strip().lower() in ("none", "null", "")
    if str in kinds and not (optional and nothing):
        return text
    if nothing:
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"{dotted}={text} cannot be read as a value: lists are written [1,2].") from None
    if isinstance(value, str):  # YAML takes 1e-4 for text
        with suppress(ValueError):
            value = float(value)
    return int(value) if int in kinds and isinstance(value, float) and value.is_integer() else value


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value in ("", {}) else str(value)


def _article(name: str) -> str:
    return name if name.startswith(("true", "keys")) or name == "text" else f"a {name}"

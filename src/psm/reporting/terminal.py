"""Tables on the terminal: methods and data sets."""

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from psm.config.schema import DataConfig
from psm.methods import KINDS, METHODS, MethodSpec, find_method
from psm.utils.errors import UserError
from psm.utils.resources import write_error

if TYPE_CHECKING:
    from psm.data import ImageDataset
    from psm.embedding.search import QueryResult


def methods_table() -> None:
    """Print the table of all methods."""
    table = Table("method", "networks", "positives", "negatives", "weighting", "objective", title="Methods")
    for row in METHODS.values():
        table.add_row(row.name, *_describe_parts(row.spec))
    Console().print(table)


def _describe_parts(method: MethodSpec) -> tuple[str, ...]:
    """Networks, positives, negatives, weighting and objective of a method in a few words each."""
    networks = "online + EMA" if method.target.enabled else "one"
    networks += " on weak views" if method.target.views == "weak" else ""
    negatives = ", ".join(filter(None, (method.negatives.describe(), method.sampler.describe())))
    contrasts = method.objective.uses_negatives
    objective = method.objective.describe() + (f", t={method.loss.temperature:g}" if contrasts else "")
    if method.loss.hard_weight:
        objective += f", + {method.loss.hard_weight:g} L_hard"
    return (
        networks + (" + predictor" if method.predictor.enabled else ""),
        method.positives.describe(),
        negatives,
        method.weighting.describe() if contrasts else "–",
        objective,
    )


def method_table(name: str) -> None:
    """Print every setting of a method with its value and meaning."""
    method = find_method(name)
    table = Table("key", "value", "meaning", title=method.title, caption=method.reference)
    for group in fields(method.spec):
        part = getattr(method.spec, group.name)
        if group.name in KINDS:
            doc = " ".join((type(part).__doc__ or "").split())
            table.add_row(f"{group.name}.{KINDS[group.name].selector}", part.part_name, doc)
        for f in fields(part):
            value = getattr(part, f.name)
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            table.add_row(f"{group.name}.{f.name}", shown, f.metadata.get("meaning", ""))
    Console().print(table)


def search_tables(results: "Iterable[QueryResult]") -> None:
    """Print a table per query: rank, similarity, label and path of what was found."""
    for result in results:
        labeled = any(match.label for match in result.matches)
        title = f"Images like {result.name}" + ("" if result.row is None else f" (row {result.row})")
        path = Column("path", overflow="fold")  # whole, so that it can be copied
        table = Table("", "similarity", *(["label"] if labeled else []), "row", path, title=escape(title))
        for rank, match in enumerate(result.matches, 1):
            label = [escape(match.label or "")] if labeled else []
            table.add_row(str(rank), f"{match.similarity:.3f}", *label, str(match.row), escape(match.path))
        Console().print(table)


def published_table() -> None:
    """Print the data sets that are known by name."""
    from psm.data.registry import list_datasets

    rows = list_datasets()
    table = Table(*rows[0]._fields, title="Data sets by name; any folder of images works too")
    for row in rows:
        table.add_row(*(f"{x:,}" if isinstance(x, int) else str(x) for x in row))
    Console().print(table)


def data_table(config: DataConfig) -> None:
    """Print the content of a data set, and write a contact sheet if asked for."""
    from psm.data import load_dataset

    if config.data is None:
        raise UserError("data= is missing: name a data set or a folder of images.")
    sheet = Path(config.sheet).expanduser() if config.sheet else None
    if sheet:
        _check_sheet(sheet)
    data = load_dataset(config.data, config.images)
    table = Table("", "", title=data.name, show_header=False)
    table.add_row("training images", f"{len(data.train):,}")
    table.add_row("test images", f"{len(data.test):,}" if data.test is not None else "none")
    table.add_row("classes", ", ".join(data.classes[:20]) + (" …" * (len(data.classes) > 20)) or "unlabeled")
    table.add_row("held at", f"{data.size} x {data.size} pixels")
    table.add_row("unreadable files", str(len(data.unreadable)))
    Console().print(table)
    for file, reason in data.unreadable[:20]:
        print(f"unreadable: {file}: {reason}")
    if sheet:
        _write_sheet(data, sheet)


def shards_table(config: DataConfig) -> None:
    """Write a data set as shards, and print what was written and how to use it."""
    from psm.data.shard_writer import write_shards

    if config.data is None or config.shards is None:
        raise UserError("shards= writes the images of a data set: give data= too.")
    written = write_shards(config.data, config.shards, config.images, config.shard_mb * 1e6)
    count = len(written.files) + len(written.test_files)
    print(f"{written.images:,} images in {count:,} shards, {written.bytes / 1e6:,.1f} MB, in {written.files[0].parent}")
    for file, reason in written.unreadable[:20]:
        print(f"unreadable, left out: {file}: {reason}")
    groups = [_braced(files) for files in (written.files, written.test_files) if files]
    print(f"use: data={groups[0]}" if len(groups) == 1 else f"use: data=[{','.join(groups)}]")


def _braced(files: list[Path]) -> str:
    """Numbered files as one pattern: out/{000000..000012}.tar."""
    if len(files) == 1:
        return str(files[0])
    first, last = files[0].name, files[-1].name
    start = next(i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    while start and first[start - 1].isdigit():
        start -= 1
    ends = [re.search(r"\d+", name[start:]) for name in (first, last)]
    low, high = (match.group() if match else "" for match in ends)
    return str(files[0].parent / f"{first[:start]}{{{low}..{high}}}{first[start + len(low) :]}")


def _check_sheet(path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise UserError(f"sheet={path} must end in .png.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(f"sheet={path}", error) from None


def _write_sheet(data: "ImageDataset", path: Path) -> None:
    """Write a contact sheet: rows of images, one row per class where labels exist."""
    import torch
    from PIL import Image

    from psm.utils.files import write_atomically

    columns = 16
    labels = data.train.labels
    if labels is not None:
        rows = [(labels == c).nonzero().flatten()[:columns] for c in range(min(len(data.classes), 20))]
    else:
        rows = list(data.train.sample(8 * columns).split(columns))
    size = data.size + 2
    sheet = torch.full((len(rows) * size, columns * size, 3), 255, dtype=torch.uint8)
    for y, row in enumerate(rows):
        for x, image in enumerate(data.train.take(row)):
            sheet[y * size : y * size + size - 2, x * size : x * size + size - 2] = image.permute(1, 2, 0)
    try:
        write_atomically(path, lambda file: Image.fromarray(sheet.numpy()).save(file, "PNG"))
    except OSError as error:
        raise write_error(f"sheet={path}", error) from None
    print(f"sheet: {path}")

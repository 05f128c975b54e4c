"""Tables of docs/data.md, docs/cluster.md and docs/scaling.md."""

from collections.abc import Callable
from typing import Any

from table_text import figure_of, read, table


def rates_table() -> str:
    return table(
        ("read by", "images a second", "CPU ms an image", "times webdataset, by CPU time"),
        (
            (row["of"], figure_of(row["images a second"], 0), figure_of(row["CPU ms"], 2),
             figure_of(row["times webdataset"]))
            for row in read("loading")["rates"]
        ),
    )  # fmt: skip


def start_table() -> str:
    rows = read("loading")["start"]
    return table(
        (f"start with {rows[0]['files']:,} files", "seconds", "CPU seconds"),
        ((row["start"], f"{row['seconds']:.1f}", f"{row['CPU seconds']:.1f}") for row in rows),
    )


def memory_table() -> str:
    names = ("set MB", "allowed MB", "most copies MB", "memory before MB", "most memory MB")
    head = ("set, MB", "allowed copies, MB", "most copies, MB", "memory before, MB", "most memory, MB")
    return table(head, ([f"{row[name]:,.0f}" for name in names] for row in read("loading")["memory"]))


def processes_table() -> str:
    ways = {"bank too": "shared out, bank too"}
    return table(
        ("processes", "way", "CPU ms (smallest – largest)", "of all on each", "rows held"),
        (
            (row["processes"], ways.get(row["way"], row["way"]), figure_of(row["CPU ms"], 0),
             figure_of(row["of all on each"], 2), f"{row['rows']:,}")
            for row in read("processes")["rows"]
        ),
    )  # fmt: skip


def check_table() -> str:
    rows = read("cost_model")["check"]
    parts = list(rows[0]["parts"])
    return table(
        ("processes", *parts, "collectives", "predicted", "measured (least – most)", "predicted / measured"),
        (
            (
                row["processes"],
                *(f"{row['parts'][part]:.0f}" for part in parts),
                f"{row['collectives']:.0f}",
                f"{row['predicted']:.0f}",
                f"{row['measured']:.0f} ({row['least']:.0f} – {row['most']:.0f})",
                f"{row['predicted'] / row['measured']:.2f}",
            )
            for row in rows
        ),
    )


def traffic_table() -> str:
    rows = [row for row in read("cost_model")["check"] if row["processes"] > 1]
    purposes = list(dict.fromkeys(purpose for row in rows for purpose in row["traffic"]))

    def cell(row: dict[str, Any], purpose: str) -> str:
        calls, size = row["traffic"].get(purpose, (0, 0))
        return f"{calls} call{'s' * (calls != 1)}, {size / 1e3:,.1f} kB"

    return table(
        ("processes", *purposes, "gradients (by DDP)"),
        (
            (row["processes"], *(cell(row, purpose) for purpose in purposes), f"{row['gradients'] / 1e3:,.0f} kB")
            for row in rows
        ),
    )


def data_cost_table() -> str:
    found = read("cost_model")
    index = found["index"]
    return table(
        ("measured here, one core", ""),
        (
            ("a JPEG file of 500 x 375 pixels into two crops of 224", f"{found['decode ms']:.1f} ms"),
            ("first start with shards, a million images", f"{index['first start, s a million']:.0f} s"),
            ("later start with shards, a million images", f"{index['later start, s a million']:.1f} s"),
            ("... with a tenth of each class held out", f"{index['with held-out images, s a million']:.1f} s"),
            ("index, a process", f"{index['bytes an image']:.0f} bytes an image"),
            ("... while it is put together", f"{index['peak bytes an image']:.0f} bytes an image"),
        ),
    )


def number(value: float) -> str:
    """Three digits, with an exponent where there would be many zeros."""
    return f"{value:,.3g}" if not 1 <= value < 1e5 else f"{value:,.0f}"


def assumed_table() -> str:
    return table(
        ("assumed", "value", "source"),
        (
            (row["of"], f"{number(row['value'])} {row['unit']}".strip(), row["source"])
            for row in read("cost_model")["assumed"]
        ),
    )


def paper_table() -> str:
    rows = read("cost_model")["paper"]
    lines = [(f"{part}, ms", [f"{row['parts ms'][part]:.1f}" for row in rows]) for part in rows[0]["parts ms"]]
    lines += [
        ("**step, ms**", [f"**{row['step ms']:.0f}**" for row in rows]),
        ("images a second", [f"{row['images a second']:,.0f}" for row in rows]),
        ("an epoch, minutes", [f"{row['epoch minutes']:.1f}" for row in rows]),
    ]
    return table(
        ("on paper", *(f"{row['scenario']}: {row['gpus']} GPUs, bank {row['bank']:,}" for row in rows)),
        ((name, *values) for name, values in lines),
    )


def demands_table() -> str:
    rows = read("cost_model")["paper"]
    names = (
        ("cores that decode", "cores of a node that decode", 0),
        ("GB/s read", "GB/s that a node reads", 2),
        ("GB of index", "GB of index in a node's memory", 1),
        ("GB of bank a GPU", "GB of bank on a GPU", 2),
        ("GB of bank in a checkpoint", "GB of bank in a checkpoint", 2),
        ("GB to write a checkpoint", "GB of a node's memory while it is written", 1),
    )
    return table(
        ("on paper", *(f"{row['scenario']}: {row['gpus']} GPUs" for row in rows)),
        ((title, *(f"{row[name]:,.{digits}f}" for row in rows)) for name, title, digits in names),
    )


TABLES: dict[str, Callable[[], str]] = {
    "loading rates": rates_table,
    "loading start": start_table,
    "loading memory": memory_table,
    "processes": processes_table,
    "cost check": check_table,
    "traffic": traffic_table,
    "data cost": data_cost_table,
    "assumed": assumed_table,
    "paper": paper_table,
    "demands": demands_table,
}

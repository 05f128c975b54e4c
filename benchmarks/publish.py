"""Write what the benchmarks left in benchmarks/results into pages of docs, and draw the charts of docs/speed.md.

    python benchmarks/publish.py            # all pages
    python benchmarks/publish.py data.md    # one of them

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; all else in the page is left alone.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

import scale_tables
from accuracy_tables import accuracy_chart, accuracy_table
from table_text import figure_of, read, table

DOCS = Path(__file__).resolve().parent.parent / "docs"
INK, PSM, OTHER, THIRD = "#333333", "#0072B2", "#E69F00", "#009E73"
STEMS = {"cifar": "CIFAR"}  # what a stem is called where its key is not enough
OF_NETWORKS = ("of bare networks", "of bare networks by torch")
NAMES = {"simclr": "SimCLR", "byol": "BYOL", "mocov2": "MoCo v2", "nnclr": "NNCLR", "psm": "PSM"}


def named(row: dict) -> str:
    """An encoder with its stem."""
    return f"{row['encoder']}, {STEMS.get(row['stem'], row['stem'])} stem"


def bare(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK)


def throughput() -> None:
    """Images a second of psm, of the bare networks and of lightly, a panel for each network."""
    rows = read("pipeline-avx2")
    networks = list(dict.fromkeys(named(row) for row in rows))
    figure, panels = pyplot.subplots(1, len(networks), figsize=(4.5 * len(networks), 3.2), layout="constrained")
    bars = (("psm", "psm", PSM, ""), ("bare", "networks alone", "#BBBBBB", "//"), ("lightly", "lightly", OTHER, ".."))
    for axes, network in zip(panels, networks, strict=True):
        of_network = [row for row in rows if named(row) == network]
        for place, (name, label, color, hatch) in enumerate(bars):
            at = [index + (place - 1) * 0.27 for index in range(len(of_network))]
            rates = [row["images a second"][name] for row in of_network]
            axes.bar(at, rates, 0.25, label=label, color=color, hatch=hatch, edgecolor="white", linewidth=0)
        for index, row in enumerate(of_network):
            height = max(row["images a second"].values())
            factor = row["times lightly"]["median"]
            axes.annotate(
                f"{factor:.1f} x lightly", (index, height), (0, 3), textcoords="offset points", ha="center", fontsize=8
            )
        axes.set_xticks(range(len(of_network)), [NAMES[row["method"]] for row in of_network])
        axes.margins(y=0.12)
        bare(axes, f"{network}: images a second, batch 256")
    figure.legend(
        *panels[0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower center", ncols=3
    )
    figure.savefig(DOCS / "speed.svg")


def short(number: int) -> str:
    """4096 as 4k, a million as 1M."""
    if number < 1000:
        return str(number)
    return f"{number / 1000:.0f}k" if number < 1_000_000 else f"{number / 1_000_000:.0f}M"


def growth() -> None:
    """Milliseconds of search and loss along bank, batch and k."""
    rows = read("growth")
    figure, panels = pyplot.subplots(1, 3, figsize=(9, 3.2), layout="constrained", sharey=True)
    lines = (
        ("loss", "PSM's loss and gradient", PSM, "o"),
        ("search", "exact search, one direction", OTHER, "s"),
        ("byol", "BYOL's loss and gradient", THIRD, "^"),
    )
    for axes, axis in zip(panels, ("bank", "batch", "k"), strict=True):
        along = [row for row in rows if row["axis"] == axis]
        for name, label, color, marker in lines:
            middle = [row[name]["median"] for row in along]
            axes.plot([row[axis] for row in along], middle, color=color, marker=marker, markersize=4, label=label)
            low, high = ([row[name][end] for row in along] for end in ("least", "most"))
            axes.fill_between([row[axis] for row in along], low, high, color=color, alpha=0.15, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks([row[axis] for row in along], [short(row[axis]) for row in along])
        axes.minorticks_off()
        bare(axes, {"bank": "rows in the bank", "batch": "images in a batch", "k": "mined positives k"}[axis])
    panels[0].set_ylabel("milliseconds", fontsize=9)
    panels[2].legend(frameon=False, fontsize=9, loc="upper left")
    figure.savefig(DOCS / "growth.svg")


def pipeline_table(name: str) -> str:
    head = ("encoder", "method", "psm", "lightly", "times lightly", "… in channels-last")
    head += ("of the networks alone", "… by torch")
    return table(
        head,
        (
            (
                named(row),
                NAMES[row["method"]],
                *(f"{row['images a second'][name]:.0f}" for name in ("psm", "lightly")),
                *(figure_of(row[name]) for name in ("times lightly", "times lightly, channels-last")),
                *(figure_of(row[name], 2) if name in row else "–" for name in OF_NETWORKS),
            )
            for row in read(name)
        ),
    )


def views_table() -> str:
    rows = read("views")
    others = [name for name in rows[0]["ms a view"] if name != "psm"]
    return table(
        ("views", "psm, ms a view", *(f"{name} takes, times" for name in others)),
        (
            (
                f"{row['pixels']} px{', blur' if row['blur'] else ''}",
                f"{row['ms a view']['psm']:.3f}",
                *(figure_of(row["times as slow as psm"][name]) for name in others),
            )
            for row in rows
        ),
    )


def beside_torch_table(name: str, of: str, digits: int) -> str:
    return table(
        (of, "torch, ms", "psm, ms", "times as fast"),
        (
            (row["of"], *(f"{row['ms'][way]:.{digits}f}" for way in ("torch", "psm")), figure_of(row["times as fast"]))
            for row in read(name)
        ),
    )


def mining_table() -> str:
    stems = (("cifar", "cifar (3x3, the default at 32 pixels)"), ("imagenet", "ImageNet (7x7 and pooling)"))
    found = [(title, read(f"mining-resnet18-{stem}")) for stem, title in stems]
    return table(
        ("stem of ResNet-18", "BYOL, ms a step", "PSM, ms a step", "PSM / BYOL"),
        (
            (
                title,
                f"{rows['byol']['ms']:.0f}",
                f"{rows['psm']['ms']:.0f}",
                figure_of(rows["psm"]["times byol"], 3),
            )
            for title, rows in found
        ),
    )


def growth_table() -> str:
    return table(
        ("batch", "bank", "k", "exact search, ms", "PSM's loss, ms", "BYOL's loss, ms"),
        (
            (
                f"{row['batch']:,}",
                f"{row['bank']:,}",
                row["k"],
                *(figure_of(row[name]) for name in ("search", "loss", "byol")),
            )
            for row in read("growth")
        ),
    )


def recall_table() -> str:
    return table(
        ("bank", "exact search, ms", "… a push", "faiss, ms", "… a push", "recall of the 5 nearest"),
        (
            (
                f"{row['bank']:,}",
                *(figure_of(row[name]) for name in ("exact", "exact, upkeep", "faiss", "faiss, upkeep")),
                f"{row['recall']:.1%}",
            )
            for row in read("recall")
        ),
    )


def large_batch_table() -> str:
    return table(
        ("encoder", "batch", "chunk", "peak, GiB", "ms an image"),
        (
            (
                named(row),
                row["batch"],
                row["chunk"] or "–",
                f"{row['GiB']:.1f}",
                figure_of(row["ms an image"], 2),
            )
            for row in read("large_batch")
        ),
    )


def evaluation_table() -> str:
    parts = ("features", "knn", "linear", "epoch")
    return table(
        ("encoder", "features of 60,000, s", "kNN, s", "linear, s", "an epoch of PSM, s", "all three, of an epoch"),
        (
            (name, *(figure_of(row[part]) for part in parts), figure_of(row["of an epoch"], 2))
            for name, row in ((name, read(f"evaluation-{name}")) for name in ("tiny", "resnet18"))
        ),
    )


def start_table() -> str:
    found = read("start")
    return table(
        ("", "seconds"),
        (
            ("`psm --help`, CPU time beyond `python -c ''`", figure_of(found["help"], 2)),
            ("first step of `psm pretrain` after the imports", figure_of(found["first step"])),
        ),
    )


def profile_table() -> str:
    before, after = read("profile-before"), read("profile")
    return table(
        ("part of a step", "before, ms", "now, ms", "now, share"),
        (
            (part, f"{before[part]:.0f}", f"{after[part]:.0f}", f"{after[part] / after['sum of the parts']:.1%}")
            for part in after
        ),
    )


TABLES: dict[str, Callable[[], str]] = {
    "pipeline, AVX2": lambda: pipeline_table("pipeline-avx2"),
    "pipeline, AVX-512": lambda: pipeline_table("pipeline-avx512"),
    "profile": profile_table,
    "convolutions": lambda: beside_torch_table("convolutions", "forward and backward of", 0),
    "parts": lambda: beside_torch_table("parts", "", 1),
    "views": views_table,
    "mining": mining_table,
    "growth": growth_table,
    "recall": recall_table,
    "large batch": large_batch_table,
    "evaluation": evaluation_table,
    "start": start_table,
    "time to accuracy": accuracy_table,
    **scale_tables.TABLES,
}


def fill(page: Path) -> None:
    """Put every table in its place, but for those whose figures are not there."""
    text = page.read_text()
    for name, made in TABLES.items():
        if f"<!-- table: {name} -->" not in text:
            continue
        try:
            made()
        except FileNotFoundError as missing:
            print(f"{name}: no {missing.filename}, left as it was")
            continue
        place = re.compile(rf"(<!-- table: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        text = place.sub(lambda found, made=made: f"{found[1]}\n{made()}\n{found[2]}", text)
    page.write_text(text)


if __name__ == "__main__":
    pages = ("speed.md", "data.md", "cluster.md", "scaling.md")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"by default {', '.join(pages)}")
    chosen = parser.parse_args().pages or pages
    if "speed.md" in chosen:
        throughput()
        growth()
        accuracy_chart(DOCS / "time-to-accuracy.svg")
    for page in chosen:
        fill(DOCS / page)

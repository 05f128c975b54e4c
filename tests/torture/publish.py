"""Write the figures of results files into docs/reliability.md.

    python -m torture.publish [RESULTS...]

Several files, of parts of one run, are joined. A table stands between `<!-- table: NAME -->` and `<!-- end -->`; all
else in the page is left alone.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torture.runner import RESULTS, ROOT

PAGE = ROOT / "docs" / "reliability.md"
Cases = dict[str, dict[str, Any]]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def of_kind(cases: Cases, kind: str) -> dict[str, list[dict[str, Any]]]:
    """The cases of a kind by their name without number."""
    found: dict[str, list[dict[str, Any]]] = {}
    for title, case in cases.items():
        if title.startswith(f"{kind}/"):
            found.setdefault(re.sub(r"-\d+$", "", title.partition("/")[2]), []).append(case)
    return found


def total(cases: Iterable[dict[str, Any]], name: str) -> int:
    return sum(case["figures"].get(name, 0) for case in cases)


def failed(cases: Iterable[dict[str, Any]]) -> int:
    return sum(bool(case["failures"]) for case in cases)


def kills(cases: Cases) -> str:
    found = of_kind(cases, "kills")
    rows = []
    for work, some in found.items():
        at_files = sum("change" in moment for case in some for moment in case["figures"]["moments"])
        count = total(some, "kills")
        rows.append((work, len(some), count, at_files, count - at_files, failed(some)))
    sums = ["**all**", *(sum(row[place] for row in rows) for place in range(1, 6))]  # type: ignore[misc]
    head = ("work", "runs", "kills", "… before a change of a file", "… at a random time", "differ or damaged")
    return table(head, [*rows, sums])


def disks(cases: Cases) -> str:
    rows = []
    for work, some in of_kind(cases, "disks").items():
        sizes = [case["figures"]["mb"] for case in some if "mb" in case["figures"]]
        room = f"{min(sizes):g} to {max(sizes):g} MB" if sizes else "skipped"
        rows.append((work, len(some), room, total(some, "full"), failed(some)))
    return table(("work", "cases", "room", "ended by a full disk", "failed"), rows)


def folders(cases: Cases) -> str:
    rows = []
    for name, some in of_kind(cases, "folders").items():
        codes = [case["figures"].get("code") for case in some]
        rows.append((name, len(some), total(some, "hit"), codes.count(0), len(codes) - codes.count(0), failed(some)))
    return table(("what happens, to which work", "cases", "in time", "finished", "ended in a sentence", "failed"), rows)


def mutations(cases: Cases) -> str:
    rows = []
    for kind, some in of_kind(cases, "mutations").items():
        files, read, refused = (total(some, name) for name in ("files", "read", "refused"))
        slowest, grown = (max(case["figures"].get(name, 0) for case in some) for name in ("slowest", "grown_mb"))
        rows.append((kind, f"{files:,}", f"{read:,}", f"{refused:,}", files - read - refused, slowest, grown))
    head = ("files", "mutations", "read", "refused in a sentence", "anything else", "slowest, s", "memory, MB more")
    return table(head, rows)


def growth(cases: Cases) -> str:
    rows = []
    for title, case in cases.items():
        if not title.startswith("growth/") or "rss_mb" not in case["figures"]:
            continue
        figures = case["figures"]
        name = f"{figures['runs']} short runs in one process" if "runs" in figures else _long(figures)
        numbers = (" → ".join(map(str, figures[name])) for name in ("rss_mb", "handles", "threads"))
        rows.append((name, figures["samples"], *numbers, "yes" if case["failures"] else "no"))
    return table(("", "samples", "memory, MB", "file handles", "threads", "grows"), rows)


def _long(figures: dict[str, Any]) -> str:
    minutes, cpu = figures["seconds"] / 60, figures["cpu_seconds"] / 60
    return f"one run of {minutes:.0f} minutes ({cpu:.1f} of CPU, {figures['epochs']:,} epochs)"


def rounding(cases: Cases) -> str:
    rows = []
    for kind, what in (("threads", "threads"), ("devices", "processes")):
        for precision, some in of_kind(cases, kind).items():
            for count, steps in some[0]["figures"].items():
                rows.append((precision, f"{count} {what} beside 1", *(f"{value:.0e}" for value in steps.values())))
    return table(("", "", "1 step", "3 steps", "10 steps", "31 steps"), rows)


TABLES = {"kills": kills, "disks": disks, "folders": folders, "mutations": mutations, "growth": growth}
TABLES |= {"rounding": rounding}


def _between(text: str) -> Callable[[re.Match[str]], str]:
    return lambda found: f"{found[1]}{text}\n{found[2]}"


def main(files: Sequence[str]) -> None:
    results = [json.loads(Path(file).read_text()) for file in files or (RESULTS,)]
    cases: Cases = {}
    for result in results:
        cases |= result["cases"]
    page = PAGE.read_text()
    for name, make in TABLES.items():
        if any(title.startswith(f"{'devices' if name == 'rounding' else name}/") for title in cases):
            marked = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
            page = marked.sub(_between(make(cases)), page)
    PAGE.write_text(page)
    if files:
        RESULTS.write_text(json.dumps(results[0] | {"cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

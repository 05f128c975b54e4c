"""Times the commands of "The first five minutes" of docs/index.md, in an empty folder, and prints them as a table."""

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "index.md"
SECTION = "## The first five minutes\n"


def commands(page: str) -> Iterator[str]:
    """The commands of the section's first block, without comments."""
    block = page.partition(SECTION)[2].partition("\n    ")[2].partition("\n\n")[0]
    for line in block.splitlines():
        yield line.partition("#")[0].strip()


def main() -> None:
    total = 0.0
    print("| command | seconds |\n| --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for command in commands(PAGE.read_text()):
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", *shlex.split(command)], check=True, cwd=folder, stdout=subprocess.DEVNULL
            )
            total += time.perf_counter() - start
            print(f"| `{command}` | {time.perf_counter() - start:.0f} |", flush=True)
    print(f"| together | {total:.0f} |")


if __name__ == "__main__":
    main()

"""A batch of 4096 on a small machine: peak memory and time of a whole step, in chunks and at once.

    python benchmarks/large_batch.py                             the table
    python benchmarks/large_batch.py METHOD ENCODER STEM BATCH CHUNK  one case; CHUNK 0: all at once

Each case runs in a process of its own. The peak is the operating system's, imports included.
"""

import json
import subprocess
import sys

from turns import keep, shown, spread, timed

CASES = (
    ("psm", "resnet18", "imagenet", 256, 0),
    ("psm", "resnet18", "imagenet", 4096, 0),
    ("psm", "resnet18", "imagenet", 4096, 256),
    ("psm", "tiny", "cifar", 256, 0),
    ("psm", "tiny", "cifar", 4096, 0),
    ("psm", "tiny", "cifar", 4096, 256),
)


def measure(method: str, name: str, stem: str, batch: int, chunk: int) -> dict:
    """GiB at most and milliseconds an image of three steps, after one that warms up."""
    from memory import peak
    from mining import Contender

    contender = Contender(method, name, stem, batch, chunk or None)
    contender.step()
    milliseconds = spread([1e3 * timed(contender.step) / batch for _ in range(3)])
    return {"GiB": peak(), "ms an image": milliseconds}


def main() -> None:
    if len(sys.argv) > 1:
        method, name, stem, batch, chunk = sys.argv[1:]
        print(json.dumps(measure(method, name, stem, int(batch), int(chunk))))
        return
    line = "{:8} {:10} {:9} {:>6} {:>6} {:>10} {:>20}".format
    print(line("method", "encoder", "stem", "batch", "chunk", "peak, GiB", "ms an image"))
    rows = []
    for case in CASES:
        result = subprocess.run([sys.executable, __file__, *map(str, case)], capture_output=True, text=True, check=True)
        found = json.loads(result.stdout.splitlines()[-1])
        rows.append({**dict(zip(("method", "encoder", "stem", "batch", "chunk"), case, strict=True)), **found})
        print(line(*case[:4], case[4] or "-", f"{found['GiB']:.2f}", shown(found["ms an image"])), flush=True)
    keep("large_batch", rows)


if __name__ == "__main__":
    main()

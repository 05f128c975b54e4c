"""Training throughput of this checkout beside another one, for example the commit before a change.

    git worktree add OTHER COMMIT && (cd OTHER && python setup.py build_ext --inplace)
    python benchmarks/against.py OTHER --threads 1

Each takes the whole step of benchmarks/pipeline.py (batch 256, 32 pixels) in a process of its own and they take turns;
the ratio is taken within a turn. Nothing is stored.
"""

import argparse
import os
import sys
from pathlib import Path

from turns import Contender, in_turns, shown, spread

HERE = Path(__file__).resolve().parents[1]


def start(checkout: Path, *work: object) -> Contender:
    source = os.pathsep.join(filter(None, [str(checkout / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": str(work[-1])}
    script = checkout / "benchmarks" / "contenders" / "psm_training.py"
    return Contender([sys.executable, "-W", "ignore", str(script), *map(str, work)], environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--methods", nargs="+", default=["psm", "simclr"])
    parser.add_argument("--encoder", default="tiny")
    parser.add_argument("--stem", default="auto", help="as the key stem of each checkout")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    for method in options.methods:
        work = (method, options.encoder, options.stem, options.batch, options.threads)
        contenders = {"here": start(HERE, *work), "other": start(options.other.resolve(), *work)}
        seconds = in_turns({k: lambda c=c: c.seconds(options.steps) for k, c in contenders.items()}, options.turns)
        for contender in contenders.values():
            contender.stop()
        ratio = spread([other / here for here, other in zip(seconds["here"], seconds["other"], strict=True)])
        print(f"{method}, {options.encoder}: {shown(ratio)} times the other's images a second", flush=True)


if __name__ == "__main__":
    main()

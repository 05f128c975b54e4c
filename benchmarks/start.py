"""How soon psm answers: CPU seconds of `psm --help` beyond a bare interpreter, and of a first training step.

python benchmarks/start.py
"""

import os
import resource
import subprocess
import sys
import tempfile
import time

from turns import in_turns, keep, shown, spread

FIRST_STEP = """
import time, torch, lightning, matplotlib, numpy, PIL, rich, yaml
import psm.training.pretrain
start = time.perf_counter()
import psm.training.module as training
step = training.PretrainModule.optimizer_step
def first(self, *given, **named):
    step(self, *given, **named)
    print("after", time.perf_counter() - start, flush=True)
    raise KeyboardInterrupt
training.PretrainModule.optimizer_step = first
import psm, sys
try:
    psm.pretrain(sys.argv[1], data="shapes", encoder="tiny", progress=False, batch_size=256, bank={"size": 4096})
except KeyboardInterrupt:
    pass
"""


def cpu_seconds(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_step() -> float:
    """Seconds from the imports' end to the end of the first step of `psm pretrain` on the built-in images."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-c", FIRST_STEP, os.path.join(folder, "run")]  # noqa: PTH118
        result = subprocess.run(command, capture_output=True, text=True)
    return float(next(line.split()[1] for line in result.stdout.splitlines() if line.startswith("after ")))


def main() -> None:
    times = in_turns(
        {"bare": lambda: cpu_seconds("-c", ""), "help": lambda: cpu_seconds("-m", "psm.cli.main", "--help")}, turns=9
    )
    more = spread([own - bare for own, bare in zip(times["help"], times["bare"], strict=True)])
    print(f"psm --help: {shown(more)} CPU seconds more than a bare interpreter ({shown(spread(times['bare']))})")
    start = time.perf_counter()
    step = spread([first_step() for _ in range(3)])
    print(f"first step of psm pretrain: {shown(step)} s after the imports ({time.perf_counter() - start:.0f} s in all)")
    keep("start", {"help": more, "first step": step})


if __name__ == "__main__":
    main()

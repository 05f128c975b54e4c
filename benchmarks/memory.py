"""Peak memory of a method's loss and gradient, each case in a process of its own.

    python benchmarks/memory.py                    the table
    python benchmarks/memory.py METHOD BATCH BANK  one case

The peak is the operating system's; what the imports take is taken off.
"""

import resource
import subprocess
import sys

CASES = (
    ("psm", 256, 16384),
    ("psm", 1024, 16384),
    ("psm", 4096, 16384),
    ("psm", 4096, 1_000_000),
    ("mocov2", 256, 16384),
    ("mocov2", 4096, 1_000_000),
    ("nnclr", 4096, 1_000_000),
    ("bcl", 1024, 1),
    ("bcl", 4096, 1),
)


def peak() -> float:
    """GiB at most so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # of bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def measure(method: str, batch: int, bank_size: int, width: int = 128) -> float:
    """GiB that one symmetric loss and its gradient take beyond the imports, bank included."""
    import torch

    from psm.losses.method_loss import method_loss
    from psm.methods import get_method
    from psm.mining.memory_bank import MemoryBank
    from psm.models.outputs import Embeddings

    torch.set_num_threads(2)
    idle = peak()
    bank = MemoryBank(bank_size, width)
    for first in range(0, bank_size, 65536):
        rows = min(65536, bank_size - first)
        bank.enqueue(torch.randn(rows, width), torch.arange(first, first + rows))
    embeddings = Embeddings(*(torch.randn(2, batch, width).requires_grad_(index < 2) for index in range(3)))
    method_loss(embeddings, get_method(method).build_loss(), bank, torch.arange(batch) + bank_size).loss.backward()
    return peak() - idle


def main() -> None:
    if len(sys.argv) > 1:
        method, batch, bank = sys.argv[1:]
        print(f"{measure(method, int(batch), int(bank)):.2f}")
        return
    print(f"{'method':8} {'batch':>6} {'bank':>9} {'peak, GiB':>10}")
    for case in CASES:
        command = [sys.executable, __file__, *map(str, case)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"{case[0]:8} {case[1]:>6} {case[2]:>9} {result.stdout.strip():>10}")


if __name__ == "__main__":
    main()

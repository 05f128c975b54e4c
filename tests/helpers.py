"""What tests of several rooms share."""

import multiprocessing
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from psm import kernels
from psm.losses.method_loss import method_loss
from psm.methods import get_method
from psm.mining.batch import MiningBatch
from psm.mining.memory_bank import MemoryBank
from psm.models.factory import create_encoder
from psm.models.outputs import ViewPair
from psm.models.pretrained import EncoderInfo, save_encoder
from psm.utils.run_folder import RunFolder

GOLDEN = Path(__file__).parent / "golden"

# A run that takes about a second.
SMALL = {
    "data": "shapes",
    "encoder": "tiny",
    "epochs": 2,
    "batch_size": 32,
    "images": {"limit": 100, "size": 16},
    "heads": {"hidden_dim": 24, "out_dim": 12},
    "bank": {"size": 50},
    "monitor": {"images": 60, "test_images": 40},
    "progress": False,
}

compiled = pytest.mark.skipif(kernels.runtime.simd_width() is None, reason=f"kernels: {kernels.status()}")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


def browser_dom(url: Any, profile: Any, width: Any, dark: bool = False) -> Any:
    """The document of a page after its scripts ran in headless chromium, at a width of the window in pixels."""
    switches = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
        *("--hide-scrollbars", "--virtual-time-budget=4000", f"--window-size={width},900"),
        *(("--blink-settings=preferredColorScheme=0",) if dark else ()),
        *(f"--user-data-dir={profile}", "--dump-dom"),
    )
    return subprocess.run([str(CHROMIUM), *switches, url], capture_output=True, text=True, timeout=120).stdout


def page_widths(page: Any, folder: Any, width: Any) -> Any:
    """Width of the window, of the document, and of the narrowest and widest chart, of an HTML file in a browser."""
    script = (
        "<script>const d = document.documentElement;"
        "const g = [...document.querySelectorAll('svg')].map(x => Math.round(x.getBoundingClientRect().width));"
        "d.dataset.measured = [innerWidth, d.scrollWidth, Math.min(...g), Math.max(...g)].join(' ');</script>"
    )
    probe = folder / f"probe-{width}.html"
    probe.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    shown = browser_dom(probe.as_uri(), folder / f"profile-{width}", width)
    return [int(number) for number in re.search(r'data-measured="([\d ]+)"', shown)[1].split()]


# New processes are forks of one that has imported the library, which takes seconds, and has done nothing with it.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["psm.cli.main", "psm.training.pretrain", "psm.evaluation.evaluate", "psm.reporting.inspector"]
)


def start_psm(*arguments: Any, output: Path | None = None, **environment: str) -> Any:
    """The command line in a new process, as a `multiprocessing.Process` that has started.

    Args:
        arguments: what stands after ``psm``.
        output: folder for the files stdout and stderr; None: they are dropped.
        environment: variables set beside one thread and a width of 160 columns.
    """
    environment = {"OMP_NUM_THREADS": "1", "COLUMNS": "160", **environment}
    process = FORKS.Process(target=command_line, args=([str(x) for x in arguments], output, environment))
    process.start()
    return process


def run_psm(*arguments: Any, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a new process, to its end: exit code and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        process = start_psm(*arguments, output=Path(folder), **environment)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"psm {' '.join(map(str, arguments))} took more than {timeout} s")
        out, err = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(list(arguments), process.exitcode, out, err)


def run_python(source: str, folder: Path, timeout: float = 300) -> None:
    """Python source in a new process whose working directory is a folder; fails with the process's own error."""
    errors = folder / "stderr.txt"
    process = FORKS.Process(target=_source, args=(source, folder, errors))
    process.start()
    process.join(timeout)
    assert process.exitcode == 0, errors.read_text()


def _source(source: str, folder: Path, errors: Path) -> None:
    os.chdir(folder)
    with errors.open("w", buffering=1) as sys.stderr:
        torch.set_num_threads(1)
        try:
            exec(source, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)


def command_line(arguments: list[str], output: Path | None, environment: dict[str, str]) -> None:
    """`psm` with these arguments in this process, which ends with it; what it prints goes to files of a folder."""
    from psm.cli.main import main

    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    for number, name in ((1, "stdout"), (2, "stderr")):
        handle = os.open(os.devnull if output is None else output / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, number)
        setattr(sys, name, os.fdopen(handle, "w", buffering=1))
    sys.argv = ["psm", *arguments]
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may become larger than that: writes fail as they do on a full disk, after a part of them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_untrained_encoder(folder: Any, size: Any = 16, seed: Any = 0, data: Any = "shapes") -> Any:
    """A folder with the encoder.safetensors of an untrained encoder, as a finished run has it."""
    torch.manual_seed(seed)
    encoder = create_encoder("tiny", image_size=size)
    info = EncoderInfo("tiny", "cifar", encoder.width, size, [0.5, 0.4, 0.3], [0.2, 0.25, 0.3], "psm", str(data), 1)
    save_encoder(RunFolder(folder), encoder, info)
    return folder


def save_images(folder: Any, names: Any, seed: Any = 0, side: Any = 24) -> Any:
    """PNG files of smooth random colors below a folder, one for each name."""
    random = np.random.default_rng(seed)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(path)
    return folder


@contextmanager
def using(threads: Any) -> Any:
    """So many of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


TASKS = Path("/proc/self/task")
linux_threads = pytest.mark.skipif(not TASKS.exists(), reason="counts the threads that Linux lists")


def native_threads() -> set[str]:
    """Ids of the threads of this process, those of OpenMP too."""
    return {task.name for task in TASKS.iterdir()}


def method(name: Any = "psm", **groups: Any) -> Any:
    """A method with some settings changed: method(loss={"hard_weight": 0.0})."""
    return get_method(name, **groups)


def without_pnsm(**groups: Any) -> Any:
    return get_method("psm", sampler="none", **groups)


def pair_loss(pair: Any, spec: Any, bank: Any = None, ids: Any = None, generator: Any = None, **more: Any) -> Any:
    """The loss of one direction, on vectors that are taken as they are."""
    return spec.build_loss().on_batch(MiningBatch(*pair, ids=ids, bank=bank, generator=generator, **more))


def batch_loss(embeddings: Any, spec: Any, bank: Any = None, ids: Any = None, generator: Any = None) -> Any:
    """The loss of a batch as a training step takes it."""
    return method_loss(embeddings, spec.build_loss(), bank, ids, generator, **spec.loss_options)


def as_on_an_accelerator(monkeypatch: Any) -> None:
    """Compute losses as on an accelerator: all directions of a batch at once."""
    for module in ("losses.method_loss", "losses.contrastive", "losses.terms", "mining.memory_bank", "ops"):
        monkeypatch.setattr(f"psm.{module}.prefers_few_kernels", lambda device: True)


def golden(name: Any) -> Any:
    return {k: torch.from_numpy(v) if v.ndim else v.item() for k, v in np.load(GOLDEN / f"{name}.npz").items()}


def filled(rows: Any, ids: Any = None, size: Any = None) -> Any:
    bank = MemoryBank(size or len(rows), rows.shape[1]).to(rows.dtype)
    bank.enqueue(rows, torch.arange(len(rows)) if ids is None else ids)
    return bank


def pair_of(query: Any, key: Any, projection: Any, other: Any) -> Any:
    return ViewPair(*(normalize(x, dim=1) for x in (query, key, projection, other)))


def random_vectors(seed: Any, *shapes: Any, dtype: Any = torch.float64) -> Any:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]


def close(a: Any, b: Any, tolerance: Any = 1e-9) -> Any:
    return torch.allclose(
        torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64), 0, tolerance
    )

"""Runs the code of a page in a scratch folder: commands by `psm.cli.main`, Python in one namespace, all of it small."""

import os
import re
import shlex
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from documentation.blocks import Code
from documentation.not_run import REFUSED
from documentation.world import SMALL_RUN

# What is set in every command that has the key, whatever the page says: the scale, and what this machine lacks.
SCALE = {
    "pretrain": {
        "encoder": "tiny",
        "epochs": "1",
        "batch_size": "16",
        "grad_cache_chunk": "8",
        "images.limit": "48",
        "images.size": "16",
        "heads.hidden_dim": "24",
        "heads.out_dim": "12",
        "bank.size": "32",
        "monitor.images": "32",
        "monitor.test_images": "32",
        "devices": "1",
        "accelerator": "cpu",
    },
    "evaluate": {"linear.epochs": "2", "few_labels.draws": "2", "lidar.images": "600", "lidar.views": "2"},
    "inspect": {"queries": "12"},
    "finetune": {"epochs": "1", "batch_size": "16", "images.size": "16"},
    "worth": {"labels": "[2,8]", "draws": "2", "steps": "2", "scratch.epochs": "1", "finetune.epochs": "1"},
    "experiment": {
        "data": "[cifar10]",
        "seeds": "[0]",
        "linear.epochs": "2",
        "cluster": "",
        "gpus": "",
        "cpus": "",
    },
}
SCALE["experiment"] |= SCALE["pretrain"]
SCALE["worth"] |= {"images.size": "16", "images.limit": "48", "batch_size": "16"}
GIVEN_ONLY = {"grad_cache_chunk", "devices", "accelerator", "cluster", "gpus", "cpus"}  # changed, never added
PROGRAMS = ("psm", "open", "head")
WRITES_ANEW = ("pretrain", "finetune", "embed", "predict", "export", "explore")  # refuse what is there already
ABSOLUTE = re.compile(r"(?<=[=\[,])/(?=(sets|scratch|shared|new|data)\b)")


class Refused(Exception):
    """A command that ended with exit code 2."""


def scaled(command: str, words: Sequence[str]) -> list[str]:
    """Words of a command with the keys of scale replaced or added; an empty value takes the key away."""
    given = {word.partition("=")[0]: word for word in words if "=" in word}
    plain = [word for word in words if "=" not in word]
    scale = dict(SCALE.get(command, {}))
    if "--help" in plain or plain[:1] in (["list"], ["report"]):
        return list(words)
    if "data" in given:
        scale.pop("data", None)
    if given.get("resume") == "resume=true":  # the run's own settings hold
        scale = {key: "3" for key in ("epochs",) if key in given}
    if given.get("encoder") == "encoder=resnet18":
        scale.pop("encoder")
    for key, value in scale.items():
        if key in given or key not in GIVEN_ONLY:
            given[key] = f"{key}={value}"
    return [*plain, *(word for word in given.values() if not word.endswith("="))]


class Page:
    """One page's code, run in the order of the page.

    Args:
        root: a copy of the world, see `world.make_world`; the working folder is ``root/work``.
        names: what the page's Python takes for granted.
    """

    def __init__(self, root: Path, names: dict[str, Any]):
        self.root, self.names = root, names

    def run(self, code: Code) -> None:
        if code.kind == "python":
            exec(compile(code.text, code.place, "exec"), self.names)
            return
        words = shlex.split(ABSOLUTE.sub(f"{self.root}/", code.text))
        {"psm": self.psm, "open": self.see, "head": self.see}[words[0]](words[1:])

    def psm(self, words: list[str]) -> None:
        from psm.cli.main import main

        redirected = next((place for place, word in enumerate(words) if word in (">", ">>")), None)
        if redirected is not None:
            path = Path(words[redirected + 1]).expanduser()
            with path.open("a") as file, redirect_stdout(file):
                self.psm(words[:redirected])
            assert path.stat().st_size, path
            return
        command, *rest = words
        arguments = [command, *scaled(command, rest)]
        out = next((Path(word.partition("=")[2]).expanduser() for word in rest if word.startswith("out=")), None)
        if (
            out is not None
            and command in WRITES_ANEW
            and not any("resume" in word or "overwrite" in word for word in rest)
        ):
            (shutil.rmtree if out.is_dir() else Path.unlink)(out) if out.exists() else None
        print("$ psm", shlex.join(arguments), flush=True)
        code = main(arguments)
        if code == 2:
            raise Refused
        assert code == 0, f"exit code {code}"
        assert out is None or out.exists(), f"{out} was not written"

    def see(self, words: list[str]) -> None:
        """A file that the page tells to look at is there."""
        assert Path(words[-1]).stat().st_size, words[-1]


def small_calls() -> None:
    """The scale of `psm.pretrain` and `psm.finetune` called from Python; suites train two runs, in this process."""
    import psm
    from psm.experiments import runner, worker
    from psm.experiments.executors import local

    pretrain, finetune, make_plan = psm.pretrain, psm.finetune, runner.make_plan

    def small_pretrain(out: Any, **keys: Any) -> Any:
        shutil.rmtree(out, ignore_errors=True)
        nested = {key: {**keys.get(key, {}), **value} for key, value in SMALL_RUN.items() if isinstance(value, dict)}
        return pretrain(out, **keys | SMALL_RUN | nested | {"encoder": "tiny"})

    def small_finetune(checkpoint: Any, data: Any, out: Any, **keys: Any) -> Any:
        shutil.rmtree(out, ignore_errors=True)
        return finetune(checkpoint, data, out, **keys, epochs=1)

    def small_plan(request: Any) -> Any:
        plan = make_plan(request)
        runs = plan.runs[:2]
        names = {run.name for run in runs}
        return replace(plan, runs=runs, entries=tuple(entry for entry in plan.entries if entry.run in names))

    class Finished:
        def poll(self) -> int:
            return 0

    def start_worker(job: Any, variables: Any) -> Any:
        job.write()
        worker.work(job)
        return Finished()

    psm.pretrain, psm.finetune = small_pretrain, small_finetune
    runner.make_plan, local.start_worker = small_plan, start_worker


def run_page(codes: Sequence[Code], root: Path, prelude: Callable[[Path], dict[str, Any]], report: Path) -> None:
    """Run a page's code in this process, which it changes; where code fails, the process ends with code 1."""
    work = root / "work"
    os.environ |= {
        "HOME": str(root / "home"),
        "PSM_CACHE": str(root / "cache"),
        "COLUMNS": "160",
        "OMP_NUM_THREADS": "1",
    }
    os.environ.pop("XDG_CACHE_HOME", None)
    os.chdir(work)
    with report.open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        import torch

        torch.set_num_threads(1)
        small_calls()
        page = Page(root, prelude(work))
        failed = [code for code in codes if not succeeds(page, code)]
        for code in failed:
            print(f"FAILED {code.place}: {code.text}", flush=True)
    if failed:
        os._exit(1)


def succeeds(page: Page, code: Code) -> bool:
    print(f"--- {code.place} ({time.process_time():.0f} s of CPU so far)", flush=True)
    refused = (code.page, code.text) in REFUSED
    try:
        page.run(code)
    except BaseException as error:
        traceback.print_exc()
        return refused and isinstance(error, Refused)
    return not refused

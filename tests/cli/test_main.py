"""The command line as its users meet it: a process, its exit code, what it prints and what it leaves behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from helpers import run_psm as psm
from psm.cli.main import main
from psm.config import merge as settings
from psm.config.embed import EmbedConfig
from psm.config.export import ExportConfig
from psm.config.finetune import FinetuneConfig
from psm.config.predict import PredictConfig
from psm.config.schema import (
    METHOD_GROUPS,
    DataConfig,
    EvaluateConfig,
    ExperimentConfig,
    InspectConfig,
    MethodsConfig,
    PretrainConfig,
)
from psm.config.search import SearchConfig
from psm.config.worth import WorthConfig
from psm.methods import KINDS, MethodSpec, get_method


def test_the_module_is_the_command_line() -> None:
    result = subprocess.run([sys.executable, "-m", "psm", "pretrian"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert "did you mean 'pretrain'?" in result.stderr


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys; from psm.cli.main import main;"
        "names = 'pretrain evaluate embed search export finetune predict worth'.split();"
        "code = [main([*x, '--help']) for x in ([], *([name] for name in names))];"
        "heavy = {'torch', 'lightning', 'numpy', 'matplotlib'} & set(sys.modules);"
        "sys.exit(f'{code} {heavy}' if heavy or any(code) else 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("command", "schema"),
    [
        ("pretrain", PretrainConfig),
        ("evaluate", EvaluateConfig),
        ("inspect", InspectConfig),
        ("export", ExportConfig),
        ("embed", EmbedConfig),
        ("search", SearchConfig),
        ("finetune", FinetuneConfig),
        ("predict", PredictConfig),
        ("worth", WorthConfig),
        ("data", DataConfig),
        ("methods", MethodsConfig),
        ("experiment", ExperimentConfig),
    ],
)
def test_help_lists_every_key(capsys: pytest.CaptureFixture[str], command: str, schema: type) -> None:
    assert main([command, "--help", "all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for row in settings.rows(schema):
        assert f"{row.key}=" in text or f"{row.key}." in text
        assert row.meaning in text
    assert "config=" in text


def test_help_of_a_group_and_of_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--help", "optim"]) == 0
    assert "optim.lr=" in capsys.readouterr().out
    assert main(["experiment", "--help", "optim"]) == 0
    assert "optim.lr=" in capsys.readouterr().out
    assert main(["pretrain", "--help", "optm"]) == 2
    assert "did you mean 'optim'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pretrain", "out=OUT", "epoch=3"], "did you mean 'epochs'?"),
        (["pretrain", "out=OUT", "epochs=many"], "epochs=many is not a whole number"),
        (["pretrain", "epochs=3"], "out= is missing"),
        (["pretrain", "out=OUT", "method=pms"], "did you mean 'psm'?"),
        (["pretrain", "out=OUT", "data=cifar1O"], "cifar10"),
        (["pretrain", "out=OUT", "encoder=resnet19"], "resnet18"),
        (["pretrain", "out=OUT", "positives.weights=V7"], "V0, V1, V2, V3, V4"),
        (["evaluate"], "checkpoint= is missing"),
        (["evaluate", "checkpoint=OUT"], "does not exist"),
        (["inspect", "OUT"], "does not exist"),
        (["export"], "checkpoint= is missing"),
        (["export", "OUT", "format=safetensors"], "does not exist"),
        (["pretrain", "out=OUT", "init=no.pth"], "init=no.pth does not exist"),
        (["pretrain", "out=OUT", "pretrained=true"], "write init="),
        (["inspect", "run=OUT"], "does not exist"),
        (["inspect"], "run= is missing"),
        (["pretrian"], "did you mean 'pretrain'?"),
        (["methods", "method=pms"], "did you mean 'psm'?"),
        (["data", "data=OUT"], "OUT"),
        (["pretrain", "--out", "x"], "'--out' is not key=value: write out=x."),
        (["pretrain", "out=OUT", "--epochs", "3"], "write epochs=3"),
        (["pretrain", "out=OUT", "num_workers=3"], "write images.workers="),
        (["pretrain", "out=OUT", "epochs=0"], "epochs=0 is too small: give 1 or more"),
        (["pretrain", "out=OUT", "config=/dev/zero"], "is not a regular file"),
        (["evaluate", "OUT"], "does not exist"),
    ],
)
def test_mistakes_get_one_sentence_and_code_2(tmp_path: Path, arguments: list[str], says: str) -> None:
    out = tmp_path / "run"
    result = psm(*(word.replace("OUT", str(out)) for word in arguments))
    assert result.returncode == 2, result.stderr
    assert says.replace("OUT", str(out)) in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert not out.exists()


def test_pretrain_evaluate_and_page(tmp_path: Path, small_arguments: list[str]) -> None:
    out = tmp_path / "run"
    result = psm("pretrain", f"out={out}", "epochs=2", *small_arguments)
    assert result.returncode == 0, result.stderr
    assert "psm evaluate" in result.stdout
    again = psm("pretrain", f"out={out}", "epochs=2", *small_arguments)
    assert again.returncode == 2
    assert "resume=true" in again.stderr
    result = psm("evaluate", out, "baselines=true", "linear.epochs=2", "progress=false")
    assert result.returncode == 0, result.stderr
    for word in ("raw pixels", "untrained encoder", "psm", "kNN", "linear", "top-1", "top-5"):
        assert word in result.stdout
    page = (out / "report.html").read_text()
    for word in ("<svg", "data:image/png;base64", "What was mined", "raw pixels"):
        assert word in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", "")


def default_interrupts() -> None:
    """SIGINT interrupts, also where the tests were started in the background, which makes it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def started(*arguments: str, until: Path) -> subprocess.Popen[str]:
    """A command in a process of its own, once it has written a file."""
    command = [sys.executable, "-m", "psm", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=default_interrupts
    )
    for _ in range(15000):  # five minutes, for a busy machine
        if until.exists() or process.poll() is not None:
            break
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_a_signal_stops_a_run_with_a_sentence_on_how_to_continue(
    tmp_path: Path, small_arguments: list[str], number: int, code: int
) -> None:
    out = tmp_path / "run"
    checkpoint = out / "checkpoints" / "last.ckpt"
    process = started("pretrain", f"out={out}", "epochs=100000", *small_arguments, until=checkpoint)
    process.send_signal(number)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == code, said
    assert f"`psm pretrain out={out} resume=true` continues the run" in said.splitlines()[-1]
    assert "Traceback" not in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_nothing_saved_nothing_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    def interrupted(*overrides: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr("psm.training.pretrain.run_pretraining", interrupted)
    default_interrupts()
    before = signal.getsignal(signal.SIGTERM)
    assert main(["pretrain", f"out={tmp_path / 'run'}"]) == code
    said = capsys.readouterr().err
    assert "before anything was saved" in said
    assert "resume" not in said
    assert signal.getsignal(signal.SIGTERM) is before


def test_methods_and_data() -> None:
    assert "psm" in psm("methods").stdout
    described = psm("methods", "method=psm").stdout
    assert "positives.k" in described
    assert "Dong" in described
    for name in ("shapes", "cifar10", "cifar100", "tiny-imagenet"):
        assert name in psm("data").stdout


def test_data_of_a_folder_with_a_broken_file(tmp_path: Path) -> None:
    from PIL import Image

    for index in range(10):
        Image.new("RGB", (40, 30), (index * 20, 0, 0)).save(tmp_path / f"{index}.png")
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    sheet = tmp_path / "sheet.png"
    result = psm("data", f"data={tmp_path}", f"sheet={sheet}")
    assert result.returncode == 0, result.stderr
    assert "broken.jpg" in result.stdout
    assert "unlabeled" in result.stdout
    assert Image.open(sheet).size[0] > 0
    refused = psm("data", f"data={tmp_path}", "images.max_unreadable=0.01")
    assert refused.returncode == 2
    assert "max_unreadable" in refused.stderr


def test_a_folder_of_unlabeled_images_trains(tmp_path: Path) -> None:
    from PIL import Image

    images = tmp_path / "images"
    images.mkdir()
    for index in range(12):
        Image.new("L" if index % 2 else "RGBA", (50, 36 + index)).save(images / f"{index}.png")
    (images / "broken.jpg").write_bytes(b"no image")
    out = tmp_path / "run"
    result = psm(
        "pretrain", f"out={out}", f"data={images}", "encoder=tiny", "epochs=1", "batch_size=4", "progress=false"
    )
    assert result.returncode == 0, result.stderr
    assert (out / "encoder.safetensors").exists()
    assert "broken.jpg" in (out / "unreadable.txt").read_text()
    assert f"look:    psm explore {out}" in result.stdout
    assert "psm evaluate" not in result.stdout
    scored = psm("evaluate", f"checkpoint={out}", "progress=false")
    assert scored.returncode == 2
    assert "no labels" in scored.stderr
    assert not (tmp_path / "run" / "scores.jsonl").exists()
    moved = images.rename(tmp_path / "moved")
    gone = psm("inspect", out)
    assert gone.returncode == 2
    assert str(images) in gone.stderr
    assert not (out / "inspect.html").exists()
    inspected = psm("inspect", out, f"data={moved}")
    assert inspected.returncode == 0, inspected.stderr
    assert "save.snapshots" in inspected.stdout
    assert (out / "inspect.html").exists()


@pytest.mark.parametrize("group", METHOD_GROUPS)
def test_help_on_a_group_of_a_method_lists_its_parts_and_settings(
    group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", "--help", group]) == 0
    said = capsys.readouterr().out
    expected = KINDS[group] if group in KINDS else [f.name for f in fields(getattr(get_method("psm"), group))]
    assert all(name in said for name in expected)


def test_method_groups_are_those_of_the_spec() -> None:
    assert tuple(sorted(METHOD_GROUPS)) == tuple(sorted(f.name for f in fields(MethodSpec)))

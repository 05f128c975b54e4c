"""The command line as its users meet it: a process, its exit code, what it prints and what it leaves behind."""

import os
import subprocess
import sys

import pytest

from psm.config import merge as settings
from psm.config.schema import DataConfig, EvaluateConfig, InspectConfig, MethodsConfig, PretrainConfig


def psm(*arguments, **more):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    command = [sys.executable, "-m", "psm", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, **more)


def test_help_does_not_import_torch():
    script = (
        "import sys; from psm.cli.main import main;"
        "code = [main([*x, '--help']) for x in ([], ['pretrain'], ['evaluate'])];"
        "heavy = {'torch', 'lightning', 'numpy', 'omegaconf', 'matplotlib'} & set(sys.modules);"
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
        ("data", DataConfig),
        ("methods", MethodsConfig),
    ],
)
def test_help_lists_every_key(command, schema):
    text = psm(command, "--help").stdout
    for row in settings.rows(schema):
        line = next(line for line in text.splitlines() if line.strip().startswith(row.key + " "))
        assert row.type in line
        assert row.default in line
        assert row.meaning in line
    assert "config=" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pretrain", "out=OUT", "epoch=3"], "did you mean 'epochs'?"),
        (["pretrain", "out=OUT", "epochs=many"], "epochs=many is not a whole number"),
        (["pretrain", "epochs=3"], "out= is missing"),
        (["pretrain", "out=OUT", "method=pms"], "did you mean 'psm'?"),
        (["pretrain", "out=OUT", "data=cifar1O"], "cifar10"),
        (["pretrain", "out=OUT", "encoder=resnet19"], "resnet18"),
        (["pretrain", "out=OUT", "positives.weighting=V7"], "V0, V1, V2, V3, V4"),
        (["evaluate"], "checkpoint= is missing"),
        (["evaluate", "checkpoint=OUT"], "does not exist"),
        (["inspect", "OUT"], "does not exist"),
        (["inspect", "run=OUT"], "does not exist"),
        (["inspect"], "run= is missing"),
        (["pretrian"], "did you mean 'pretrain'?"),
        (["methods", "method=pms"], "did you mean 'psm'?"),
        (["data", "data=OUT"], "OUT"),
        (["pretrain", "--out", "x"], "is not key=value"),
    ],
)
def test_mistakes_get_one_sentence_and_code_2(tmp_path, arguments, says):
    out = tmp_path / "run"
    result = psm(*(word.replace("OUT", str(out)) for word in arguments))
    assert result.returncode == 2, result.stderr
    assert says.replace("OUT", str(out)) in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert not out.exists()


def test_pretrain_evaluate_and_page(tmp_path, small_arguments):
    out = tmp_path / "run"
    result = psm("pretrain", f"out={out}", *small_arguments)
    assert result.returncode == 0, result.stderr
    assert "psm evaluate" in result.stdout
    again = psm("pretrain", f"out={out}", *small_arguments)
    assert again.returncode == 2
    assert "resume=true" in again.stderr
    result = psm("evaluate", f"checkpoint={out}", "baselines=true", "linear.epochs=2", "progress=false")
    assert result.returncode == 0, result.stderr
    for word in ("raw pixels", "untrained encoder", "psm", "knn top-1", "linear top-5"):
        assert word in result.stdout
    page = (out / "report.html").read_text()
    for word in ("<svg", "data:image/png;base64", "What was mined", "raw pixels"):
        assert word in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", "")


def test_methods_and_data():
    assert "psm" in psm("methods").stdout
    described = psm("methods", "method=psm").stdout
    assert "positives.k" in described
    assert "Dong" in described
    for name in ("shapes", "cifar10", "cifar100", "tiny-imagenet"):
        assert name in psm("data").stdout


def test_data_of_a_folder_with_a_broken_file(tmp_path):
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


def test_a_folder_of_unlabeled_images_trains(tmp_path):
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

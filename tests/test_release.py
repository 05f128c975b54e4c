"""What is released: one version, wheels that work in a fresh environment."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import psm
from lowest_versions import EXTRAS, lowest_requirements

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_there_is_one_version() -> None:
    version = tomllib.loads(PYPROJECT)["project"]["version"]
    assert psm.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_has_a_lowest_version() -> None:
    lowest = lowest_requirements(PYPROJECT)
    assert len(lowest) == len(tomllib.loads(PYPROJECT)["project"]["dependencies"]) + len(EXTRAS)
    assert all("==" in requirement and ">" not in requirement for requirement in lowest), lowest


def build_wheel(folder: Path, pure: bool) -> Path:
    variables = {**os.environ, "PSM_PURE": "1" if pure else ""}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(command, check=True, env=variables)
    (wheel,) = folder.glob("psm-*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.parametrize("pure", [True, False], ids=["pure", "kernels"])
def test_a_wheel_works_in_a_fresh_environment(pure: bool, tmp_path: Path) -> None:
    """psm comes from the wheel, its dependencies from this environment: torch alone would take minutes to install."""
    if not pure and sys.platform != "linux":
        pytest.skip("kernels are built on Linux")
    wheel = build_wheel(tmp_path / "wheel", pure)
    assert wheel.name.endswith("-py3-none-any.whl") == pure
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, site], check=True)
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    run = lambda *words: subprocess.run([python, "-m", *words], capture_output=True, text=True, cwd=tmp_path)  # noqa: E731
    version = run("psm", "--version")
    assert f"psm {psm.__version__} (kernels: " in version.stdout, version.stderr
    assert ("avx" in version.stdout) == (not pure), version.stdout
    small = ["encoder=tiny", "epochs=1", "batch_size=16", "images.limit=32", "images.size=16", "bank.size=16"]
    trained = run("psm", "pretrain", "out=run", "data=shapes", *small)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "run" / "report.html").exists()
    where = subprocess.run(
        [python, "-c", "import psm; print(psm.__file__)"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert str(site) in where.stdout

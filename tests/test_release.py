"""What is released: one version, wheels that work in a fresh environment."""

import os
import platform
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


def find_wheel(pure: bool, folder: Path) -> Path:
    """A wheel of the folder that PSM_DIST names, as `make dist` leaves it; else one that is built in ``folder``."""
    if dist := os.environ.get("PSM_DIST"):
        found = Path(dist).glob("psm-*.whl")
    else:
        variables = {**os.environ, "PSM_PURE": "1" if pure else ""}
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
        subprocess.run(command, check=True, env=variables)
        found = folder.glob("psm-*.whl")
    (wheel,) = (path for path in found if path.name.endswith("-py3-none-any.whl") == pure)
    if dist and not pure:
        assert "manylinux" in wheel.name
    return wheel


@pytest.mark.slow
@pytest.mark.parametrize("pure", [True, False], ids=["pure", "kernels"])
def test_a_wheel_works_in_a_fresh_environment(pure: bool, tmp_path: Path) -> None:
    """psm is installed from the wheel; its dependencies are those of this environment: torch alone takes minutes."""
    if not pure and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("kernels are built on x86-64 Linux")
    wheel = find_wheel(pure, tmp_path / "wheel")
    venv.create(tmp_path / "env", with_pip=False)
    bin_folder = tmp_path / "env" / "bin"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(bin_folder / "python"), *install], check=True)
    site = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])

    def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([bin_folder / program, *words], capture_output=True, text=True, cwd=tmp_path)

    version = run("psm", "--version")
    assert f"psm {psm.__version__} (kernels: " in version.stdout, version.stderr
    assert ("avx" in version.stdout) == (not pure), version.stdout
    small = ["encoder=tiny", "epochs=1", "batch_size=16", "images.limit=32", "images.size=16", "bank.size=16"]
    trained = run("psm", "pretrain", "out=run", "data=shapes", *small)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "run" / "report.html").exists()
    assert str(site) in run("python", "-c", "import psm; print(psm.__file__)").stdout
    assert run("python", "-c", "import psm; psm.list_pretrained()").returncode == 0

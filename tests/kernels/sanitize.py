"""Runs the kernels' tests with the extension compiled for AddressSanitizer and UBSan: ``make sanitize``.

The extension goes into a copy of the package in a temporary folder; the installed one is not touched. Warnings of
``-Wall -Wextra`` are errors. Leaks are not looked for: Python and torch keep memory until the end.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CC", "gcc")
FLAGS = ("-shared", "-fPIC", "-O1", "-g", "-fno-omit-frame-pointer", "-fno-wrapv", "-Wall", "-Wextra", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def library(name: str) -> str:
    """Path of a runtime library of the compiler."""
    found = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if not Path(path).is_absolute():
        raise SystemExit(f"{COMPILER} has no {name}: install the compiler's sanitizer libraries")
    return path


def main(arguments: list[str]) -> int:
    """Build, then run the tests of this folder (or those given) and return pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "src" / "psm"
        shutil.copytree(ROOT / "src" / "psm", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        kernels = package / "kernels"
        include = f"-I{sysconfig.get_paths()['include']}"
        sources = [str(kernels / "csrc" / "module.c"), "-o", str(kernels / "_native.abi3.so")]
        subprocess.run([COMPILER, *FLAGS, *SANITIZERS, include, *sources], check=True)
        environment = os.environ | {
            "PYTHONPATH": str(package.parent),
            "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')}",
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        environment.pop("PSM_KERNELS", None)
        tests = arguments or [str(ROOT / "tests" / "kernels")]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", *tests]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

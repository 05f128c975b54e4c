"""Which code runs here: a commit for records, and a digest of the sources that machines compare."""

import hashlib
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path


def package_commit() -> str:
    """The commit of the checkout that the package runs from, or its version where there is none."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # the package may lie within another repository
        changed = "+changes" if git("status", "--porcelain", "--untracked-files=no", "--", "../..") else ""
        return git("rev-parse", "--short=12", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return f"version {version('psm')}"


@cache
def package_digest() -> str:
    """Hash of the package's Python files: equal for a checkout and what was installed from it, unequal for changes."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()

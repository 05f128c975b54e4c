"""Prints the lowest version of each required dependency that pyproject.toml allows, as a requirements file."""

import re
import tomllib
from pathlib import Path


def lowest_requirements(pyproject: str) -> list[str]:
    """`name==version` for each dependency `name>=version`."""
    requirements = tomllib.loads(pyproject)["project"]["dependencies"]
    return [re.sub(r"^([\w.-]+)(\[[^]]*\])?>=([\w.]+).*$", r"\1\2==\3", requirement) for requirement in requirements]


if __name__ == "__main__":
    print("\n".join(lowest_requirements((Path(__file__).parents[1] / "pyproject.toml").read_text())))

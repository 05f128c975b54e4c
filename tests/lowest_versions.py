"""Prints the lowest version of each dependency that pyproject.toml allows, as a requirements file.

Required ones, and the libraries of encoders that weights are exchanged with. Arguments such as torch==2.13.0 stand in
for a lowest version that cannot be installed.
"""

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

EXTRAS = ("torchvision", "timm")


def lowest_requirements(pyproject: str, instead: Sequence[str] = ()) -> list[str]:
    """`name==version` for each dependency `name>=version`, or what is given instead for that name."""
    project = tomllib.loads(pyproject)["project"]
    requirements = project["dependencies"] + [one for name in EXTRAS for one in project["optional-dependencies"][name]]
    lowest = [re.sub(r"^([\w.-]+)(\[[^]]*\])?>=([\w.]+).*$", r"\1\2==\3", requirement) for requirement in requirements]
    given = {requirement.partition("==")[0]: requirement for requirement in instead}
    return [given.get(requirement.partition("==")[0], requirement) for requirement in lowest]


if __name__ == "__main__":
    print("\n".join(lowest_requirements((Path(__file__).parents[1] / "pyproject.toml").read_text(), sys.argv[1:])))

"""The documentation: links lead somewhere, every page is in the site's menu, and commands have keys that exist."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from psm.cli.main import COMMANDS
from psm.config import merge as settings
from psm.config.schema import PretrainConfig

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"])
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")
GENERATED = {"cli.md"}  # by docs/site_hooks.py


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), flags=re.M)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists() or found.name in GENERATED, target
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), target


def test_every_page_is_in_the_menu() -> None:
    listed = re.findall(r"([\w/-]+\.md)", yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert set(listed) == pages | GENERATED


def test_everything_exported_is_in_the_reference() -> None:
    import psm

    text = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in psm.__all__ if not name.startswith("_") and f".{name}\n" not in text]
    assert not missing


def commands(page: Path) -> list[str]:
    """The lines of a page's code that call psm."""
    lines = []
    for line in page.read_text().replace("\\\n", " ").splitlines():
        found = re.match(r"^\s*(?:\$ |srun |torchrun .*-m )?(psm [a-z].*)$", line)
        if found and line.startswith(("    ", "$ psm", "srun psm", "torchrun ")):
            lines.append(found[1].partition("  #")[0].partition(" # ")[0].strip())
    return lines


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=relative)
def test_commands_have_keys_that_exist(page: Path) -> None:
    for line in commands(page):
        try:
            words = shlex.split(line)
        except ValueError:
            continue  # a table or a sentence
        name, *rest = words[1:]
        assert name in COMMANDS, line
        schema = import_module(f"psm.cli.{name}").Config
        given = [word for word in rest if re.match(r"^[a-z_.0-9]+=", word) and not word.startswith("config=")]
        known = {row.key for row in settings.rows(schema)}
        own = [
            word for word in given if name != "experiment" or re.split(r"[.=]", word)[0] in known | {"knn", "linear"}
        ]
        settings.parse(own, schema)
        passed_on = [word for word in given if word not in own]
        settings.parse(passed_on, PretrainConfig)

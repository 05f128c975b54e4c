"""The documentation: links lead somewhere, and every page and everything exported has its place in the site.

That its code runs is tested in tests/documentation.
"""

import re
from pathlib import Path

import pytest
import yaml

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


def test_every_page_is_in_the_menu_once() -> None:
    listed = re.findall(r"([\w/-]+\.md)", yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert sorted(listed) == sorted(pages | GENERATED)


def test_everything_exported_is_in_the_reference() -> None:
    import psm

    text = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in psm.__all__ if not name.startswith("_") and f".{name}\n" not in text]
    assert not missing

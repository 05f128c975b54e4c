"""Every command and every Python block of README and docs runs, at a small scale, in the order of its page."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from documentation import running, world
from documentation.blocks import PAGES, ROOT, Code, page_code
from documentation.not_run import NOT_RUN, REFUSED
from documentation.preludes import PRELUDES, plain
from helpers import FORKS
from psm.cli.main import COMMANDS
from psm.config import merge as settings
from psm.config.schema import PretrainConfig

CODE = {str(page.relative_to(ROOT)): page_code(page) for page in PAGES}
ALL = [code for codes in CODE.values() for code in codes]


def is_entry(entry: tuple[str, str, str], code: Code) -> bool:
    page, start, _ = entry
    return page in ("", code.page) and code.text.startswith(start)


AS_PLUGIN = "docs/extend.md"  # its Python is the plugin that its commands name, and registers its parts there


def to_run(page: str) -> list[Code]:
    kinds = ("command",) if page == AS_PLUGIN else ("command", "python")
    return [code for code in CODE[page] if code.kind in kinds and not any(is_entry(entry, code) for entry in NOT_RUN)]


def test_every_block_runs_or_is_listed_with_a_reason() -> None:
    for code in ALL:
        assert code.kind != "unknown", f"{code.place}: fence it as ```text if it is neither commands nor Python"
        if code.kind == "text" or any(is_entry(entry, code) for entry in NOT_RUN):
            continue
        known = code.kind == "python" or code.text.split()[0] in running.PROGRAMS
        assert known, f"{code.place} is neither run nor in NOT_RUN: {code.text}"


@pytest.mark.parametrize("entry", NOT_RUN, ids=lambda entry: f"{entry[0]} {entry[1]}".strip())
def test_what_is_listed_is_there(entry: tuple[str, str, str]) -> None:
    assert any(is_entry(entry, code) for code in ALL)
    assert entry[2]


def test_what_is_said_to_be_refused_is_there() -> None:
    assert set(REFUSED) <= {(code.page, code.text) for code in ALL}


@pytest.mark.parametrize(
    "code", [code for code in ALL if re.search(r"\bpsm [a-z]", code.text)], ids=lambda code: code.place
)
def test_commands_have_keys_that_exist(code: Code) -> None:
    """Those that do not run, too."""
    if code.kind not in ("command", "script"):
        return
    for line in re.findall(r"^(?:srun |torchrun .*-m )?(psm [a-z].*)$", code.text, flags=re.M):
        name, *rest = shlex.split(line)[1:]
        assert name in COMMANDS, line
        schema = import_module(f"psm.cli.{name}").Config
        given = [word for word in rest if re.match(r"^[a-z_.0-9]+=", word) and not word.startswith("config=")]
        known = {row.key for row in settings.rows(schema)} | {"slurm", "knn", "linear"}
        own = [word for word in given if name != "experiment" or re.split(r"[.=]", word)[0] in known]
        settings.parse(own, schema)
        settings.parse([word for word in given if word not in own], PretrainConfig)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world, made once; its runs are trained in a process of their own."""
    root = tmp_path_factory.mktemp("world")
    in_process(world.make_world, root)
    in_process(world.train_runs, root / "work")
    return root


def in_process(function: object, *arguments: object) -> int | None:
    process = FORKS.Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


FAST = ("README.md", "docs/guides/own-loop.md")
SLOW = [page for page in CODE if to_run(page) and page not in FAST]


@pytest.mark.parametrize("page", [*FAST, *(pytest.param(page, marks=pytest.mark.slow) for page in SLOW)])
def test_page(page: str, base: Path, tmp_path: Path) -> None:
    root = world.copy_world(base, tmp_path / "world")
    report = tmp_path / "report.txt"
    code = in_process(running.run_page, to_run(page), root, PRELUDES.get(page, plain), report)
    assert code == 0, report.read_text()[-6000:]

"""The names that `psm` exports: complete, importable, and free until they are used."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import psm


@pytest.mark.parametrize("name", psm.__all__)
def test_every_public_name_is_defined_where_it_is_said_to_be(name: str) -> None:
    value = getattr(psm, name)
    assert name == "__version__" or value.__name__ == name


def test_names_are_listed_and_others_are_refused() -> None:
    assert dir(psm) == sorted(psm.__all__)
    assert set(psm._MODULES) == {*psm.__all__} - {"__version__"}
    assert psm.__version__ == version("psm")
    with pytest.raises(AttributeError, match="no attribute 'pretrian'"):
        _ = psm.pretrian


def test_importing_psm_imports_nothing_heavy() -> None:
    code = "import sys, psm; dir(psm); print([m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'rich')])"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"

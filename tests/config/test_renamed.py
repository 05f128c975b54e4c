"""Keys of version 0.1 are taken under their present names, with a warning."""

import pytest

from psm.config.keys import rows
from psm.config.merge import build, parse
from psm.config.renamed import RENAMED
from psm.config.schema import METHOD_GROUPS, PretrainConfig
from psm.utils.deprecation import RenamedWarning
from psm.utils.errors import UserError


def test_every_present_name_is_a_key() -> None:
    known = {row.key for row in rows(PretrainConfig)}
    for old, new in RENAMED.items():
        assert new in known or new.partition(".")[0] in METHOD_GROUPS, new
        assert old not in known


def test_former_keys_are_read_from_arguments_and_mappings() -> None:
    with pytest.warns(RenamedWarning, match=r"pictures\.limit is now images\.limit; the former name works until"):
        given = build(PretrainConfig, *parse(["out=a", "pictures.limit=7", "heads.hidden=5"], PretrainConfig))
    assert (given.images.limit, given.heads.hidden_dim) == (7, 5)
    with pytest.warns(RenamedWarning, match=r"topology\.momentum is now target\.momentum"):
        stored = build(PretrainConfig, {"out": "a", "topology": {"momentum": 0.5}, "pictures": {"size": 16}})
    assert stored.target["momentum"] == 0.5
    assert stored.images.size == 16


def test_both_names_at_once_are_refused() -> None:
    with pytest.warns(RenamedWarning), pytest.raises(UserError, match=r"images\.limit is given twice"):
        parse(["images.limit=3", "pictures.limit=7"], PretrainConfig)
    with pytest.warns(RenamedWarning), pytest.raises(UserError, match=r"images\.limit is set twice"):
        build(PretrainConfig, {"images": {"limit": 3}, "pictures": {"limit": 7}})

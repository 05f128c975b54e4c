"""Methods as compositions: settings by key, nonsense refused with a reason."""

import pytest

from psm.config.schema import BankConfig, LossConfig, NegativesConfig, PositivesConfig, TopologyConfig
from psm.methods.registry import METHODS, compose
from psm.utils.errors import UserError


def test_rows_are_complete():
    for method in METHODS.values():
        groups = vars(method.composition).values()
        assert all(value is not None for group in groups for value in vars(group).values())
        compose(method.name)


def test_the_paper_s_settings():
    psm = compose("psm")
    assert (psm.positives.k, psm.negatives.a, psm.loss.hard, psm.loss.temperature) == (5, 0.5, 1.0, 0.5)
    assert (psm.topology.momentum, psm.bank.size, psm.bank.own) == (
        0.99,
        16384,
        False,
    )


def test_wishes_go_on_top_of_the_row():
    wished = compose("psm", {"positives": PositivesConfig(k=3), "loss": LossConfig(hard=0.0)})
    assert (wished.positives.k, wished.positives.weighting, wished.loss.hard, wished.loss.soft) == (3, "V0", 0.0, 1.0)
    assert compose("psm").positives.k == 5


def test_unknown_method_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'psm'"):
        compose("pms")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ({"positives": PositivesConfig(weighting="V9")}, "positives.weighting=V9 is unknown"),
        ({"positives": PositivesConfig(rule="x")}, "positives.rule=x is unknown"),
        ({"positives": PositivesConfig(k=-1)}, "positives.k=-1"),
        ({"negatives": NegativesConfig(a=-1.0)}, r"negatives.a=-1\.0"),
        ({"loss": LossConfig(temperature=0.0)}, r"loss.temperature=0\.0"),
        ({"loss": LossConfig(soft=0.0, hard=0.0)}, "leave nothing to learn from"),
        ({"topology": TopologyConfig(momentum=1.5)}, r"topology.momentum=1\.5"),
        ({"bank": BankConfig(size=3)}, "smaller than positives.k=5"),
    ],
)
def test_nonsense_is_refused(override, says):
    with pytest.raises(UserError, match=says):
        compose("psm", override)

"""The table of methods: settings by key, nonsense refused with a reason, rows and parts of one's own."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from psm.config.parts import setting
from psm.methods import KINDS, METHODS, MethodSpec, get_method, list_methods, register_method, register_part
from psm.methods.registry import unregister_method
from psm.methods.spec import neutral_settings
from psm.mining.positives import PositiveRule, Positives, ViewPositives, single
from psm.utils.errors import UserError


def test_every_row_is_complete_and_reads_back() -> None:
    for method in METHODS.values():
        described = method.spec.to_dict()
        assert all(value is not None for group in described.values() for value in group.values())
        assert MethodSpec().override(described) == method.spec
        assert get_method(method.name) == method.spec
    assert len(list_methods()) == 12


def test_the_successor_is_psm_with_some_parts_changed() -> None:
    """The paper's row stays the paper's; every other setting of the successor is that of the paper's row."""
    paper, successor = (get_method(name).to_dict() for name in ("psm", "psmv2"))
    changed = {
        f"{group}.{name}": value
        for group, values in successor.items()
        for name, value in values.items()
        if paper[group].get(name) != value
    }
    assert changed == {
        "positives.share": 0.25,
        "positives.temperature": 0.1,
        "positives.start": 0.5,
        "bank.keys": "mean",
        "loss.weight_sum": 3.0,
        "target.enabled": False,
        "predictor.enabled": False,
        "weighting.name": "hard",
        "weighting.tau": 0.1,
        "weighting.beta": 1.0,
    }
    neutral = neutral_settings()
    flat = {f"{group}.{name}": value for group, values in paper.items() for name, value in values.items()}
    assert {key: flat[key] for key in neutral if key in flat} == {key: neutral[key] for key in neutral if key in flat}


def test_the_paper_s_settings() -> None:
    psm = get_method("psm")
    assert (psm.positives.k, psm.sampler.a, psm.loss.hard_weight, psm.loss.temperature) == (5, 0.5, 1.0, 0.5)
    assert (psm.target.momentum, psm.bank.size, psm.bank.allow_self) == (0.99, 16384, False)


@pytest.mark.parametrize("positives", [{"k": 3}, {"rule": "knn", "k": 3}])
def test_overrides_go_on_top_of_the_row(positives: Any) -> None:
    psm = get_method("psm", positives=positives, loss={"hard_weight": 0.0, "temperature": None})
    assert (psm.positives.k, psm.positives.weights, psm.loss.hard_weight) == (3, "V0", 0.0)
    assert psm.loss.temperature == 0.5
    assert get_method("psm").positives.k == 5


def test_a_part_is_given_by_name_settings_instance_or_path() -> None:
    given = ("view", {"rule": "view"}, ViewPositives(), {"rule": "psm.mining.positives.ViewPositives"})
    for positives in given:
        assert type(get_method("psm", positives=positives).positives) is ViewPositives


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'psm'"):
        get_method("pms")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ({"positives": {"weights": "V9"}}, "positives.weights=V9 is unknown"),
        ({"positives": {"rule": "x"}}, "positives.rule=x is unknown: .* or give plugins="),
        ({"positives": {"rule": "nowhere.X"}}, "positives.rule=nowhere.X cannot be imported"),
        ({"positives": {"rule": "psm.methods.MethodSpec"}}, "is not a subclass of PositiveRule"),
        ({"positives": {"k": -1}}, "positives.k=-1 is too small: give 0 or more"),
        ({"positives": {"k": 2.5}}, r"positives.k=2\.5 is not a whole number"),
        ({"positives": {"k": True}}, "positives.k=true is not a whole number"),
        ({"positives": {"rule": "view", "k": 3}}, "positives.k is no setting of positives.rule=view, .*knn has it"),
        ({"positives": 3}, "neither a name, settings nor a part"),
        ({"sampler": {"a": -1.0}}, r"sampler.a=-1\.0"),
        ({"sampler": {"a": float("nan")}}, "sampler.a=nan is not finite"),
        ({"loss": {"temperature": 0.0}}, r"loss.temperature=0\.0 is too small: give a number above 0"),
        ({"loss": {"temprature": 0.1}}, "did you mean 'temperature'"),
        ({"loss": {"soft_weight": 0.0, "hard_weight": 0.0}}, "leave nothing to learn from"),
        ({"target": {"momentum": 1.5}}, r"target.momentum=1\.5 is too large: give a number from 0 to 1"),
        ({"bank": {"size": 3}}, "smaller than positives.k=5"),
        ({"bank": {"index": "hnsw"}}, "choose one of exact, faiss"),
        ({"bnak": {"size": 3}}, "did you mean 'bank'"),
    ],
)
def test_nonsense_is_refused(override: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        get_method("psm", **override)


def test_a_method_is_checked_before_it_is_added() -> None:
    for parts, says in (
        ({"positives": {"kk": 3}}, "positives.kk is no setting"),
        ({"base": "nothing"}, "method=nothing is unknown"),
        ({"part": {}}, "'part' is no part of a method"),
        ({"negatives": "none"}, "nothing to contrast with"),
    ):
        with pytest.raises(UserError, match=says):
            register_method("mine", "Mine", **parts)
        assert "mine" not in METHODS
    with pytest.raises(UserError, match="built in"):
        register_method("simclr", "Mine")
    with pytest.raises(UserError, match="built in"):
        unregister_method("simclr")


@pytest.fixture
def own() -> Any:
    """Forgets what a test registers."""
    methods, parts = set(METHODS), {kind: set(registry) for kind, registry in KINDS.items()}
    yield
    for name in set(METHODS) - methods:
        unregister_method(name)
    for kind, registry in KINDS.items():
        for name in set(registry) - parts[kind]:
            registry.unregister(name)


def test_a_method_of_one_s_own(own: Any) -> None:
    register_method("mine", "SimCLR with PNSM", base="simclr", sampler="pnsm")
    assert get_method("mine", sampler={"a": 2.0}).sampler.a == 2.0
    with pytest.raises(UserError, match="registered already"):
        register_method("mine", "Another")
    register_method("mine", "Another", replace=True)
    assert METHODS["mine"].title == "Another"


def test_a_part_of_one_s_own(own: Any) -> None:
    @register_part("positives", "shifted")
    @dataclass(frozen=True)
    class Shifted(PositiveRule):
        """The key of the next image."""

        by: int = setting(1, "how far", at_least=1)

        def __call__(self, batch: Any) -> Positives:
            return single(batch.key.roll(self.by, 0), None, mined=False)

    method = get_method("simclr", positives={"rule": "shifted", "by": 2})
    assert method.to_dict()["positives"] == {"rule": "shifted", "by": 2}
    keys = torch.nn.functional.normalize(torch.randn(6, 4), dim=1)
    outputs = [get_method("simclr", positives=p).build_loss()(keys, keys).loss for p in ("view", "shifted")]
    assert outputs[1] > outputs[0]
    with pytest.raises(UserError, match="shifted' is registered by"):
        register_part("positives", "shifted")(Shifted)
    with pytest.raises(UserError, match="positives 'knn' is built in"):
        register_part("positives", "knn")(Shifted)


def test_what_is_no_part_is_not_registered(own: Any) -> None:
    class NoRule:
        pass

    @dataclass(frozen=True)
    class Nothing(PositiveRule):
        pass

    @dataclass(frozen=True)
    class Needy(ViewPositives):
        k: int

    for part, name, says in (
        (NoRule, "x", "must be a subclass of PositiveRule"),
        (Nothing, "x", "cannot be made without arguments: .*abstract"),
        (Needy, "x", "cannot be made without arguments"),
        (ViewPositives, "1 x", "no name for a part"),
    ):
        with pytest.raises(UserError, match=says):
            register_part("positives", name)(part)
        assert name not in KINDS["positives"]
    with pytest.raises(UserError, match="did you mean 'positives'"):
        register_part("positive", "x")

"""Keys: bounds that refuse and explain, names of types, the user's settings and those of a run."""

from dataclasses import dataclass
from typing import Any

import pytest

from psm.config import merge as settings
from psm.config.keys import Bounds, key, type_name
from psm.config.schema import (
    DataConfig,
    EvaluateConfig,
    ExperimentConfig,
    ImagesConfig,
    InspectConfig,
    MethodsConfig,
    PretrainConfig,
    ResolvedPretrainConfig,
)
from psm.config.stored import load_run_config
from psm.config.values import check_values
from psm.utils.errors import UserError

SCHEMAS = (DataConfig, EvaluateConfig, ExperimentConfig, InspectConfig, MethodsConfig, PretrainConfig)


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        (int | str | None, "whole number, text or none"),
        (float | None, "number or none"),
        (list[float] | None, "list of numbers or none"),
        (list[str], "list of text"),
        (dict[str, Any], "keys and values"),
        (bool, "true/false"),
    ],
)
def test_type_names(hint: Any, name: str) -> None:
    assert type_name(hint) == name


@pytest.mark.parametrize(
    ("bounds", "phrase"),
    [
        (Bounds(at_least=1), "1 or more"),
        (Bounds(at_least=0, at_most=1), "from 0 to 1"),
        (Bounds(above=0, below=1), "above 0 and below 1"),
        (Bounds(choices=("a", "b", "c")), "a, b or c"),
        (
            Bounds(above=0, at_most=1, length=2, ascending=True),
            "2 numbers, each above 0 and at most 1, the smaller one first",
        ),
        (Bounds(), ""),
    ],
)
def test_bounds_as_phrases(bounds: Bounds, phrase: str) -> None:
    assert str(bounds) == phrase


@pytest.mark.parametrize(
    ("schema", "override", "says"),
    [
        (PretrainConfig, {"epochs": 0}, "epochs=0 is too small: give 1 or more."),
        (PretrainConfig, {"batch_size": 1}, "batch_size=1 is too small: give 2 or more."),
        (PretrainConfig, {"optim.clip": 0}, "optim.clip=0.0 is too small: give a number above 0, or none."),
        (PretrainConfig, {"optim.warmup": 2}, "optim.warmup=2.0 is too large: give a number from 0 to 1."),
        (PretrainConfig, {"optim.momentum": 1}, "optim.momentum=1.0 is too large: give 0 or more and below 1."),
        (PretrainConfig, {"images.size": 4}, "images.size=4 is too small: give 8 or more, or none."),
        (PretrainConfig, {"images.test_share": 1}, "is too large: give a number above 0 and below 1."),
        (
            PretrainConfig,
            {"images.split": "papr"},
            "is unknown (did you mean 'paper'?): choose one of paper, official.",
        ),
        (PretrainConfig, {"views.crop_scale": [0.5]}, "views.crop_scale=[0.5] has 1 of them: give 2 numbers"),
        (PretrainConfig, {"views.crop_scale": [1, 0.5]}, "views.crop_scale=[1.0,0.5] is not in order: give 2 numbers"),
        (
            PretrainConfig,
            {"views.crop_scale": [0.5, 2]},
            "views.crop_scale=[0.5,2.0] is too large: give 2 numbers, each above 0",
        ),
        (PretrainConfig, {"save.snapshots": 0}, "save.snapshots=0 is too small: give 1 or more, or none."),
        (EvaluateConfig, {"precision": "64"}, "precision=64 is unknown: choose one of 32-true, bf16-mixed, 16-mixed."),
        (EvaluateConfig, {"knn.temperature": 0}, "knn.temperature=0.0 is too small: give a number above 0."),
        (InspectConfig, {"others": 1}, "others=1 is too small: give 2 or more."),
        (ExperimentConfig, {"seeds": []}, "seeds=[] leaves nothing: name some, or leave it out, or none."),
        (ExperimentConfig, {"out": ""}, "out= is empty"),
    ],
)
def test_bounds_refuse(schema: type, override: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        settings.build(schema, override)
    assert says in str(error.value)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_defaults_lie_within_their_bounds(schema: type) -> None:
    check_values(schema())


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_key_has_a_meaning(schema: type) -> None:
    assert all(row.meaning for row in settings.rows(schema))


def test_a_group_is_checked_on_its_own() -> None:
    with pytest.raises(UserError, match=r"images\.memory=0\.0 is too small"):
        check_values(ImagesConfig(memory=0), "images.")


def test_what_a_run_has_is_another_type() -> None:
    user = PretrainConfig(epochs=3)
    with pytest.raises(UserError, match=r"images\.size is missing in the settings of a run"):
        settings.resolved_config(user)
    optim = settings.build(PretrainConfig, {"optim.lr": 0.2, "optim.weight_decay": 0.1}).optim
    resolved = settings.resolved_config(user, images=ImagesConfig(size=32), optim=optim)
    assert isinstance(resolved, ResolvedPretrainConfig)
    assert not isinstance(resolved, PretrainConfig)
    assert (resolved.epochs, resolved.images.size, resolved.optim.weight_decay) == (3, 32, 0.1)


def test_settings_of_a_run_read_back_as_a_users() -> None:
    given = {"images.size": 32, "optim.lr": 0.2, "optim.weight_decay": 0.1, "epochs": 3}
    resolved = settings.resolved_config(settings.build(PretrainConfig, given))
    stored = settings.to_dict(resolved)
    assert load_run_config({"psm": {"config": stored}}) == resolved
    assert settings.build(PretrainConfig, stored) == settings.build(PretrainConfig, given)
    assert settings.build(PretrainConfig, {"epochs": 4}, base=resolved).images.size == 32


@dataclass
class Parts:
    """psm parts: an open group beside a plain key."""

    part: dict[str, Any] = key(dict, "a part by name, with settings of its own", open="name")
    seed: int = key(0, "decides every random draw")


def build(*arguments: str) -> Parts:
    return settings.build(Parts, *settings.parse(arguments, Parts))


def test_open_groups_take_a_name_and_settings_of_any_type() -> None:
    config = build(
        "part=mine.Rule", "part.k=3", "part.soft=true", "part.rates=[0.1,2]", "part.text=no", "part.gone=null"
    )
    assert config.part == {
        **{"name": "mine.Rule", "k": 3, "soft": True},
        **{"rates": [0.1, 2], "text": "no", "gone": None},
    }
    assert build("part.name=knn").part == {"name": "knn"}
    assert settings.build(Parts, {"part": "knn"}).part == {"name": "knn"}
    assert settings.build(Parts, {"part": {"name": "knn", "k": 2}, "part.a": 0.5}).part == {
        "name": "knn",
        "k": 2,
        "a": 0.5,
    }
    assert settings.build(Parts, {"part": None}).part == {}


def test_open_groups_round_trip_through_a_file(tmp_path: Any) -> None:
    config = build("part=knn", "part.k=3", "part.letters='010'", "part.rates=[0.1,2]")
    assert config.part["letters"] == "010"
    file = tmp_path / "a.yaml"
    file.write_text(settings.to_yaml(config))
    assert build(f"config={file}") == config
    file.write_text("part: knn\n")
    assert build(f"config={file}").part == {"name": "knn"}


def test_naming_another_part_drops_the_settings_of_the_former() -> None:
    base = build("part=knn", "part.k=3")
    assert settings.build(Parts, {"part": "nn"}, base=base).part == {"name": "nn"}
    assert settings.build(Parts, {"part.name": "nn", "part.a": 1}, base=base).part == {"name": "nn", "a": 1}
    assert settings.build(Parts, {"part": "knn"}, base=base).part == {"name": "knn", "k": 3}
    assert settings.build(Parts, {"part.k": 4}, base=base).part == {"name": "knn", "k": 4}
    assert base.part == {"name": "knn", "k": 3}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["part="], r"write part=NAME or part\.KEY=VALUE"),
        (["part=[1,2]"], r"write part=NAME or part\.KEY=VALUE"),
        (["part=a", "part.name=b"], r"part\.name is set twice"),
        (["part.k=.nan"], r"part\.k=\.nan is not finite"),
    ],
)
def test_open_groups_refuse(arguments: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        build(*arguments)

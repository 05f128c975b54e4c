"""Words of other libraries are answered with the key that does it, or with why there is none."""

import pytest

from psm.config import merge as settings
from psm.config.field_words import ABSENT, WORDS, advice
from psm.config.finetune import FinetuneConfig
from psm.config.predict import PredictConfig
from psm.config.schema import EvaluateConfig, ExperimentConfig, InspectConfig, PretrainConfig
from psm.methods.registry import get_method
from psm.utils.errors import UserError

METHOD = {key for key, _ in settings.flatten(get_method("psm").to_dict())}
KEYS = METHOD | {
    row.key
    for schema in (PretrainConfig, EvaluateConfig, ExperimentConfig, InspectConfig, FinetuneConfig, PredictConfig)
    for row in settings.rows(schema)
}


@pytest.mark.parametrize("word", WORDS)
def test_every_word_names_keys_that_exist(word: str) -> None:
    assert set(WORDS[word]) <= KEYS
    assert advice(word, KEYS).startswith("write ")


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("lr=0.1", r"'lr' is not a key of `psm pretrain`: write optim\.lr=\.\.\."),
        ("learning_rate=0.1", r"write optim\.lr="),
        ("bs=3", "write batch_size="),
        ("batch=3", "write batch_size="),
        ("wd=0", r"write optim\.weight_decay="),
        ("weight_decay=0", r"write optim\.weight_decay="),
        ("k=3", r"write positives\.k="),
        ("temperature=1", r"write loss\.temperature="),
        ("tau=1", r"write loss\.temperature="),
        ("momentum=0.9", r"write optim\.momentum=\.\.\. or target\.momentum="),
        ("queue_size=3", r"write bank\.size="),
        ("gpus=2", "write devices="),
        ("gpu=0", "write devices="),
        ("device=cuda", "write accelerator=gpu"),
        ("amp=true", "write precision=16-mixed"),
        ("fp16=true", "write precision=16-mixed"),
        ("backbone=resnet50", "write encoder="),
        ("arch=resnet50", "write encoder="),
        ("model=resnet50", "write encoder="),
        ("dataset=cifar10", "write data="),
        ("data_dir=x", "write data="),
        ("output_dir=x", "write out="),
        ("checkpoint=x", "write resume="),
        ("num_workers=4", r"write images\.workers="),
        ("workers=4", r"write images\.workers="),
        ("--epochs=3", "write epochs=3"),
        ("--optim.lr=3", r"write optim\.lr=3"),
        ("--learning-rate=3", r"write optim\.lr=3"),
        ("--num-workers=3", r"write images\.workers="),
        ("--trainer.deterministic=true", r"write trainer\.deterministic=true"),
        ("--zzz", "write for example out="),
    ],
)
def test_answers(argument: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        settings.parse([argument], PretrainConfig)


def test_a_value_that_follows_an_option_is_part_of_the_answer() -> None:
    with pytest.raises(UserError, match=r"'--epochs' is not key=value: write epochs=3\."):
        settings.parse(["--epochs", "3"], PretrainConfig)
    with pytest.raises(UserError, match=r"write epochs=\.\.\."):
        settings.parse(["--epochs", "out=x"], PretrainConfig)


def test_a_command_is_offered_its_own_keys() -> None:
    with pytest.raises(UserError, match=r"write linear\.lr="):
        settings.parse(["lr=1"], EvaluateConfig)
    with pytest.raises(UserError, match="write checkpoint="):
        settings.parse(["ckpt=x"], EvaluateConfig)


def test_no_word_is_both_known_and_absent() -> None:
    assert not WORDS.keys() & ABSENT.keys()

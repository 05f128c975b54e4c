"""Starting a run from weights that there are (``init=``): the settings that it takes over from another run."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from psm.config import merge as settings
from psm.config.schema import METHOD_GROUPS, ImagesConfig, PretrainConfig
from psm.data.location import absolute_data
from psm.models.init_weights import InitialWeights, read_initial_weights
from psm.models.pretrained import CUSTOM
from psm.training.optim import default_weight_decay
from psm.utils.errors import UserError
from psm.utils.run_folder import RunFolder

# Of another run's settings these are about its machine, or name code to run: a user gives them again.
NOT_TAKEN_OVER = (
    *("init", "init_heads", "accelerator", "devices", "num_nodes", "strategy", "ddp", "compile", "compile_mode"),
    *("channels_last", "loggers", "callbacks", "trainer"),
)


def initial_weights(source: str, run: RunFolder, encoder: nn.Module | None, take_over: bool = True) -> InitialWeights:
    """What ``init=`` names.

    Args:
        source: the value of ``init=``.
        run: the folder of the new run.
        encoder: a network given from Python.
        take_over: keep the settings of the run that the weights come from, for ``initial_settings``.
    """
    path = Path(source).expanduser().resolve()
    if run.folder.resolve() in (path, *path.parents):
        raise UserError(f"init={source} lies in out={run.folder}, the run that is to be written: name another out.")
    weights = read_initial_weights(source)
    if weights.info is not None and weights.info.encoder == CUSTOM and encoder is None:
        raise UserError(
            f"init={source} holds a network of its user's own: call psm.pretrain from Python with that network as "
            "encoder=."
        )
    return weights if take_over else replace(weights, settings=None)


def initial_settings(weights: InitialWeights | None, overrides: Iterable[Mapping[str, Any]]) -> PretrainConfig:
    """The settings of a run before the user's: those of the run that its weights come from, or the defaults.

    Weights of a lone file say which network they are, and no more. What depends on a key that the user changes is left
    open: other data have their own images.*, another method its own parts, another optimizer its own learning rate.

    Args:
        weights: what ``init=`` names, or None.
        overrides: the user's keys.
    """
    if weights is None or weights.info is None:
        return PretrainConfig()
    info = weights.info
    stored = {name: value for name, value in (weights.settings or {}).items() if name not in NOT_TAKEN_OVER}
    config = settings.build(PretrainConfig, {"encoder": info.encoder}, stored, {"stem": info.stem})
    known = {row.key: row for row in settings.rows(PretrainConfig)}
    given = {key: value for override in overrides for key, value in settings.flatten(override, known)}

    def changes(key: str) -> bool:
        return key in given and str(given[key]) != str(settings.value_at(config, key))

    other_data = "data" in given and _absolute(given["data"]) != _absolute(config.data)

    optim, size = config.optim, config.images.size
    if changes("optim.name"):
        optim = replace(optim, lr=None, weight_decay=None)
    elif size is not None and optim.weight_decay == default_weight_decay(replace(optim, weight_decay=None), size):
        optim = replace(optim, weight_decay=None)  # the size of the images decided it, and another may decide otherwise
    parts: dict[str, Any] = {group: {} for group in METHOD_GROUPS} if changes("method") else {}
    return replace(
        config,
        optim=optim,
        stem="auto" if changes("encoder") else config.stem,
        images=ImagesConfig() if other_data else config.images,
        **parts,
    )


def _absolute(data: Any) -> str | list[str]:
    """``data=`` as a run stores it."""
    return absolute_data([str(part) for part in data] if isinstance(data, (list, tuple)) else str(data))

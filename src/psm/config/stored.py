"""Reading the configuration that a run was trained with."""

from collections.abc import Mapping
from typing import Any

from psm.config.merge import build, read_yaml, resolved_config
from psm.config.schema import PretrainConfig, ResolvedPretrainConfig
from psm.utils.run_folder import RunFolder


def load_run_config(source: RunFolder | Mapping[str, Any]) -> ResolvedPretrainConfig:
    """The configuration of a run, from its folder's config.yaml or from the contents of one of its checkpoints.

    Keys that did not exist when it was written have their defaults.
    """
    stored = read_yaml(source.config) if isinstance(source, RunFolder) else source["psm"]["config"]
    return resolved_config(build(PretrainConfig, stored))

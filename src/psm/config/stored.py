"""The configuration that a run was trained with: writing it to its folder, and reading it again."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from psm.config.finetune import FinetuneConfig, ResolvedFinetuneConfig
from psm.config.merge import build, read_yaml, resolve_as, resolved_config, to_yaml
from psm.config.schema import PretrainConfig, ResolvedPretrainConfig
from psm.utils.checksums import is_intact, seal_text
from psm.utils.errors import UserError
from psm.utils.files import write_text_atomically
from psm.utils.run_folder import RunFolder

T = TypeVar("T")


def save_run_config(run: RunFolder, config: Any) -> None:
    """Write config.yaml, whose last line is a comment with its checksum."""
    write_text_atomically(run.config, seal_text(to_yaml(config)))


def load_run_config(source: RunFolder | Mapping[str, Any]) -> ResolvedPretrainConfig:
    """The configuration of a run, from its folder's config.yaml or from the contents of one of its checkpoints.

    Keys that did not exist when it was written have their defaults. A config.yaml that differs from its checksum is
    refused.
    """
    if isinstance(source, RunFolder):
        _refuse_damage(source)
    return resolved_config(stored_config(source, PretrainConfig))


def load_finetune_config(source: RunFolder | Mapping[str, Any]) -> ResolvedFinetuneConfig:
    """The configuration of a run of `psm finetune`, as `load_run_config`."""
    if isinstance(source, RunFolder):
        _refuse_damage(source)
    return resolve_as(ResolvedFinetuneConfig, stored_config(source, FinetuneConfig))


def stored_config(source: RunFolder | Mapping[str, Any], schema: type[T]) -> T:
    """The configuration of a run as a user would give it; refused if another command trained the run."""
    stored = _read(source)
    made_by, wanted = ("finetune" if x else "pretrain" for x in (is_finetuning(source), schema is FinetuneConfig))
    if made_by != wanted:
        which = f"{source.folder} is" if isinstance(source, RunFolder) else "this checkpoint is of"
        raise UserError(f"{which} a run of `psm {made_by}`, and one of `psm {wanted}` is needed: name another run.")
    return build(schema, stored)


def is_finetuning(source: RunFolder | Mapping[str, Any]) -> bool:
    """True if a run folder or the contents of a checkpoint comes from `psm finetune`: no other command has that key."""
    return "head_only" in _read(source)


def _read(source: RunFolder | Mapping[str, Any]) -> Mapping[str, Any]:
    return read_yaml(source.config) if isinstance(source, RunFolder) else source["psm"]["config"]


def run_folder_of(file: Path) -> Path:
    """The run folder that a checkpoint or an encoder belongs to, else the folder that it is in."""
    return file.parent.parent if file.parent.name == "checkpoints" else file.parent


def training_config(file: Path) -> ResolvedPretrainConfig | None:
    """The configuration that the encoder in a file was pretrained with, or None where it is unknown."""
    if file.suffix == ".ckpt":
        from psm.utils.checkpoint_file import read_checkpoint  # imports torch

        checkpoint = read_checkpoint(file)
        return None if is_finetuning(checkpoint) else load_run_config(checkpoint)
    run = RunFolder(run_folder_of(file))
    known = run.marker.exists() and run.config.exists() and not is_finetuning(run)
    return load_run_config(run) if known else None


def _refuse_damage(run: RunFolder) -> None:
    with suppress(OSError):  # whoever reads the settings says why they cannot be read
        if not is_intact(run.config.read_bytes().decode(errors="replace")):
            raise UserError(
                f"{run.config} differs from the checksum in its last line: it was damaged or edited. Restore it, or "
                "remove that line if you edited it."
            )

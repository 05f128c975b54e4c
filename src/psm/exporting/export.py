"""Export from a configuration: load an encoder, write it beside its final name, check it, move it into place."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from psm.config import merge as settings
from psm.config.export import ExportConfig
from psm.config.schema import ResolvedPretrainConfig
from psm.config.stored import training_config
from psm.evaluation.features import check_finite_weights
from psm.exporting import builtin as builtin  # fills the table
from psm.exporting.check import Check, check, check_images, refuse_difference
from psm.exporting.formats import FORMATS, Format, find_format
from psm.exporting.huggingface import is_export
from psm.exporting.source import Source
from psm.methods.plugins import load_plugins
from psm.models.classifier import Probabilities, find_classifier, holds_classifier, load_classifier
from psm.models.pretrained import find_encoder, load_encoder
from psm.ops import kernels_disabled
from psm.utils.errors import UserError
from psm.utils.files import move_into_place, temporary_folder
from psm.utils.resources import write_error
from psm.utils.run_folder import RunFolder


@dataclass(frozen=True)
class Exported:
    """A file (or folder) that was written, how it compared with psm's own encoder, and the lines that use it."""

    path: Path
    format: str
    check: Check
    tolerance: float
    checked_in: str  # what loaded it, with its version
    usage: list[str]
    description: dict[str, Any]

    @property
    def megabytes(self) -> float:
        """Size of the file, or of all files of the folder."""
        files = self.path.rglob("*") if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files if file.is_file()) / 1e6

    @property
    def verdict(self) -> str:
        """The result of the check in words."""
        found = self.check
        resized = found.resize_difference
        return (
            f"in {self.checked_in} on {found.images} images: largest difference {found.difference:.1e} of the largest "
            f"{'probability' if 'classes' in self.description else 'feature'} (at most {self.tolerance:g} allowed)"
            + ("" if resized is None else f"; {resized:.1e} on images of other sizes, which it resizes as Pillow does")
        )


def export(
    checkpoint: str | Path,
    format: str | None = None,
    out: str | Path | None = None,
    encoder: nn.Module | None = None,
    **keys: Any,
) -> Exported:
    """Write an encoder in a format that other programs load, and check it by loading it there.

    Args:
        checkpoint: run folder, checkpoint (.ckpt) or encoder (.safetensors).
        format: onnx, torchscript, torch-export, torchvision, timm, safetensors or hf; by default as ``out`` ends.
        out: file to write, for hf a folder; by default in the folder ``export`` of the run.
        encoder: receives the weights where the run was given a module instead of a name.
        keys: the others of `psm export`.

    Returns:
        The file, its largest difference from psm's own features, and the lines of Python that use it.
    """
    given = {**keys, "checkpoint": str(checkpoint)}
    if format is not None:
        given["format"] = format
    if out is not None:
        given["out"] = str(out)
    return run_export(given, encoder=encoder)


def run_export(*overrides: Mapping[str, Any], encoder: nn.Module | None = None) -> Exported:
    """Export by the merged overrides; ``encoder`` receives the weights of a run that was given a module."""
    config = settings.build(ExportConfig, *overrides)
    load_plugins(config.plugins)
    if not config.checkpoint:
        raise UserError("checkpoint= is missing: give a run folder, for example checkpoint=runs/a.")
    entry = find_format(config.format, config.out)
    _check_settings(config, entry)
    _check_packages(entry)
    file, source = _open(config, entry, encoder)
    out = Path(config.out).expanduser() if config.out else _default_out(file, entry)
    _check_out(out, entry, config.overwrite)
    entry.refuse(source)
    usage = entry.usage(source, out.name)
    description = source.description(entry.name, entry.graph, usage)
    images = check_images(source.info, config.data)
    try:
        with kernels_disabled(), temporary_folder(out) as folder:
            written = folder / out.name
            if not entry.suffixes:
                written.mkdir()
            _write(entry, source, written, description)
            result = check(
                entry.load(source, written),
                source.network,
                source.info,
                images,
                preprocess=entry.graph and config.preprocess,
                layout=config.layout,
                unit_length=config.normalize,
            )
            refuse_difference(result, config.tolerance, f"format={entry.name}")
            move_into_place(written, out)
    except OSError as error:
        raise write_error(f"out={out}", error) from None
    return Exported(out, entry.name, result, config.tolerance, _checked_in(entry), usage, description)


def _open(config: ExportConfig, entry: Format, encoder: nn.Module | None) -> tuple[Path, Source]:
    """The file that is exported, and what it holds: a classifier where it has classes and the format a graph."""
    wanted, where = config.output, f"checkpoint={config.checkpoint}"
    classifies = entry.graph and wanted != "features" and Path(config.checkpoint).expanduser().exists()
    if classifies and holds_classifier(config.checkpoint):
        if config.normalize:
            raise UserError(
                "normalize=true is about features, and this graph gives probabilities: give output=features."
            )
        file = find_classifier(config.checkpoint)
        classifier = load_classifier(file, encoder)
        check_finite_weights(classifier, where)
        head = Probabilities(classifier.head, classifier.info.temperature).eval()
        return file, Source(classifier.encoder, config, *_run_of(file), classifier.info, head)
    file = find_encoder(config.checkpoint)
    if wanted == "probabilities":
        raise UserError(f"{where} has no classes to give probabilities of: give a run of `psm finetune`.")
    trained = load_encoder(file, encoder)
    check_finite_weights(trained, where)
    return file, Source(trained, config, *_run_of(file))


def _write(entry: Format, source: Source, path: Path, description: dict[str, Any]) -> None:
    """Write the file; a network whose computation cannot be captured is a user's matter, whatever is raised for it."""
    try:
        entry.write(source, path, description)
    except (UserError, OSError):
        raise
    except Exception as error:
        if not entry.graph:
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"format={entry.name} cannot capture the computation of encoder={source.info.encoder} ({reason}): give "
            "another format, for example safetensors."
        ) from error


def _check_settings(config: ExportConfig, entry: Format) -> None:
    """Refuse keys that the format has no use for."""
    if entry.graph:
        return
    graphs = " or ".join(name for name, other in FORMATS.items() if other.graph)
    classified = config.output == "probabilities"
    needy = (
        ("layout=nhwc", config.layout != "nchw"),
        ("normalize=true", config.normalize),
        ("output=probabilities", classified),
    )
    for key, given in needy:
        if given:
            raise UserError(f"{key} needs a graph, and format={entry.name} holds weights alone: give format={graphs}.")


def _check_packages(entry: Format) -> None:
    missing = [name for name in entry.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"format={entry.name} needs {' and '.join(missing)}: install with `pip install 'psm[{entry.extra}]'`."
        )


def _run_of(file: Path) -> tuple[RunFolder | None, ResolvedPretrainConfig | None]:
    """The run that a file belongs to, and its settings, where they are known."""
    run = RunFolder(file.parent.parent if file.parent.name == "checkpoints" else file.parent)
    is_run = run.marker.exists() and run.config.exists()
    return run if is_run else None, training_config(file)


def _default_out(file: Path, entry: Format) -> Path:
    folder = file.parent.parent if file.parent.name == "checkpoints" else file.parent
    if not entry.suffixes:
        return RunFolder(folder).exports / entry.name
    stem = "encoder" if file.name in ("encoder.safetensors", "last.ckpt") else file.stem
    shared = sum(other.suffixes[:1] == entry.suffixes[:1] for other in FORMATS.values()) > 1
    return RunFolder(folder).exports / f"{stem}{f'-{entry.name}' if shared else ''}{entry.suffixes[0]}"


def _check_out(out: Path, entry: Format, overwrite: bool) -> None:
    if entry.suffixes and out.suffix not in entry.suffixes:
        endings = " or ".join(entry.suffixes)
        raise UserError(f"out={out} does not end as format={entry.name} does: name a file that ends in {endings}.")
    if not out.exists():
        return
    if out.is_dir() != (not entry.suffixes):
        kinds = ("a file", "a folder") if entry.suffixes else ("a folder", "a file")
        raise UserError(f"out={out} is {kinds[1]}, and format={entry.name} writes {kinds[0]}: name another out.")
    if not overwrite:
        raise UserError(f"out={out} exists: give overwrite=true to replace it, or another out.")
    if out.is_dir() and any(out.iterdir()) and not is_export(out):
        raise UserError(f"out={out} is not empty and no export of psm: name another out.")


def _checked_in(entry: Format) -> str:
    package = entry.needs[-1] if entry.needs else "torch" if entry.graph else "psm"
    return f"{package} {version(package)}"

"""The model card of format=hf: README.md with the header that the Hub reads, made from what the run left."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import yaml

from psm.config.schema import ResolvedPretrainConfig
from psm.exporting.formats import Description
from psm.exporting.library_weights import library_name, network_lines
from psm.exporting.lines import imports, input_lines
from psm.exporting.scores import ScoreRow, score_rows
from psm.exporting.source import Source
from psm.methods.registry import METHODS
from psm.models.pretrained import EncoderInfo
from psm.models.published import HUB_WEIGHTS

SETTINGS = "pretraining.yaml"
HUB_DATA = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100", "tiny-imagenet": "zh-plus/tiny-imagenet"}
REPOSITORY = "USER/NAME"  # stands for the repository's name on the Hub


def model_card(source: Source, description: Description, pages: Sequence[str]) -> str:
    """The text of README.md.

    Args:
        source: the encoder and its run.
        description: what the weights' file says of itself.
        pages: names of the HTML pages in the folder.
    """
    rows = score_rows(source)
    sections = [
        _front_matter(source, rows),
        f"# {source.name}\n\n{_summary(source)}",
        f"## Use\n\n{_use(source, description)}",
        f"## Data\n\n{_data(source)}",
        f"## Method\n\n{_method(source)}",
        f"## Scores\n\n{_scores(rows)}",
        f"## Files\n\n{_files(source, pages)}",
        f"## License\n\n{_license(source)}",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(source: Source, rows: Sequence[ScoreRow]) -> str:
    """The YAML header: license, library, tags and, where there are scores, the Hub's model index."""
    header: dict[str, Any] = {
        "license": source.config.license.lower(),
        "library_name": "timm" if _loads_in_timm(source.info) else "psm",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["psm", "self-supervised-learning", "contrastive-learning", "image-feature-extraction"],
    }
    if source.info.data in HUB_DATA:
        header["datasets"] = [HUB_DATA[source.info.data]]
    if rows:
        header["model-index"] = [{"name": source.name, "results": [row.model_index() for row in rows]}]
    return f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---"


def _summary(source: Source) -> str:
    info = source.info
    parameters = sum(p.numel() for p in source.encoder.parameters())
    return (
        f"An image encoder that was pretrained without labels by psm (contrastive learning with mined samples): "
        f"{_encoder(info)}, {parameters / 1e6:.1f} M parameters, images of {info.size} x {info.size} pixels to "
        f"features of {info.width} numbers."
    )


def _encoder(info: EncoderInfo) -> str:
    stems = {"cifar": " with a 3x3 stem and no pooling (CIFAR)", "imagenet": " with a 7x7 stem and pooling (ImageNet)"}
    return f"`{info.encoder}`{stems.get(info.stem, '')}"


def _use(source: Source, description: Description) -> str:
    """Every way to load the folder, each as lines that run in it."""
    info = source.info
    parts = [f'In this folder (`huggingface_hub.snapshot_download("{REPOSITORY}")` gives its path), with psm:']
    parts.append(_code(description["usage"]))
    for library, lines in without_psm(info):
        parts += [f"With {library}, without psm:", _code(lines)]
    parts.append(
        f"Images are prepared as in training: the center square, resized to {info.size} pixels by Lanczos' filter, "
        "scaled to [0, 1], then normalized by the mean and standard deviation of the training images."
    )
    return "\n\n".join(parts)


def without_psm(info: EncoderInfo) -> Iterator[tuple[str, list[str]]]:
    """Libraries that load the folder, each with its lines."""
    end = ["net.eval()", *input_lines(info), f"features = net(images)  # (1, {info.width})"]
    if _loads_in_timm(info):
        hub = f'net = timm.create_model("local-dir:.", pretrained=True)  # or "hf-hub:{REPOSITORY}"'
        yield "timm", [imports("timm", "torch"), hub, *end]
    if library_name(info, "torchvision") is not None:
        load = f'net.load_state_dict(safetensors.torch.load_file("{HUB_WEIGHTS}"), strict=True)'
        first = imports("safetensors.torch", "torch", "torchvision")
        yield "torchvision", [first, *network_lines(info, "torchvision"), load, *end]


def _loads_in_timm(info: EncoderInfo) -> bool:
    """True if timm builds the network from its name alone."""
    return library_name(info, "timm") is not None and info.stem != "cifar"


def _data(source: Source) -> str:
    info, training = source.info, source.training
    lines = [f"- data: `{source.public_info.data}`, no labels used"]
    count = source.training_images
    if count is not None:
        lines.append(f"- training images: {count:,}")
    if training is not None:
        limit = training.images.limit
        held = f"- images held at {training.images.size} x {training.images.size} pixels"
        lines.append(held + (f", at most {limit:,} of them (`images.limit`)" if limit else ""))
    mean, std = (", ".join(f"{x:.4f}" for x in values) for values in (info.mean, info.std))
    lines.append(f"- mean of the channels {mean}; standard deviation {std} (of values in [0, 1])")
    return "\n".join(lines)


def _method(source: Source) -> str:
    info, training = source.info, source.training
    row = METHODS.get(info.method)
    title = f"{row.title} (`{info.method}`)" if row else f"`{info.method}`"
    reference = f", {row.reference}" if row and row.reference else ""
    lines = [f"{title}{reference}, {info.epoch} epochs."]
    init = source.public_info.init
    if init is not None:
        lines += ["", f"Training started from `{init['from']}`{_origin(init)}."]
    if training is not None:
        lines += ["", *_plan(training, source.training_images), "", f"Every setting is in [`{SETTINGS}`]({SETTINGS})."]
    return "\n".join(lines)


def _origin(init: Mapping[str, Any]) -> str:
    """What is known of the weights that training started from."""
    return f" ({init['method']}, {init['epoch']} epochs)" if "method" in init else ""


def _plan(training: ResolvedPretrainConfig, images: int | None) -> list[str]:
    """The plan of the run as a table."""
    optim = training.optim
    steps = f" ({training.epochs * (images // training.batch_size):,} steps)" if images else ""
    rows: Mapping[str, Any] = {
        "epochs": f"{training.epochs}{steps}",
        "batch size": f"{training.batch_size:,}",
        "optimizer": f"{optim.name}, learning rate {optim.lr:g}, weight decay {optim.weight_decay:g}, "
        f"warm-up {optim.warmup:.0%} of the steps, then cosine",
        "heads": f"{training.heads.hidden_dim} hidden, {training.heads.out_dim} out",
        "precision": training.precision,
        "seed": training.seed,
    }
    return ["| plan of the run | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]


def _scores(rows: Sequence[ScoreRow]) -> str:
    if not rows:
        return "None were measured (`psm evaluate` measures them)."
    lines = ["| score | | protocol |", "| --- | --- | --- |"]
    lines += [f"| {row.title} | {row.values} | {row.protocol} |" for row in rows]
    return "\n".join([*lines, "", "Measured by `psm evaluate` on the frozen encoder; in brackets 95 % intervals."])


def _files(source: Source, pages: Sequence[str]) -> str:
    lines = [f"- `{HUB_WEIGHTS}`: the weights", "- `config.json`: name, size, statistics and how to load them"]
    if source.training is not None:
        lines.append(
            f"- `{SETTINGS}`: the settings of the run; `psm pretrain config={SETTINGS} data=... out=...` repeats it"
        )
    about = {"report.html": "curves, scores and what was mined", "inspect.html": "what was mined, query by query"}
    lines += [f"- [`{page}`]({page}): {about.get(page, 'a page of the run')}" for page in pages]
    return "\n".join(lines)


def _license(source: Source) -> str:
    return f"Weights: {source.config.license}. psm, which trained and loads them: MIT."


def _code(lines: Sequence[str]) -> str:
    """A block of Python, its imports apart from the rest."""
    first = list(takewhile(lambda line: line.startswith(("import ", "from ")), lines))
    return "\n".join(["```python", *first, *([""] if first else []), *lines[len(first) :], "```"])

"""Settings of `psm export`."""

from dataclasses import dataclass

from psm.config.keys import key


@dataclass
class ExportConfig:
    """psm export: write an encoder in a format that other programs load, checked by loading it there."""

    plugins: list[str] = key([], "Python files or modules that register formats, [my_formats.py]")
    checkpoint: str = key(
        "", "run folder, checkpoint (.ckpt) or encoder (.safetensors) (needed; may stand alone: psm export runs/a)"
    )
    format: str | None = key(
        None, "onnx, torchscript, torch-export, torchvision, timm, safetensors or hf; none: by the ending of out"
    )
    out: str | None = key(None, "file to write, for hf a folder; none: in the folder export of the run")
    overwrite: bool = key(False, "replace what out names")
    preprocess: bool = key(
        True,
        "onnx, torchscript, torch-export: prepare images in the graph, which takes uint8 of any height and width; "
        "false: the bare encoder, which takes normalized float32 of its own size",
    )
    layout: str = key(
        "nchw",
        "onnx, torchscript, torch-export: order of the input's dimensions (N images, C channels)",
        choices=("nchw", "nhwc"),
    )
    output: str = key(
        "auto",
        "onnx, torchscript, torch-export: what the graph gives: probabilities, of a run of psm finetune, or features; "
        "auto: probabilities where there are classes",
        choices=("auto", "features", "probabilities"),
    )
    normalize: bool = key(False, "onnx, torchscript, torch-export: scale each feature vector to length 1 in the graph")
    opset: int | None = key(None, "onnx: version of the operator set; none: that of the exporter", at_least=18)
    name: str | None = key(None, "what the file calls the model; none: method, encoder and data", filled=True)
    license: str = key("MIT", "license of the weights, by its SPDX name (psm's own code is MIT)", filled=True)
    pages: bool = key(True, "hf: copy the pages of the run, which show some of its training images")
    data: str | None = key(None, "images to check the file with, as in pretrain; none: drawn ones", filled=True)
    tolerance: float = key(
        1e-3, "refuse a file whose features differ from psm's by more than this share of the largest one", above=0
    )

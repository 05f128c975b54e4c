"""`psm export`: each format loads where it will be used, gives psm's features and says how; mistakes are refused."""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open

import psm
from helpers import SMALL, run_python
from psm.data import synthetic_shapes as shapes
from psm.data.decode import center_square
from psm.exporting import formats
from psm.exporting.export import Exported
from psm.exporting.formats import FORMATS, Format, register_format
from psm.exporting.source import Source
from psm.models.classifier import Classifier, ClassifierInfo, save_classifier
from psm.models.encoder import unwrapped
from psm.models.pretrained import EncoderInfo, save_encoder
from psm.utils.errors import UserError
from psm.utils.files import append_line
from psm.utils.run_folder import RunFolder

MEAN, STD = [0.49, 0.48, 0.45], [0.25, 0.24, 0.26]
SAVE = (
    'import numpy; numpy.save("features.npy", features.detach().numpy() if hasattr(features, "detach") else features)'
)


def saved(folder: Path, name: str, stem: str = "auto", size: int = 32) -> Path:
    """An encoder as a run leaves it, with random weights and batch-norm statistics."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    encoder = psm.create_encoder(name, stem, size)
    for module in encoder.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    info = EncoderInfo(name, encoder.stem, encoder.width, size, MEAN, STD, "psm", "cifar10", 3)
    save_encoder(RunFolder(folder), encoder, info)
    return folder


class Small(torch.nn.Module):
    """What graphs are made of: convolution, batch norm, in-place activation, addition, mean. Quickly exported."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, 2, 1)
        self.block = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, 1, 1), torch.nn.BatchNorm2d(8))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu_(self.stem(images))
        return torch.relu_(self.block(x) + x).mean((2, 3))


@pytest.fixture(scope="module")
def small_network(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A run of a network of the user's own, and that network."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    network = Small().eval()
    save_encoder(RunFolder(folder), network, EncoderInfo("custom", "auto", 8, 16, MEAN, STD, "psm", "cifar10", 3))
    return folder, network


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tiny"), "tiny", size=16)


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("resnet"), "resnet18", "cifar", size=16)


def photo(folder: Path) -> Image.Image:
    """A landscape photo.jpg in a folder, as it is decoded again."""
    pixels, _ = shapes.reader("test", 64)(0, 1)
    Image.fromarray(pixels[0].transpose(1, 2, 0)).resize((90, 61)).save(folder / "photo.jpg", quality=95)
    return Image.open(folder / "photo.jpg").convert("RGB")


@torch.no_grad()
def own_features(run: Path, image: Image.Image, network: torch.nn.Module | None = None) -> np.ndarray:
    """By psm's encoder and preparation."""
    encoder = psm.load_encoder(run, network)
    square = torch.from_numpy(np.array(center_square(image, encoder.info.size)).transpose(2, 0, 1))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (encoder.info.mean, encoder.info.std))
    return encoder((square[None] / 255 - mean) / std).numpy()


def run_lines(lines: Sequence[str], folder: Path) -> np.ndarray:
    """The features that some lines compute in a new process, in their folder."""
    run_python("\n".join([*lines, SAVE]), folder)
    return np.load(folder / "features.npy")


def agree(features: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    return features.shape == expected.shape and bool(
        np.abs(features - expected).max() < tolerance * np.abs(expected).max()
    )


def check_description(told: dict[str, Any], result: Exported) -> None:
    """Name, size, statistics, license and the lines that use the file."""
    assert told["name"].startswith("psm-")
    assert told["license"] == "MIT"
    assert told["size"] == 16
    assert (told["mean"], told["std"]) == (MEAN, STD)
    assert told["usage"] == result.usage
    assert "\n".join(told["usage"]).count(result.path.name) or result.format == "hf"


def test_onnx(small_network: Any, tmp_path: Path) -> None:
    """The lines in the file run without torch or psm, on an image of any size, and give psm's features."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    run, network = small_network
    result = psm.export(run, out=tmp_path / "encoder.onnx", encoder=network)
    assert result.format == "onnx"
    assert result.check.difference < 1e-5
    assert result.check.resize_difference < 0.1
    model = onnx.load(result.path)
    onnx.checker.check_model(model)
    told = {entry.key: entry.value for entry in model.metadata_props}
    told |= {name: json.loads(told[name]) for name in ("size", "mean", "std")}
    check_description(told | {"usage": told["usage"].splitlines()}, result)
    assert {node.domain for node in model.graph.node} == {""}, "standard operators only: every runtime has them"
    shape = [dim.dim_param or dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    assert shape == ["batch", 3, "height", "width"]
    image = photo(tmp_path)
    # A process that has not imported torch: a fork of one that has would not tell.
    alone = [*result.usage, SAVE, "import sys", "assert not {'psm', 'torch'} & set(sys.modules)"]
    subprocess.run([sys.executable, "-c", "\n".join(alone)], cwd=tmp_path, check=True)
    assert agree(np.load(tmp_path / "features.npy"), own_features(run, image, network), 0.02)


def archived(path: Path) -> dict[str, Any]:
    """The description in a file that is an archive."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("extra/psm.json"))
        return json.loads(archive.read(name))


@pytest.mark.parametrize("keys", [{}, {"layout": "nhwc", "normalize": True}, {"preprocess": False}], ids=str)
def test_torchscript(tiny: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    result = psm.export(tiny, "torchscript", tmp_path / "encoder.pt", **keys)
    assert result.check.difference < 1e-5
    assert (result.check.resize_difference is None) == (keys.get("preprocess") is False)
    extra = {"psm.json": ""}
    module = torch.jit.load(result.path, _extra_files=extra)
    check_description(json.loads(extra["psm.json"]), result)
    image = photo(tmp_path)
    expected = own_features(tiny, image)
    features = run_lines(result.usage, tmp_path)
    if keys.get("normalize"):
        assert np.allclose(np.linalg.norm(features, axis=1), 1, atol=1e-6)
        expected = expected / np.linalg.norm(expected)
    assert agree(features, expected, 0.02)
    for count in (1, 5):
        shape = (count, 3, 16, 16)
        images = torch.zeros(shape) if keys.get("preprocess") is False else torch.zeros(shape, dtype=torch.uint8)
        assert module(images.permute(0, 2, 3, 1) if "layout" in keys else images).shape == (count, 256)


def test_torch_export(small_network: Any, tmp_path: Path) -> None:
    run, network = small_network
    result = psm.export(run, "torch-export", tmp_path / "encoder.pt2", encoder=network)
    assert result.check.difference < 1e-5
    extra = {"psm.json": ""}
    torch.export.load(result.path, extra_files=extra)
    check_description(json.loads(extra["psm.json"]), result)
    image = photo(tmp_path)
    assert agree(run_lines(result.usage, tmp_path), own_features(run, image, network), 0.02)


def test_a_classifier_gives_the_probabilities_of_its_classes(tmp_path: Path) -> None:
    run, names = saved(tmp_path / "clf", "tiny", size=16), ["ant", "bee", "cow"]
    encoder = psm.load_encoder(run)
    classifier = Classifier(encoder, torch.nn.Linear(256, 3)).eval()
    classifier.info = ClassifierInfo(encoder.info, names, temperature=0.5)
    save_classifier(run / "classifier.safetensors", classifier, classifier.info)
    result = psm.export(run, "torchscript")
    assert result.path == run / "export/classifier.pt"
    assert result.check.difference < 1e-4
    assert "of the largest probability" in result.verdict
    told = archived(result.path)
    assert (told["classes"], told["temperature"], told["output"]) == (names, 0.5, "probabilities (N, 3)")
    image = photo(run / "export")
    given = run_lines([*result.usage, "features = probabilities"], run / "export")
    with torch.no_grad():
        expected = classifier.probabilities(encoder.preprocess([image])).numpy()
    assert agree(given, expected, 0.1)
    assert given.sum() == pytest.approx(1, abs=1e-5)
    assert psm.export(run, "torchscript", output="features").path == run / "export/encoder.pt"
    with pytest.raises(UserError, match="give output=features"):
        psm.export(run, "torchscript", normalize=True)
    (run / "classifier.safetensors").unlink()
    with pytest.raises(UserError, match="has no classes"):
        psm.export(run, "torchscript", output="probabilities")


@pytest.mark.parametrize(("library", "suffix"), [("torchvision", "pth"), ("timm", "safetensors")])
def test_weights_load_in_the_library_with_strict(resnet: Path, tmp_path: Path, library: str, suffix: str) -> None:
    """By the lines that the file carries, which say strict=True and need no psm."""
    pytest.importorskip(library)
    result = psm.export(resnet, library, tmp_path / f"weights.{suffix}")
    assert "strict=True" in "\n".join(result.usage)
    if suffix == "pth":
        told = archived(result.path)
        assert set(torch.load(result.path, weights_only=True)) == set(psm.load_encoder(resnet).state_dict())
    else:
        with safe_open(result.path, "pt") as file:
            told = json.loads(file.metadata()["psm"])
    check_description(told, result)
    image = photo(tmp_path)
    assert "psm" not in result.usage[0]
    assert agree(run_lines(result.usage, tmp_path), own_features(resnet, image), 1e-5)


def test_safetensors_from_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    result = psm.export(tiny, "safetensors")
    assert result.path == tiny / "export" / "encoder.safetensors"
    with safe_open(result.path, "pt") as file:
        check_description(json.loads(file.metadata()["psm"]), result)
    again, before = psm.load_encoder(result.path), psm.load_encoder(tiny)
    assert again.info == before.info
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in again.state_dict().items())


def test_hugging_face_folder(resnet: Path, tmp_path: Path) -> None:
    """Weights, configuration and a card whose header the Hub reads and whose blocks of code run in the folder."""
    folder = psm.export(resnet, "hf", tmp_path / "hf").path
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    text = (folder / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert header["license"] == "mit"
    assert header["datasets"] == ["uoft-cs/cifar10"]
    assert header["pipeline_tag"] == "image-feature-extraction"
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_features"], config["pretrained_cfg"]["mean"], config["psm"]["stem"]) == (512, MEAN, "cifar")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 2, "with psm, and without it by torchvision"
    image = photo(folder)
    for block in blocks:
        assert agree(run_lines(block.splitlines(), folder), own_features(resnet, image), 1e-5)


def test_timm_creates_the_model_from_the_folder(tmp_path: Path) -> None:
    """`timm.create_model("hf-hub:...")` builds it from config.json; a local folder stands for the Hub."""
    timm = pytest.importorskip("timm")
    run = saved(tmp_path / "a", "resnet18", "imagenet", 32)
    folder = psm.export(run, "hf", tmp_path / "hf").path
    text = (folder / "README.md").read_text()
    assert 'timm.create_model("local-dir:.", pretrained=True)' in text
    assert "library_name: timm" in text
    network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert network.num_classes == 0
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(network(images), psm.load_encoder(run)(images))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run with scores and a page."""
    settings: dict[str, Any] = SMALL | {"epochs": 1, "monitor": {"knn": False}}
    out = psm.pretrain(tmp_path_factory.mktemp("runs") / "a", **settings).out
    protocol = {"data": "shapes", "train_images": 100, "test_images": 40, "k": 20, "temperature": 0.1, "epoch": 1}
    for score in ({"of": "raw pixels", "top1": 11.0}, {"of": "psm", "top1": 31.0}, {"of": "psm", "top1": 32.5}):
        score |= {"top1_interval": [18.04, 49.13]}
        append_line(out / "scores.jsonl", {"score": "knn", "top5": 80.0, "protocol": protocol, **score})
    (out / "report.html").write_text("<p>a page</p>")
    return out


def test_the_model_card_is_made_from_the_run(run: Path, tmp_path: Path) -> None:
    folder = psm.export(run, "hf", tmp_path / "hf", name="my encoder", license="CC-BY-4.0").path
    text = (folder / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert header["license"] == "cc-by-4.0"
    (metric, _) = header["model-index"][0]["results"][0]["metrics"]
    assert (metric["name"], metric["value"]) == ("kNN top-1", 32.5), "the newest score of the encoder"
    assert (
        "| kNN | top-1 32.5 % (18.0 to 49.1), top-5 80.0 % (65.2 to 89.5) | k = 20, T = 0.1; shapes (100 train" in text
    )
    assert "# my-encoder" in text
    assert "training images: 100" in text
    assert "| epochs | 1 (3 steps) |" in text
    assert (folder / "report.html").read_text() == "<p>a page</p>"
    assert "[`report.html`](report.html)" in text
    stored = yaml.safe_load((folder / "pretraining.yaml").read_text())
    assert stored["positives"]["k"] == 5
    assert "accelerator" not in stored
    assert not {"report.html"} & {
        path.name for path in psm.export(run, "hf", tmp_path / "b", pages=False).path.iterdir()
    }


def test_the_card_says_what_training_started_from(run: Path, tmp_path: Path) -> None:
    """By its name: where it lay means nothing elsewhere, in any of the files."""
    out = psm.pretrain(tmp_path / "b", init=str(run), monitor={"knn": False}, progress=False).out
    folder = psm.export(out, "hf", tmp_path / "hf").path
    assert "Training started from `a` (psm, 1 epochs)." in (folder / "README.md").read_text()
    assert str(run.parent) not in "".join(
        path.read_text() for path in folder.iterdir() if path.suffix != ".safetensors"
    )
    assert psm.load_encoder(folder).info.init["from"] == "a"


def test_the_hub_reads_the_card(run: Path, tmp_path: Path) -> None:
    """By the Hub's own package: the header's scores become evaluation results."""
    hub = pytest.importorskip("huggingface_hub")
    folder = psm.export(run, "hf", tmp_path / "hf").path
    card = hub.ModelCard.load(folder / "README.md")
    assert card.data.license == "mit"
    assert card.data.eval_results[0].metric_value == 32.5


REFUSALS: dict[str, Any] = {
    "format= is missing": {},
    r"format=onxn is unknown \(did you mean 'onnx'\?\)": {"format": "onxn"},
    "does not tell": {"out": "x.pth"},
    r"must end|ends in \.onnx": {"format": "onnx", "out": "x.pt"},
    "encoder=tiny, which torchvision does not have: give format=onnx": {"format": "torchvision"},
    "encoder=tiny, which timm does not have": {"format": "timm"},
    "normalize=true needs a graph": {"format": "hf", "normalize": True},
    "layout=nhwc needs a graph": {"format": "safetensors", "layout": "nhwc"},
}


@pytest.mark.parametrize("says", REFUSALS)
def test_wrong_input_is_refused(tiny: Path, tmp_path: Path, says: str) -> None:
    keys = dict(REFUSALS[says])
    if "out" in keys:
        keys["out"] = tmp_path / "new" / keys["out"]
    with pytest.raises(UserError, match=says):
        psm.export(tiny, **keys)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_replaced_only_if_asked(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "encoder.pt"
    out.write_text("mine")
    with pytest.raises(UserError, match="overwrite=true"):
        psm.export(tiny, "torchscript", out)
    assert out.read_text() == "mine"
    psm.export(tiny, "torchscript", out, overwrite=True)
    torch.jit.load(out)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine").touch()
    with pytest.raises(UserError, match="no export of psm"):
        psm.export(tiny, "hf", folder, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["mine"]
    psm.export(tiny, "hf", tmp_path / "hf")
    (tmp_path / "hf" / "stale").touch()
    psm.export(tiny, "hf", tmp_path / "hf", overwrite=True)
    assert not (tmp_path / "hf" / "stale").exists()
    assert not list(tmp_path.glob(".writing-*"))


@pytest.fixture
def temporary_formats() -> Any:
    before = dict(FORMATS)
    yield
    FORMATS.clear()
    FORMATS.update(before)


def other_weights(source: Source, path: Path, description: Any) -> None:
    path.write_text("other")


def doubled(source: Source, path: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda images: 1.01 * source.encoder(images)


def test_a_file_with_other_features_is_not_left_behind(tiny: Path, tmp_path: Path, temporary_formats: None) -> None:
    """And a format of a user's own is a row of the table."""
    register_format(Format("mine", (".mine",), other_weights, doubled, lambda source, file: [f"load {file}"]))
    out = tmp_path / "new" / "encoder.mine"
    with pytest.raises(UserError, match=r"other features than psm: .* 0\.01 of the largest feature"):
        psm.export(tiny, "mine", out)
    assert list(tmp_path.iterdir()) == []
    result = psm.export(tiny, out=out, tolerance=0.02)
    assert result.usage == ["load encoder.mine"]
    assert out.read_text() == "other"


def test_a_missing_package_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Format("x", (".x",), other_weights, doubled, lambda source, file: [], needs=("no_such_module",), extra="x")
    monkeypatch.setitem(formats.FORMATS, "x", entry)
    with pytest.raises(UserError, match=r"format=x needs no_such_module: install with `pip install 'psm\[x\]'`"):
        psm.export(tiny, "x")


def test_a_network_of_the_users_own(tmp_path: Path) -> None:
    def own() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.ReLU())

    out = psm.pretrain(tmp_path / "a", encoder=own(), **{k: v for k, v in SMALL.items() if k != "encoder"}).out
    with pytest.raises(UserError, match="network of its user's own"):
        psm.export(out, "torchscript")
    result = psm.export(out, "torchscript", encoder=own())
    assert torch.jit.load(result.path)(torch.zeros(2, 3, 20, 30, dtype=torch.uint8)).shape == (2, 5)
    assert unwrapped(psm.load_encoder(out, own())) is not None


class Branching(torch.nn.Module):
    """Does another thing for images that are all zero: no graph has that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.linear(images.mean((2, 3)))
        return features if bool(images.abs().mean() > 0) else -features


@pytest.mark.parametrize(
    ("format_name", "says"), [("torch-export", "cannot capture the computation"), ("torchscript", "other features")]
)
def test_a_computation_that_is_no_graph_is_refused(tmp_path: Path, format_name: str, says: str) -> None:
    """torch.export notices; a trace has one branch, and gives other features."""
    save_encoder(RunFolder(tmp_path), Branching(), EncoderInfo("custom", "auto", 4, 16, MEAN, STD, "psm", "x", 1))
    with pytest.raises(UserError, match=says):
        psm.export(tmp_path, format_name, encoder=Branching())
    assert not (tmp_path / "export").exists()


def test_checked_with_the_images_given(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    photo(tmp_path / "images")
    (tmp_path / "images" / "broken.jpg").write_text("no image")
    result = psm.export(tiny, "torchscript", tmp_path / "a.pt", data=str(tmp_path / "images"))
    assert result.check.images == 1
    assert result.check.resize_difference < 0.02
    with pytest.raises(UserError, match="nowhere"):
        psm.export(tiny, "torchscript", tmp_path / "c.pt", data="nowhere")


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    run = saved(tmp_path / "a", "tiny", size=16)
    encoder = psm.load_encoder(run)
    encoder.bn1.bias.data[0] = torch.nan
    save_encoder(RunFolder(run), encoder, encoder.info)
    with pytest.raises(UserError, match=r"NaN or infinite \(bn1.bias\)"):
        psm.export(run, "safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"layout": "nhwc", "normalize": True, "opset": 18}, {"preprocess": False}], ids=str)
@pytest.mark.parametrize("name", ["tiny", "timm/test_vit", "torchvision/mobilenet_v3_small"])
@pytest.mark.parametrize("format_name", ["onnx", "torch-export", "torchscript"])
def test_graphs_of_other_networks(tmp_path: Path, name: str, keys: dict[str, Any], format_name: str) -> None:
    """Every layout, with a transformer and a network with in-place activations; the check within is the test."""
    run = saved(tmp_path / "a", name, size=160 if "vit" in name else 64)
    result = psm.export(run, format_name, **keys)
    image = photo(result.path.parent)
    features = run_lines(result.usage, result.path.parent)
    expected = own_features(run, image)
    if keys.get("normalize"):
        expected = expected / np.linalg.norm(expected)
    assert agree(features, expected, 0.05)

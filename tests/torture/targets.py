"""What is mutated: sound files of each kind that psm reads, and the functions of psm that read them.

`make_inputs` makes the sound files once; each function of TARGETS gives, within the reading process, a function that
draws a mutated file and one that reads it as psm would.
"""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from torture.fuzz import Target
from torture.mutate import mutated, mutated_json, mutated_safetensors, mutated_zip

CANARY = "/tmp/torture-canary"  # no file may make this one
ATTACKS = (
    f"cos\nsystem\n(S'touch {CANARY}'\ntR.".encode(),
    f"cposix\nsystem\n(X{chr(len(CANARY) + 6)}\x00\x00\x00touch {CANARY}tR".encode("latin1"),
    b"cbuiltins\neval\n(S'__import__(\"os\").getpid()'\ntR.",
    b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.",
    b"cnumpy\nload\n(S'/etc/passwd'\ntR.",
    b"ctorch.utils._config_module\nConfigModule\n",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",  # BINUNICODE8 of 8 EB
    b"\x8e\xff\xff\xff\xff\x00\x00\x00\x00",  # BINBYTES8 of 4 GB
    b"T\xff\xff\xff\x7f",  # BINSTRING of 2 GB
    b"q\xff",
    b"r\xff\xff\xff\xff",  # LONG_BINPUT at 4 G
    b"\x8b\xff\xff\xff\x7f",  # LONG4 of 2 GB
)


def make_inputs(folder: Path, root: Path) -> dict[str, Path]:
    """Sound files: a run with a small network of the user's own, and a part of the study that is in the repository."""
    import psm
    from helpers import SMALL

    keys: dict[str, Any] = {**SMALL, "epochs": 1, "bank": {"size": 16}, "monitor": {"knn": False}}
    psm.pretrain(folder / "run", **keys | {"encoder": small_encoder()})
    photos = folder / "photos"
    photos.mkdir()
    for number in range(6):
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (9, 9, 3), np.uint8)).save(
            photos / f"{number}.png"
        )
    psm.embed(folder / "run", photos, folder / "features.safetensors", encoder=small_encoder(), progress=False)
    _cut_study(root / "study", folder / "study")
    return {"folder": folder}


def small_encoder() -> Any:
    """A network of 800 parameters: its checkpoint is read in milliseconds."""
    from torch import nn

    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2))


def _cut_study(source: Path, target: Path) -> None:
    """The plan, results and records of one figure with six runs."""
    from psm.experiments.results import read_csv, write_csv

    target.mkdir()
    plan = [row for row in read_csv(source / "plan.csv") if row["experiment"] == "figure1"][:4]
    runs = {row["run"] for row in plan}
    write_csv(target / "plan.csv", plan)
    for name in ("results", "curves"):
        write_csv(target / f"{name}.csv", [row for row in read_csv(source / f"{name}.csv") if row["run"] in runs][:30])
    for record in sorted((source / "records").glob("*.json")):
        if record.name.partition(".")[0] in runs:
            (target / "records").mkdir(exist_ok=True)
            shutil.copy(record, target / "records")


def images(scratch: Path, inputs: Any) -> Target:
    """Image files of every format and mode, as folders, shards and whole images read them."""
    from psm.data import decode
    from psm.data.image_files import ImageDecoder

    samples = _image_samples()
    square, whole = ImageDecoder(16, False), ImageDecoder(16, True)
    file = scratch / "image"

    def crops(content: bytes) -> None:
        try:
            decode.decode_crops(content, lambda height, width: [(0, 0, height, width), (0, 0, 1, 1)], 8)
        except decode.Unreadable as error:
            _sentence(str(error))

    def side(content: bytes) -> None:
        try:
            decode.shorter_side(content)
        except decode.Unreadable as error:
            _sentence(str(error))

    def read(content: bytes) -> None:
        file.write_bytes(content)
        with decode.quiet_pillow():
            found = [square(file), whole(content)]
            crops(content)
            side(content)
        for result in found:
            if isinstance(result, str):
                _sentence(result)
        if all(isinstance(result, str) for result in found):
            from psm.utils.errors import UserError

            raise UserError(f"{found[0]}.")

    return lambda draw: mutated(draw.choice(samples), draw), read


def _sentence(reason: str) -> None:
    if not reason or "\n" in reason:
        raise AssertionError(f"no reason to print: {reason!r}")


def _image_samples() -> list[bytes]:
    gradient = np.linspace(0, 255, 24 * 20 * 3).reshape(24, 20, 3).astype(np.uint8)
    rgb = Image.fromarray(gradient)
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds: list[tuple[Image.Image, dict[str, Any]]] = [
        (rgb, {"format": "JPEG", "exif": exif.tobytes()}),
        (rgb, {"format": "JPEG", "progressive": True, "quality": 30}),
        (rgb.convert("L"), {"format": "JPEG"}),
        (rgb.convert("CMYK"), {"format": "JPEG"}),
        (rgb, {"format": "PNG"}),
        (rgb.convert("RGBA"), {"format": "PNG"}),
        (rgb.convert("P"), {"format": "PNG", "transparency": 3}),
        (rgb.convert("1"), {"format": "PNG"}),
        (Image.fromarray(gradient[:, :, 0].astype(np.uint16) * 200), {"format": "PNG"}),
        (rgb, {"format": "GIF"}),
        (rgb, {"format": "BMP"}),
        (rgb, {"format": "TIFF"}),
        (rgb, {"format": "TIFF", "compression": "tiff_lzw"}),
        (Image.fromarray(gradient[:, :, 0].astype(np.float32)), {"format": "TIFF"}),
        (rgb, {"format": "WEBP"}),
        (rgb.convert("RGBA"), {"format": "WEBP", "lossless": True}),
    ]
    samples = []
    for image, options in kinds:
        stream = io.BytesIO()
        image.save(stream, **options)
        samples.append(stream.getvalue())
    return samples


def cifar_pickles(scratch: Path, inputs: Any) -> Target:
    """CIFAR-10 and CIFAR-100 in the Python layout: one file of the folder is mutated."""
    folders = [_cifar_folder(scratch, 10, _pickled(2)), _cifar_folder(scratch, 100, _pickled(4))]
    python2 = _cifar_folder(scratch / "python2", 10, _pickled_by_python2)
    return _cifar_target([*folders, python2], ATTACKS)


def cifar_binaries(scratch: Path, inputs: Any) -> Target:
    """The binary layout."""
    return _cifar_target([_cifar_folder(scratch, classes, None) for classes in (10, 100)], ())


def _cifar_target(folders: list[tuple[Path, Any]], tokens: tuple[bytes, ...]) -> Target:
    from psm.config.schema import ImagesConfig
    from psm.data import cifar

    sound = {(root, name): (root / name).read_bytes() for root, layout in folders for name in layout.files}
    config: ImagesConfig = ImagesConfig(memory=1.0)

    def mutate(draw: Random) -> bytes:
        which = draw.randrange(len(folders))
        root, layout = folders[which]
        name = draw.choice((layout.train[0], layout.train[0], layout.test, layout.meta))
        place = layout.files.index(name)
        return bytes([which, place]) + mutated(sound[root, name], draw, tokens)

    def read(content: bytes) -> None:
        root, layout = folders[content[0]]
        name = layout.files[content[1]]
        (root / name).write_bytes(content[2:])
        try:
            cifar.load(root, layout, config, progress=False)
        finally:
            (root / name).write_bytes(sound[root, name])
        if Path(CANARY).exists():
            raise AssertionError("a pickle ran code")

    return mutate, read


def _cifar_folder(scratch: Path, classes: int, write: Callable[[Any], bytes] | None) -> tuple[Path, Any]:
    """A folder of the published layout with five images in each file."""
    from psm.data.cifar import LAYOUTS

    layout = next(x for x in LAYOUTS if x.classes == classes and (x.train[0].endswith(".bin") == (write is None)))
    root = scratch / layout.folder
    root.mkdir(parents=True)
    draw = np.random.default_rng(classes)
    for name in (*layout.train, layout.test):
        data = draw.integers(0, 256, (5, 3072), dtype=np.uint8)
        labels = draw.integers(0, classes, 5).tolist()
        if write is None:
            rows = [bytes([0] * (classes == 100) + [label]) + row.tobytes() for label, row in zip(labels, data)]  # noqa: B905
            (root / name).write_bytes(b"".join(rows))
        else:
            key = b"labels" if classes == 10 else b"fine_labels"
            content = {b"batch_label": b"one", key: labels, b"data": data, b"filenames": [b"a.png"] * 5}
            (root / name).write_bytes(write(content))
    names = [f"class {number}" for number in range(classes)]
    if write is None:
        (root / layout.meta).write_text("\n".join(names) + "\n")
    else:
        of_meta = b"label_names" if classes == 10 else b"fine_label_names"
        (root / layout.meta).write_bytes(pickle.dumps({of_meta: names}, 2))
    return root, layout


def _pickled(protocol: int) -> Callable[[Any], bytes]:
    return lambda content: pickle.dumps(content, protocol)


def _pickled_by_python2(content: dict[bytes, Any]) -> bytes:
    """As the published files are: written by Python 2 with an old numpy, text and pixels as byte strings."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    data = content[b"data"]
    rows, columns = data.shape
    shape = b"K" + bytes([rows]) + b"M" + columns.to_bytes(2, "little") + b"\x86"
    raw = b"T" + data.nbytes.to_bytes(4, "little") + data.tobytes()
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN"
    dtype += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    array += b"(K\x01" + shape + dtype + b"\x89" + raw + b"tb"
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in content[b"labels"]) + b"e"
    return b"\x80\x02}(" + text(b"labels") + labels + text(b"data") + array + b"u."


YAML_TOKENS = (
    *(b"&a ", b"*a", b"<<: *a\n", b"!!python/object/apply:os.system ['id']\n", b"!!binary x", b"---\n", b"? ", b"- "),
    *(b"[" * 60, b"{" * 60, b"0x1f", b"010", b"1" * 5000, b"~", b"'", b'"', b"|\n", b">\n", b"\t", b"%YAML 9.9\n"),
    b"a: &a [1,1]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d]\n",
    "ключ: значение\n".encode(),
)


def yaml_files(scratch: Path, inputs: Any) -> Target:
    """A run's config.yaml as `config=` and as a run's own settings, and the entries of `tuned=`."""
    from psm.config import merge as settings
    from psm.config.schema import EvaluateConfig, PretrainConfig
    from psm.config.stored import load_run_config
    from psm.experiments import tuned
    from psm.training.resolve import check_settings
    from psm.utils.run_folder import RunFolder

    config = (inputs["folder"] / "run" / "config.yaml").read_bytes()
    unsealed = b"".join(line for line in config.splitlines(keepends=True) if not line.startswith(b"#"))
    samples = (config, unsealed, unsealed, tuned.PACKAGED.read_bytes(), b"knn:\n  k: 5\nlinear:\n  epochs: 3\n")
    run = RunFolder(scratch / "run")
    run.folder.mkdir()
    file = scratch / "settings.yaml"

    def mutate(draw: Random) -> bytes:
        which = draw.randrange(len(samples))
        return bytes([which]) + mutated(samples[which], draw, YAML_TOKENS)

    def read(content: bytes) -> None:
        which, content = content[0], content[1:]
        if which < 2:
            run.config.write_bytes(content)
            load_run_config(run)
            return
        file.write_bytes(content)
        if which == 3:
            tuned.read_tuned.__wrapped__(str(file))
            return
        schema = PretrainConfig if which == 2 else EvaluateConfig
        built = settings.build(schema, *settings.parse([f"config={file}"], schema))
        if which == 2:
            check_settings(built)  # type: ignore[arg-type]

    return mutate, read


def checkpoints(scratch: Path, inputs: Any) -> Target:
    """A checkpoint as it is resumed, scored, inspected and started from; half with their checksums made right."""
    from psm.config.stored import load_run_config
    from psm.evaluation.mining_analysis import load_snapshot
    from psm.models.init_weights import fit, read_initial_weights
    from psm.models.pretrained import load_encoder
    from psm.utils.checkpoint_file import read_checkpoint

    sound = (inputs["folder"] / "run" / "checkpoints" / "last.ckpt").read_bytes()
    file, encoder = scratch / "last.ckpt", small_encoder()
    readers: tuple[Callable[[], Any], ...] = (
        lambda: load_run_config(read_checkpoint(file)),
        lambda: load_encoder(file, encoder),
        lambda: load_snapshot(file, encoder),
        lambda: fit(read_initial_weights(file), encoder, 8),
    )

    def mutate(draw: Random) -> bytes:
        which = bytes([draw.randrange(len(readers))])
        if draw.random() < 0.35:
            return which + mutated(sound, draw, ATTACKS)
        return which + mutated_zip(sound, draw, ATTACKS)

    def read(content: bytes) -> None:
        file.write_bytes(content[1:])
        readers[content[0]]()
        if Path(CANARY).exists():
            raise AssertionError("a checkpoint ran code")

    return mutate, read


def safetensors(scratch: Path, inputs: Any) -> Target:
    """An encoder, weights of other libraries and a file of embeddings; most with a header changed on purpose."""
    from safetensors.torch import load_file, save_file

    from psm.embedding.formats import read_table
    from psm.models.init_weights import fit, read_initial_weights
    from psm.models.pretrained import load_encoder

    folder, encoder = inputs["folder"], small_encoder()
    foreign = scratch / "foreign.safetensors"
    save_file(load_file(folder / "run" / "encoder.safetensors"), foreign)
    samples = [
        (folder / "run" / "encoder.safetensors").read_bytes(),
        foreign.read_bytes(),
        (folder / "features.safetensors").read_bytes(),
    ]
    file = scratch / "x.safetensors"
    readers: tuple[Callable[[], Any], ...] = (
        lambda: load_encoder(file, encoder),
        lambda: fit(read_initial_weights(file), encoder, 8),
        lambda: read_table(file),
    )

    def mutate(draw: Random) -> bytes:
        which = draw.randrange(len(samples))
        change = mutated if draw.random() < 0.4 else mutated_safetensors
        return bytes([which]) + change(samples[which], draw, ATTACKS[:2])

    def read(content: bytes) -> None:
        if file.exists():
            file.unlink()  # what was read before may still be mapped
        file.write_bytes(content[1:])
        readers[content[0]]()

    return mutate, read


def plans(scratch: Path, inputs: Any) -> Target:
    """plan.csv, results.csv and the records of a study, some with their checksums left out as by hand."""
    from psm.experiments.aggregate import headline, load_results
    from psm.experiments.results import Study, collect_records, read_record

    source, study = inputs["folder"] / "study", Study(scratch / "study")
    shutil.copytree(source, study.folder)
    tables = {name: (source / f"{name}.csv").read_bytes() for name in ("plan", "results", "curves")}
    bare = {name: _without_checksums(source / f"{name}.csv") for name in tables}
    records = {path.name: path.read_bytes() for path in (source / "records").iterdir()}
    names = ("plan", "plan", "plan", "plan", "results", "curves")

    def mutate(draw: Random) -> bytes:
        if draw.random() < 0.2:
            which = draw.randrange(len(records))
            change = mutated if draw.random() < 0.3 else mutated_json
            content = list(records.values())[which]
            return bytes([200 + which]) + change(content, draw, ())
        which = draw.randrange(len(names))
        sound = (tables if draw.random() < 0.5 else bare)[names[which]]
        return bytes([which]) + mutated(sound, draw, (b",", b"\n", b'"', b"figure2", b"settle", b'""'))

    def read(content: bytes) -> None:
        which, content = content[0], content[1:]
        if which >= 200:
            path = study.folder / "records" / list(records)[which - 200]
            path.write_bytes(content)
            try:
                read_record(path)
                collect_records(study)
            finally:
                path.write_bytes(records[path.name])
                for name, sound in tables.items():
                    study.csv(name).write_bytes(sound)
            return
        path = study.csv(names[which])
        path.write_bytes(content)
        try:
            for result in load_results(study):
                headline(result)
        finally:
            path.write_bytes(tables[names[which]])

    return mutate, read


def _without_checksums(path: Path) -> bytes:
    from psm.experiments.results import read_csv, write_csv

    rows = read_csv(path)
    copy = path.with_suffix(f".{os.getpid()}.bare")
    write_csv(copy, rows, sealed=False)
    content = copy.read_bytes()
    copy.unlink()
    return content


TARGETS = {
    "images": images,
    "cifar-pickles": cifar_pickles,
    "cifar-binaries": cifar_binaries,
    "yaml": yaml_files,
    "checkpoints": checkpoints,
    "safetensors": safetensors,
    "plans": plans,
}

"""Several sources as one data set: folders, lists of paths, labels, splits and names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from psm.config.merge import build, parse, read_yaml, to_yaml
from psm.config.schema import ImagesConfig, PretrainConfig
from psm.data import load_dataset
from psm.utils.errors import UserError


def paint(path: Any, value: Any = 0) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (value, value, value)).save(path)
    return path


def values(images: Any) -> Any:
    return images.take(torch.arange(len(images)))[:, 0, 0, 0].tolist()


def read(*sources: Any, **settings: Any) -> Any:
    given = [str(source) for source in sources]
    return load_dataset(given if len(given) > 1 else given[0], ImagesConfig(size=8, **settings), progress=False)


def labeled_folder(root: Any, classes: Any, start: Any = 0, each: Any = 5) -> Any:
    for place, name in enumerate(classes):
        for number in range(each):
            paint(root / name / f"{number}.png", start + 10 * place + number)
    return root


def pairs(data: Any) -> Any:
    """Value and class of every image of both splits."""
    splits = [split for split in (data.train, data.test) if split is not None]
    return sorted(
        (value, data.classes[label])
        for split in splits
        for value, label in zip(values(split), split.labels.tolist(), strict=True)
    )


def test_folders_are_joined_with_their_names_and_classes(tmp_path: Path) -> None:
    a = labeled_folder(tmp_path / "a", ("cat", "dog"))
    b = labeled_folder(tmp_path / "b", ("dog", "emu"), start=100)
    data = read(a, b)
    assert data.classes == ("cat", "dog", "emu")
    assert data.name == "a+b"
    expected = [(number, "cat") for number in range(5)] + [(10 + number, "dog") for number in range(5)]
    expected += [(100 + number, "dog") for number in range(5)] + [(110 + number, "emu") for number in range(5)]
    assert pairs(data) == expected
    for value, name in zip(values(data.train), data.train.names, strict=True):
        assert name == f"{'a' if value < 100 else 'b'}/{data.classes[label_of(data, name)]}/{value % 10}.png"


def label_of(data: Any, name: Any) -> Any:
    return data.train.labels[list(data.train.names).index(name)]


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for number, parent in enumerate(("x", "y")):
        paint(tmp_path / parent / "images" / "0.png", number)
    names = list(read(tmp_path / "x/images", tmp_path / "y/images").train.names)
    assert names == [f"{tmp_path}/x/images/0.png", f"{tmp_path}/y/images/0.png"]


def test_an_unlabeled_source_makes_all_unlabeled_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a = labeled_folder(tmp_path / "a", ("cat", "dog"))
    paint(tmp_path / "b" / "0.png", 77)
    data = read(a, tmp_path / "b")
    assert (data.classes, data.test, len(data.train)) == ((), None, 11)
    assert "no labels in b" in caplog.text


def test_a_list_of_one_class_has_labels_beside_others_only(tmp_path: Path) -> None:
    labeled_folder(tmp_path / "a", ("cat", "dog"))
    birds = labeled_folder(tmp_path / "b", ("bird",), start=50)
    lists = [csv_list(tmp_path, "".join(f"b/bird/{n}.png,bird\n" for n in range(*r)), f"{r[0]}.csv")
             for r in ((0, 3), (3, 5))]  # fmt: skip
    assert read(tmp_path / "a", lists[0]).classes == ("bird", "cat", "dog")
    assert read(*lists).classes == read(lists[0]).classes == ()
    assert len(read(*lists).train) == len(list(birds.rglob("*.png")))


def test_a_test_split_of_one_source_is_the_test_split_of_all(tmp_path: Path) -> None:
    labeled_folder(tmp_path / "a" / "train", ("cat", "dog"))
    labeled_folder(tmp_path / "a" / "test", ("cat", "dog"), start=50, each=2)
    b = labeled_folder(tmp_path / "b", ("cat", "dog"), start=100)
    data = read(tmp_path / "a", b)
    assert sorted(values(data.test)) == [50, 51, 60, 61]
    assert len(data.train) == 20


@pytest.fixture
def images(tmp_path: Path) -> Any:
    for number in range(6):
        paint(tmp_path / "images" / f"{number}.png", number)
    return tmp_path


def csv_list(root: Any, text: Any, name: Any = "list.csv") -> Any:
    (root / name).write_text(text)
    return root / name


ROWS = [(f"images/{number}.png", "even" if number % 2 == 0 else "odd") for number in range(6)]


def parquet_list(root: Any) -> Any:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"id": list(range(6)), "path": [p for p, _ in ROWS], "label": [c for _, c in ROWS]}),
        root / "manifest.parquet",
    )
    return root / "manifest.parquet"


LABELED = {
    "header": lambda root: csv_list(root, "label,path\n" + "".join(f"{c},{p}\n" for p, c in ROWS)),
    "no header": lambda root: csv_list(root, "".join(f"{p},{c}\n" for p, c in ROWS)),
    "tsv": lambda root: csv_list(root, "file\tclass\n" + "".join(f"{p}\t{c}\n" for p, c in ROWS), "list.tsv"),
    "jsonl": lambda root: csv_list(
        root, "".join(json.dumps({"image": p, "label": c}) + "\n" for p, c in ROWS), "list.jsonl"
    ),
    "parquet": parquet_list,
    "absolute": lambda root: csv_list(root, "".join(f"{root / p},{c}\n" for p, c in ROWS)),
}


@pytest.mark.parametrize("kind", LABELED)
def test_a_list_names_files_and_labels(images: Any, kind: Any) -> None:
    data = read(LABELED[kind](images))
    assert data.classes == ("even", "odd")
    assert pairs(data) == [(number, ROWS[number][1]) for number in range(6)]
    assert read(LABELED[kind](images), labels="none").classes == ()


def test_a_text_list_has_no_labels_and_keeps_its_order(images: Any) -> None:
    data = read(csv_list(images, "images/4.png\n\nimages/1.png\n", "list.txt"))
    assert (values(data.train), data.test, list(data.train.names)) == ([4, 1], None, ["images/4.png", "images/1.png"])


def test_a_split_column_is_followed(images: Any) -> None:
    rows = "".join(f"{path},{name},{'val' if n > 3 else 'train'}\n" for n, (path, name) in enumerate(ROWS))
    data = read(csv_list(images, "path,label,split\n" + rows))
    assert (values(data.train), values(data.test)) == ([0, 1, 2, 3], [4, 5])


def test_numeric_labels_are_ordered_as_numbers(images: Any) -> None:
    rows = "".join(f"images/{number}.png,{2 if number < 3 else 10}\n" for number in range(6))
    assert read(csv_list(images, rows)).classes == ("2", "10")


def test_missing_files_of_a_list_are_unreadable(images: Any) -> None:
    text = "".join(f"images/{number}.png\n" for number in range(6)) + "images/nowhere.png\n"
    data = read(csv_list(images, text, "list.txt"), max_unreadable=0.5)
    assert [file for file, _ in data.unreadable] == ["images/nowhere.png"]
    assert len(data.train) == 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no image"),
        ("path,label\nimages/0.png,a\nimages/1.png,\n", "images/1.png no label"),
        ("path,label,split\nimages/0.png,a,x\nimages/1.png,b,train\n", "split 'x'"),
        ("path,label\n,a\n", "without a path"),
    ],
)
def test_faulty_lists_are_refused_in_a_sentence(images: Any, text: Any, said: Any) -> None:
    with pytest.raises(UserError, match=said):
        read(csv_list(images, text))


def test_sources_that_cannot_be_joined(images: Any) -> None:
    for sources, said in (
        (["cifar10", images / "images"], "stands alone"),
        ([images / "images", images / "images/../images"], "twice"),
        ([images / "images", images / "nothing"], "does not exist"),
        ([images / "images", images / "images/0.png"], "is a file"),
    ):
        with pytest.raises(UserError, match=said):
            read(*sources)
    with pytest.raises(UserError, match="names nothing"):
        load_dataset([], ImagesConfig())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("photos", "photos"),
        ("[a, b,list.csv]", ["a", "b", "list.csv"]),
        ("[s-{000..147}.tar,{a,b}.tar]", ["s-{000..147}.tar", "{a,b}.tar"]),
        ("""['a, b',"c"]""", ["a, b", "c"]),
        ("{a,b}.tar", "{a,b}.tar"),
        ("010", "010"),
    ],
)
def test_data_is_text_or_a_list_from_the_command_line_and_back_from_yaml(
    tmp_path: Path, text: Any, expected: Any
) -> None:
    config = build(PretrainConfig, *parse([f"data={text}"], PretrainConfig))
    assert config.data == expected
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert build(PretrainConfig, read_yaml(tmp_path / "config.yaml")).data == expected

"""What can be loaded by name, and where it is published. Imports nothing heavy."""

from typing import NamedTuple


class Row(NamedTuple):
    """One line of the list that ``psm data`` shows."""

    name: str
    images: int
    classes: int
    size: int
    origin: str
    url: str


class Archive(NamedTuple):
    """A published file: where it is, how it is checked, and the folder that it unpacks to."""

    url: str
    checksum: str
    folder: str

    @property
    def file(self) -> str:
        return self.url.rsplit("/", 1)[-1]


_CIFAR = "https://www.cs.toronto.edu/~kriz"

ARCHIVES = {
    "cifar10": Archive(
        f"{_CIFAR}/cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py"
    ),
    "cifar100": Archive(
        f"{_CIFAR}/cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python"
    ),
    "tiny-imagenet": Archive(
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "md5:90528d7ca1a48142e341f4ef8d21d0de", "tiny-imagenet-200"
    ),
}

_ROWS = [
    Row("shapes", 7_000, 10, 32, "generated here, nothing to download", ""),
    Row("cifar10", 60_000, 10, 32, "University of Toronto; no licence stated", ARCHIVES["cifar10"].url),
    Row("cifar100", 60_000, 100, 32, "University of Toronto; no licence stated", ARCHIVES["cifar100"].url),
    Row(
        "tiny-imagenet",
        110_000,
        200,
        64,
        "Stanford CS231n; ImageNet terms, research only",
        ARCHIVES["tiny-imagenet"].url,
    ),
]

NAMES = tuple(row.name for row in _ROWS)


def published() -> list[Row]:
    """Every set that has a name, in the order in which to show them."""
    return list(_ROWS)

"""The named data sets and where they are published. Imports nothing heavy."""

from typing import NamedTuple


class DatasetInfo(NamedTuple):
    """A row of the list that ``psm data`` shows."""

    name: str
    images: int
    classes: int
    size: int
    origin: str
    url: str


class Archive(NamedTuple):
    """A published archive: its address, its checksum and the folder that it unpacks to."""

    url: str
    checksum: str
    folder: str

    @property
    def file(self) -> str:
        """File name of the archive."""
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

_TORONTO = "University of Toronto; no license stated"
_STANFORD = "Stanford CS231n; ImageNet terms, research only"
_DATASETS = (
    DatasetInfo("shapes", 7_000, 10, 32, "generated here, nothing to download", ""),
    DatasetInfo("cifar10", 60_000, 10, 32, _TORONTO, ARCHIVES["cifar10"].url),
    DatasetInfo("cifar100", 60_000, 100, 32, _TORONTO, ARCHIVES["cifar100"].url),
    DatasetInfo("tiny-imagenet", 110_000, 200, 64, _STANFORD, ARCHIVES["tiny-imagenet"].url),
)

NAMES = tuple(info.name for info in _DATASETS)


def list_datasets() -> list[DatasetInfo]:
    """Every named data set, in the order in which to show them."""
    return list(_DATASETS)

"""Where images are: paths as a run stores them, so that it finds its images from any folder. Imports nothing heavy."""

import re
from dataclasses import replace
from pathlib import Path

from psm.config.schema import ImagesConfig
from psm.data.registry import ARCHIVES, NAMES

_ADDRESS = re.compile(r"\w\w+:")  # hf:NAME, https://...; one letter is a drive


def absolute_data(data: str | list[str]) -> str | list[str]:
    """``data=`` as it is stored: a name as it is, a path absolute. Links stay links: they may be pointed elsewhere."""
    if isinstance(data, list):
        return [str(absolute_data(part)) for part in data]
    return data if data in NAMES or _ADDRESS.match(data) else _absolute(data)


def absolute_images(data: str | list[str], images: ImagesConfig) -> ImagesConfig:
    """``images.*`` as it is stored with a run on this data: the folders that are looked into absolute."""
    return replace(
        images,
        root=_absolute(images.root) if isinstance(data, str) and data in ARCHIVES else images.root,
        cache=_absolute(images.cache) if images.cache else images.cache,
    )


def data_name(data: str | list[str]) -> str:
    """A data set's name on pages: of a path its last part."""
    if isinstance(data, list):
        return " + ".join(data_name(part) for part in data)
    return data if data in NAMES or _ADDRESS.match(data) else Path(data).expanduser().absolute().name or data


def _absolute(path: str) -> str:
    given = Path(path).expanduser()
    return str(given.resolve() if ".." in given.parts else given.absolute())

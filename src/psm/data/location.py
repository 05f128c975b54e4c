"""Where images are: paths as a run stores them, so that it finds its images from any folder. Imports nothing heavy."""

import re
from dataclasses import replace
from pathlib import Path

from psm.config.schema import ImagesConfig
from psm.data.registry import ARCHIVES, NAMES

_ADDRESS = re.compile(r"\w\w+:")  # hf:NAME, https://...; one letter is a drive


def absolute_data(data: str) -> str:
    """``data=`` as it is stored: a name as it is, a path absolute. Links stay links: they may be pointed elsewhere."""
    return data if data in NAMES or _ADDRESS.match(data) else _absolute(data)


def absolute_images(data: str, images: ImagesConfig) -> ImagesConfig:
    """``images.*`` as it is stored with a run on this data: the folders that are looked into absolute."""
    return replace(
        images,
        root=_absolute(images.root) if data in ARCHIVES else images.root,
        cache=_absolute(images.cache) if images.cache else images.cache,
    )


def data_name(data: str) -> str:
    """A data set's name on pages: of a path its last part."""
    return data if data in NAMES or _ADDRESS.match(data) else Path(data).expanduser().absolute().name or data


def _absolute(path: str) -> str:
    given = Path(path).expanduser()
    return str(given.resolve() if ".." in given.parts else given.absolute())

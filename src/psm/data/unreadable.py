"""The sentence for data with too many unreadable images."""

from collections.abc import Sequence

from psm.config.schema import ImagesConfig


def too_many_unreadable(
    unreadable: Sequence[tuple[str, str]], count: int, where: str, config: ImagesConfig, number: int | None = None
) -> str:
    """The sentence that refuses data with more unreadable images than images.max_unreadable allows.

    Args:
        unreadable: files and reasons, of which some are shown.
        count: images in all.
        where: the folder.
        config: has the allowed fraction.
        number: of unreadable images, if that is not the number of files.
    """
    number = len(unreadable) if number is None else number
    first = "; ".join(f"{file} ({reason})" for file, reason in unreadable[:3])
    more = f"; and {len(unreadable) - 3:,} more" if len(unreadable) > 3 else ""
    return (
        f"{number:,} of {count:,} images in {where} cannot be read, more than "
        f"images.max_unreadable={config.max_unreadable:g} allows: {first}{more}. "
        "Remove or replace them, or raise images.max_unreadable."
    )

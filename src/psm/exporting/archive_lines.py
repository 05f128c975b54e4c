"""Lines of Python that open an archive of torch and read the classes in it."""

from psm.exporting.source import DESCRIPTION, Source


def modules(source: Source) -> tuple[str, ...]:
    """What `class_lines` need to be imported."""
    return () if source.classes is None else ("json",)


def opened(load: str, keyword: str, file: str, source: Source, end: str = "") -> list[str]:
    """Lines that load an archive, with its description where it has classes.

    Args:
        load: the function of torch.
        keyword: its argument for files of the archive.
        file: name of the archive.
        source: what it holds.
        end: follows the call.
    """
    if source.classes is None:
        return [f'encoder = {load}("{file}"){end}']
    return [f'files = {{"{DESCRIPTION}": ""}}', f'encoder = {load}("{file}", {keyword}=files){end}']


def class_lines(source: Source) -> list[str]:
    """Lines that print the most probable class; none for an encoder."""
    if source.classes is None:
        return []
    return [
        f'classes = json.loads(files["{DESCRIPTION}"])["classes"]',
        "print(classes[probabilities[0].argmax()])",
    ]

"""Lines of Python that use an exported file, written into the file and shown by the command. Tests run them."""

from collections.abc import Sequence

from psm.models.pretrained import EncoderInfo

PHOTO = "photo.jpg"  # stands for a user's image


def input_lines(info: EncoderInfo, *, preprocess: bool = False, layout: str = "nchw", tensor: bool = True) -> list[str]:
    """Lines that read an image as ``images``, a batch of one.

    Args:
        info: size and statistics that images are prepared with.
        preprocess: whether the file prepares images itself: then uint8 of any size, else float32, prepared as psm does.
        layout: ``nchw`` or ``nhwc``.
        tensor: a torch tensor, else a NumPy array.
    """
    pixels = "image" if preprocess else "(image / 255 - mean) / std"
    turned = "" if layout == "nhwc" else ".transpose(2, 0, 1)"
    grouped = pixels if preprocess or not turned else f"({pixels})"
    array = f"{grouped}{turned}[None]" if turned or preprocess else f"({pixels})[None]"
    batch = f"images = torch.from_numpy({array})" if tensor else f"images = {array}"
    reads = f'PIL.Image.open("{PHOTO}").convert("RGB")'
    if preprocess:
        return [f"image = numpy.array({reads})  # uint8 of any height and width", batch]
    square = f"({info.size}, {info.size})"
    return [
        f"image = PIL.ImageOps.fit({reads}, {square}, PIL.Image.Resampling.LANCZOS)",
        'image = numpy.array(image, dtype="float32")',
        f'mean, std = numpy.array([{numbers(info.mean)}, {numbers(info.std)}], dtype="float32")',
        batch,
    ]


def imports(*modules: str, preprocess: bool = False) -> str:
    """The line that imports what ``input_lines`` need, and more."""
    pillow = ("PIL.Image",) if preprocess else ("PIL.Image", "PIL.ImageOps")
    return f"import {', '.join(sorted({'numpy', *pillow, *modules}, key=str.lower))}"


def numbers(values: Sequence[float]) -> str:
    """A list of numbers as Python source, to 6 digits."""
    return f"[{', '.join(f'{value:.6g}' for value in values)}]"

"""Images as data URLs, for pages that need no other file."""

import base64
import io

from torch import Tensor


def png_url(pixels: Tensor) -> str:
    """An image uint8 (3, H, W) as the data URL of a PNG."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()

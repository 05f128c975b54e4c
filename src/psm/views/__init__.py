"""Views of images: what is drawn for a batch, and what is done with the drawn numbers."""

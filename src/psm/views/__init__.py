"""Views of images: sampled augmentation parameters (``transform``) and the augmentations (``functional``)."""

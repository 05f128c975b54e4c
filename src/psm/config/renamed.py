"""Keys of version 0.1 whose meaning is the same under another name.

Those of open groups (`negatives.a`, ...) are not among them: a plugin's part may have a setting of that name.
"""

from collections.abc import Container

from psm.utils.deprecation import warn_renamed

UNTIL = "0.3"
RENAMED = {
    "join_batch_norm": "sync_batchnorm",
    "chunk_size": "grad_cache_chunk",
    "views.crop": "views.crop_scale",
    "views.ratio": "views.crop_ratio",
    "views.jitter": "views.color_jitter",
    "views.sigma": "views.blur_sigma",
    "views.solarise": "views.solarize",
    "heads.hidden": "heads.hidden_dim",
    "heads.out": "heads.out_dim",
    "bank.own": "bank.allow_self",
    "topology.momentum": "target.momentum",
    "topology.predictor": "predictor.enabled",
    "monitor.pictures": "monitor.images",
    "monitor.test_pictures": "monitor.test_images",
}
RENAMED_GROUPS = {"pictures": "images"}


def current_key(dotted: str, known: Container[str]) -> str:
    """A key by its present name; one of version 0.1 is taken with a warning."""
    group, dot, entry = dotted.partition(".")
    new = RENAMED.get(dotted) or (f"{RENAMED_GROUPS[group]}.{entry}" if dot and group in RENAMED_GROUPS else dotted)
    if new == dotted or not (new in known or new.partition(".")[0] in known):
        return dotted
    warn_renamed(dotted, new, UNTIL, stacklevel=4)
    return new

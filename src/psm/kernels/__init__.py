"""Faster implementations for x86-64 CPUs of what ``psm.ops`` defines in plain PyTorch.

Importing this package registers them; ``psm.ops`` does so when an operation is first used on a CPU. ``disabled()`` and
the environment variable ``PSM_KERNELS=0`` switch all of them off.
"""

from psm import ops
from psm.kernels import crop, malloc, similarity
from psm.kernels.dispatch import optimize
from psm.kernels.runtime import status
from psm.ops import kernels_disabled as disabled

__all__ = ["disabled", "optimize", "status"]

ops.register("topk_similarity", similarity.supports_topk, similarity.topk_similarity)
ops.register("logsumexp_similarity", similarity.supports_logsumexp, similarity.logsumexp_similarity)
ops.register("crop_color", crop.supports, crop.crop_color)
ops.register("keep_freed_memory", malloc.supports, malloc.keep_freed_memory)

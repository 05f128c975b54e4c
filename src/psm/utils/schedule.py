"""The learning rate as a pure function of the step."""

import math


def learning_rate(step: int, steps: int, warmup: int, peak: float, start: float) -> float:
    """Linear from ``start`` to ``peak`` over the warm-up, then a cosine that reaches zero at ``steps``."""
    if step < warmup:
        return start + (peak - start) * step / warmup
    return 0.5 * peak * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

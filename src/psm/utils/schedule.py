"""Learning-rate schedule."""

import math


def learning_rate(step: int, steps: int, warmup: int, peak: float, start: float) -> float:
    """Linear warm-up followed by cosine decay to zero.

    Args:
        step: the current step, from 0.
        steps: of the whole run; the rate is zero there.
        warmup: steps of the warm-up.
        peak: rate at the end of the warm-up.
        start: rate at step 0.
    """
    if step < warmup:
        return start + (peak - start) * step / warmup
    return 0.5 * peak * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

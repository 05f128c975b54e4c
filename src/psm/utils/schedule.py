"""Schedules: pure functions of the step."""

import math

MOMENTUM_SCHEDULES = ("constant", "cosine")


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


def target_momentum(step: int, steps: int, momentum: float, schedule: str = "constant") -> float:
    """Momentum of the target network (EMA) at a step.

    Args:
        step: the current step, from 0.
        steps: of the whole run; a cosine reaches 1 there.
        momentum: at step 0.
        schedule: constant, or cosine (BYOL): 1 - (1 - momentum) (cos(pi step / steps) + 1) / 2.
    """
    if schedule == "constant":
        return momentum
    return 1 - (1 - momentum) * (math.cos(math.pi * step / max(1, steps)) + 1) / 2

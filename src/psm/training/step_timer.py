"""Time left of a run, predicted from its recent steps and the work between its epochs."""

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean

_RECENT = 50  # steps and epoch ends that the prediction averages over


class StepTimer:
    """Measures steps and predicts the time left. The first step is not counted: it allocates and compiles."""

    def __init__(self, total_steps: int, steps_per_epoch: int, clock: Callable[[], float] = time.perf_counter):
        self.total_steps, self.steps_per_epoch, self.clock = total_steps, steps_per_epoch, clock
        self.step = 0
        self._mark = clock()
        self._warm = False
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._epoch_ends: deque[float] = deque(maxlen=_RECENT)

    def start(self, step: int) -> None:
        """Training starts after ``step`` steps."""
        self.step, self._mark = step, self.clock()

    def start_epoch(self) -> None:
        """An epoch starts; the time since the last step went to the end of the epoch before."""
        now = self.clock()
        if self._warm:
            self._epoch_ends.append(now - self._mark)
        self._mark = now

    def end_step(self, step: int) -> None:
        """``step`` steps are done."""
        now = self.clock()
        if self._warm:
            self._steps.append(now - self._mark)
        self.step, self._mark, self._warm = step, now, True

    @property
    def timed(self) -> int:
        """Number of steps behind the prediction (at most the recent ones)."""
        return len(self._steps)

    @property
    def timed_seconds(self) -> float:
        """Seconds that those steps took together."""
        return sum(self._steps)

    @property
    def seconds_per_step(self) -> float | None:
        """Mean of the recent steps; None before the second step is done."""
        return fmean(self._steps) if self._steps else None

    @property
    def since_last_step(self) -> float:
        """Seconds since the last step ended."""
        return self.clock() - self._mark

    def left(self) -> float | None:
        """Seconds until the last step and epoch end; None before the second step is done."""
        if self.seconds_per_step is None:
            return None
        steps = self.total_steps - self.step
        epochs = -(-steps // self.steps_per_epoch)
        between = epochs * fmean(self._epoch_ends) if self._epoch_ends else 0.0
        # A step that takes longer than the others holds the count, it does not run into the next step's time.
        waited = min(self.since_last_step, self.seconds_per_step) if steps else 0.0
        return steps * self.seconds_per_step + between - waited

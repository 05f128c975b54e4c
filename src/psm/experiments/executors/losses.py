"""How often a run may lose the machine that it works on."""

from pathlib import Path

from psm.utils.run_folder import RunFolder

ALLOWED = 3  # machines in a row, with no new checkpoint in between


class Losses:
    """Counts the machines that a run has lost since its last new checkpoint: it may be what takes them down."""

    def __init__(self, run: Path):
        """
        Args:
            run: folder of the run in the study.
        """
        self.run = run
        self.count = 0
        self.checkpoint = self._time()

    def add(self) -> bool:
        """Count one more; False if the run is to be given up."""
        now = self._time()
        self.count = self.count + 1 if now == self.checkpoint else 1
        self.checkpoint = now
        return self.count <= ALLOWED

    def __str__(self) -> str:
        return f"{self.count} in a row were lost with no checkpoint in between"

    def _time(self) -> int:
        path = RunFolder(self.run).checkpoint
        return path.stat().st_mtime_ns if path.exists() else 0

"""What each run of a suite is given: cores, threads, GPUs; and for how many runs machines have room."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psm.utils.errors import UserError


@dataclass(frozen=True)
class Machine:
    """A machine that runs may work on."""

    name: str
    cpus: int
    gpus: float

    def __str__(self) -> str:
        return f"{self.name} has {self.cpus} CPUs and {self.gpus:g} GPUs"


@dataclass(frozen=True)
class Share:
    """What a run takes of a machine."""

    cpus: int
    gpus: float  # a part of one, or a whole number of them
    processes: int = 1  # that share the cores

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} GPU{'s' * (self.gpus > 1)}" if self.gpus else ""
        return f"{self.cpus} CPU{'s' * (self.cpus > 1)}{gpus} a run"

    def threads(self, given: int | None) -> str:
        """OMP_NUM_THREADS of a run: by ``cpus=``, else as the user has set it, else the run's cores."""
        own = None if given is not None else os.environ.get("OMP_NUM_THREADS")
        return own or str(max(1, self.cpus // self.processes))


def room(machines: Sequence[Machine], share: Share) -> int:
    """How many runs work on the machines at a time."""
    return sum(_room(machine, share) for machine in machines)


def _room(machine: Machine, share: Share) -> int:
    by_cpus = machine.cpus // share.cpus
    if share.gpus == 0:
        return by_cpus
    each = int(1 / share.gpus + 1e-9)  # runs that share a GPU, where they do
    return min(by_cpus, int(machine.gpus) * each if share.gpus < 1 else int(machine.gpus // share.gpus))


def choose_share(
    machines: Sequence[Machine], runs: int, cpus: int | None, gpus: float | None, settings: Mapping[str, Any]
) -> Share:
    """What a run takes, where the user has not said it.

    GPUs: as many as the run has devices, one for ``devices=auto``. Cores: as many as leave the number of runs that
    work at a time as large as with one core each.

    Args:
        machines: all that may be used.
        runs: how many there are to do.
        cpus, gpus: the user's keys.
        settings: dotted keys of `psm pretrain` that all runs share.
    """
    processes = count_devices(settings)
    present = any(machine.gpus for machine in machines)
    if gpus is None:
        gpus = processes if present and settings.get("accelerator", "auto") not in ("cpu", "mps", "tpu") else 0
    if gpus > 1 and gpus != int(gpus):
        raise UserError(f"gpus={gpus:g} is no number of GPUs: give a whole number, or a part such as 0.5.")
    if cpus is None:
        at_a_time = min(max(1, runs), room(machines, Share(1, gpus)))
        largest = max((machine.cpus for machine in machines), default=1)
        shares = (Share(count, gpus) for count in range(largest, 0, -1))
        cpus = next((share.cpus for share in shares if room(machines, share) >= at_a_time), 1)
    return Share(cpus, gpus, processes)


def refuse_too_much(machines: Sequence[Machine], share: Share, where: str) -> None:
    """Say that no machine can take a run, instead of waiting for one."""
    if room(machines, share):
        return
    listed = "; ".join(map(str, machines[:8])) + ("; ..." if len(machines) > 8 else "")
    raise UserError(
        f"no run fits: cpus={share.cpus} gpus={share.gpus:g} is more than any machine of {where} has ({listed}). "
        "Give less to a run, or start larger nodes."
    )


def count_devices(settings: Mapping[str, Any]) -> int:
    """Processes of a run on its machine."""
    devices = str(settings.get("devices", "auto"))
    if devices.isdigit():
        return max(1, int(devices))
    return max(1, sum(1 for name in devices.split(",") if name.strip().isdigit()))


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1"]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


class GpuPool:
    """Lends the GPUs of this machine to runs, each to one run at a time, or to as many as share it."""

    def __init__(self, gpus: Sequence[str], each: float):
        copies = int(1 / each + 1e-9) if 0 < each < 1 else 1
        self.free = [name for _ in range(copies) for name in gpus]  # runs are spread before they share
        self.each = max(1, int(each)) if each else 0
        self.lent: dict[str, list[str]] = {}

    def lend(self, run: str) -> list[str]:
        """GPUs for a run; there have to be enough."""
        self.lent[run], self.free = self.free[: self.each], self.free[self.each :]
        return self.lent[run]

    def take_back(self, run: str) -> None:
        self.free += self.lent.pop(run, [])

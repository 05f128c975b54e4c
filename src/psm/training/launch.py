"""Which process of a run this is, as torchrun, SLURM or Lightning started it. Reads the environment only."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from psm.config.run_settings import Placement
from psm.training.distributed import CHILD
from psm.utils.errors import UserError

INTERACTIVE = ("bash", "interactive")  # SLURM jobs of these names start processes by themselves


@dataclass(frozen=True)
class Launch:
    """How the processes of a run were started, and which one this is."""

    launcher: str = ""  # torchrun, SLURM, by hand (a process a node), or empty: this process starts the others
    rank: int = 0
    devices: int | None = None  # processes a node, where the launcher decides it
    num_nodes: int | None = None

    @property
    def world(self) -> int:
        """Processes that the launcher has started, or a process a node where these start the others."""
        return (self.devices or 1) * (self.num_nodes or 1)

    def environment(self) -> ClusterEnvironment | None:
        """What tells Lightning the same; None: Lightning finds out by itself."""
        if self.launcher == "torchrun":
            return TorchElasticEnvironment()
        if self.launcher == "SLURM":
            os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(self.devices))  # Lightning asks for it
            return SLURMEnvironment(auto_requeue=False)
        return LightningEnvironment() if self.launcher or "SLURM_NTASKS" in os.environ else None

    def address(self) -> tuple[str, int]:
        """Host and port at which the processes meet."""
        environment = self.environment() or LightningEnvironment()
        return environment.main_address, environment.main_port


def find_launch(config: Placement, variables: Mapping[str, str] = os.environ) -> Launch:
    """How this process was started.

    SLURM's tasks form one run unless the run asks for one device on one node: then each task is a run of its own.

    Raises:
        UserError: the keys contradict the launcher, or several nodes are asked for and nothing has started them.
    """
    if "TORCHELASTIC_RUN_ID" in variables:
        rank, world, local = (int(variables[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        return _checked(Launch("torchrun", rank, local, world // local), config)
    one = config.devices == "1" and config.num_nodes == 1
    tasks = int(variables.get("SLURM_NTASKS", "1"))
    if tasks > 1 and variables.get("SLURM_JOB_NAME") not in INTERACTIVE and not one:
        nodes = int(variables.get("SLURM_NNODES", "1"))
        if tasks % nodes:
            raise UserError(f"SLURM runs {tasks} tasks on {nodes} nodes: give each node the same number of tasks.")
        return _checked(Launch("SLURM", int(variables["SLURM_PROCID"]), tasks // nodes, nodes), config)
    if config.num_nodes > 1 and CHILD not in variables:
        return _by_hand(config, variables)
    return Launch()


def _by_hand(config: Placement, variables: Mapping[str, str]) -> Launch:
    """One process on each node, which starts the others there."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in variables]
    if missing:
        raise UserError(
            f"num_nodes={config.num_nodes} needs a launcher: start the run by torchrun --nnodes {config.num_nodes} or "
            f"srun, or set MASTER_ADDR, MASTER_PORT and NODE_RANK on each node ({', '.join(missing)} is missing)."
        )
    return Launch("by hand", int(variables["NODE_RANK"]), None, config.num_nodes)


def _checked(launch: Launch, config: Placement) -> Launch:
    if config.devices not in ("auto", "-1", str(launch.devices)):
        raise UserError(
            f"devices={config.devices}, but {launch.launcher} started {launch.devices} processes on a node: leave "
            "devices out."
        )
    if config.num_nodes not in (1, launch.num_nodes):
        raise UserError(
            f"num_nodes={config.num_nodes}, but {launch.launcher} has {launch.num_nodes} nodes: leave num_nodes out."
        )
    return launch

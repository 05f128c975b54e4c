"""The keys of every command that trains: how a run is kept, where it computes, who is told. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Any

from psm.config.keys import key


@dataclass
class RunKeys:
    """Keys that mean the same whatever a run trains."""

    seed: int = key(0, "decides every random draw")
    resume: str = key(
        "false", "true: continue the run in out; auto: or start it if out is new or empty; or a snapshot, epoch-0010"
    )
    overwrite: str = key(
        "false",
        "true: move the run in out aside, to out.replaced-1; delete: remove it",
        choices=("false", "true", "delete"),
    )
    accelerator: str = key("auto", "Lightning's: auto, cpu, gpu, mps, tpu", topic="machine")
    devices: str = key("auto", "Lightning's: auto or a number (auto on a CPU: 1)", topic="machine")
    num_nodes: int = key(1, "machines that train together", at_least=1, topic="machine")
    strategy: str = key("auto", "Lightning's: auto, ddp, ddp_spawn, ...", topic="machine")
    ddp: dict[str, Any] = key(
        dict,
        "arguments of Lightning's DDPStrategy; ddp.timeout: seconds that processes wait for each other (1800)",
        topic="machine",
    )
    precision: str = key(
        "auto",
        "Lightning's: 32-true, bf16-mixed, 16-mixed, ...; auto: bf16-mixed on CUDA GPUs that have it, else 32-true",
        topic="machine",
    )
    sync_batchnorm: bool = key(
        True, "batch norm over all devices' images, so that their number changes nothing", topic="machine"
    )
    channels_last: bool | None = key(
        None, "memory layout of convolutions; none: where it was measured to be faster", topic="machine"
    )
    loggers: dict[str, Any] = key(
        dict,
        "beside metrics.jsonl: [csv,wandb] of tensorboard, csv, wandb, mlflow, module.Class; their arguments as "
        "loggers.wandb.project=NAME",
        named=True,
        topic="extras",
    )
    callbacks: list[str] = key(
        [], "Lightning callbacks, each as module.Class without arguments, written [a.B,c.D]", topic="extras"
    )
    progress: bool = key(True, "show a progress bar", topic="extras")
    trainer: dict[str, Any] = key(
        dict, "anything else for Lightning's Trainer, for example trainer.deterministic=true", topic="extras"
    )

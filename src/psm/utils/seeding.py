"""Random generators derived from (seed, purpose, position): a resumed or re-sharded run repeats every draw."""

import hashlib

import torch


def derived_seed(seed: int, purpose: str, *position: int) -> int:
    """A 63-bit seed that differs for every purpose and position (a step, an epoch, an index)."""
    text = f"{seed}/{purpose}/{'/'.join(map(str, position))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *position: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator for one purpose at one position, for example ``generator(seed, "views", step)``."""
    return torch.Generator(device).manual_seed(derived_seed(seed, purpose, *position))


def seed_networks(seed: int, device: torch.device) -> None:
    """Seed torch's global generators of the CPU and of this device's kind (dropout, stochastic depth).

    ``torch.manual_seed`` seeds every kind of device, which takes a millisecond a call for those that are absent.
    """
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)

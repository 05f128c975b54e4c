"""Every random draw as a pure function of (seed, purpose, place): a resumed or re-sharded run repeats exactly."""

import hashlib

import torch


def derived_seed(seed: int, purpose: str, *place: int) -> int:
    """A 63-bit seed that differs for every purpose and place (a step, an epoch, an index)."""
    text = f"{seed}/{purpose}/{'/'.join(map(str, place))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *place: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for one purpose at one place, for example ``generator(seed, "views", step)``."""
    return torch.Generator(device).manual_seed(derived_seed(seed, purpose, *place))


def seed_networks(seed: int, device: torch.device) -> None:
    """Seed torch's own generators, of the CPU and of this kind of device, which networks draw from.

    ``torch.manual_seed`` does that for all kinds of devices, and for each that is not there notes where it was asked
    to: a millisecond every time.
    """
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        kind = torch.get_device_module(device)
        getattr(kind, "manual_seed_all", kind.manual_seed)(seed)

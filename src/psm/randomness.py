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

"""The floor: forward and backward of encoder and heads (and the target's forward) on ready tensors, nothing else.

python bare_networks.py METHOD ENCODER STEM BATCH THREADS PLAIN

With a 1 for PLAIN the networks run in plain PyTorch.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from psm import ops
from psm.methods import get_method
from psm.models.factory import create_encoder, prefers_channels_last
from psm.models.heads import prediction_head, projection_head
from psm.models.siamese import SiameseNetworks
from psm.ops import keep_freed_memory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from turns import answer


def main() -> None:
    method, name, stem, batch, threads, plain = sys.argv[1:]
    if int(plain):
        ops.accelerated = lambda module, device: nullcontext()
    torch.set_num_threads(int(threads))
    keep_freed_memory()
    spec = get_method(method)
    backbone = create_encoder(name, stem, 32)
    networks = SiameseNetworks(
        backbone,
        projection_head(backbone.width),
        prediction_head() if spec.predictor.enabled else None,
        spec.target.enabled,
    )
    views = torch.randn(2, int(batch), 3, 32, 32)
    if prefers_channels_last("cpu"):
        networks.to(memory_format=torch.channels_last)
        views = views.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (2, -1))

    def step() -> None:
        for parameter in networks.parameters():
            parameter.grad = None
        networks(views)[0].query.sum().backward()

    step()
    answer(step)


if __name__ == "__main__":
    main()

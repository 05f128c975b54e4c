"""lightly's training, from its parts as its examples put them together, with psm's encoder and heads.

    python lightly_training.py METHOD ENCODER STEM BATCH THREADS WORKERS CHANNELS_LAST

SimCLR, BYOL, MoCo v2 and NNCLR, each symmetric in the two views, as psm's are. Images are decoded beforehand and
handed to lightly's transform as PIL images, which is what it takes.
"""

import sys
import warnings
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

warnings.simplefilter("ignore")
from lightly.loss import NegativeCosineSimilarity, NTXentLoss  # noqa: E402
from lightly.models.modules import NNMemoryBankModule  # noqa: E402
from lightly.models.utils import deactivate_requires_grad, update_momentum  # noqa: E402
from lightly.transforms import SimCLRTransform  # noqa: E402
from PIL import Image  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from psm.models.factory import create_encoder  # noqa: E402
from psm.models.heads import prediction_head, projection_head  # noqa: E402
from turns import answer  # noqa: E402

IMAGES, BANK = 10240, 16384


class Decoded(Dataset):
    """Decoded images and lightly's two views of each."""

    def __init__(self) -> None:
        pixels = torch.randint(0, 256, (IMAGES, 32, 32, 3), dtype=torch.uint8).numpy()
        self.images = [Image.fromarray(image) for image in pixels]
        self.transform = SimCLRTransform(input_size=32, cj_strength=0.5, min_scale=0.2, gaussian_blur=0.0)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return self.transform(self.images[index])


class Networks(nn.Module):
    """Encoder, heads and what the method adds."""

    def __init__(self, method: str, name: str, stem: str):
        super().__init__()
        self.method = method
        backbone = create_encoder(name, stem, 32)
        self.online = nn.Sequential(backbone, projection_head(backbone.width))
        self.predictor = prediction_head() if method in ("byol", "nnclr") else None
        self.target = deepcopy(self.online) if method in ("byol", "mocov2") else None
        if self.target is not None:
            deactivate_requires_grad(self.target)
        self.contrast = NTXentLoss(temperature=0.5)
        self.queue = NTXentLoss(temperature=0.5, memory_bank_size=(BANK, 128))
        self.bank = NNMemoryBankModule(size=(BANK, 128))
        self.regress = NegativeCosineSimilarity()

    def loss(self, view1: torch.Tensor, view2: torch.Tensor) -> torch.Tensor:
        z1, z2 = self.online(view1), self.online(view2)
        if self.method == "simclr":
            return self.contrast(z1, z2)
        if self.method == "nnclr":
            q1, q2 = self.predictor(z1), self.predictor(z2)
            n1, n2 = self.bank(z1.detach(), update=False), self.bank(z2.detach(), update=True)
            return 0.5 * (self.contrast(n1, q2) + self.contrast(n2, q1))
        with torch.no_grad():
            k1, k2 = self.target(view1), self.target(view2)
        if self.method == "mocov2":
            return 0.5 * (self.queue(z1, k2) + self.queue(z2, k1))
        return 0.5 * (self.regress(self.predictor(z1), k2) + self.regress(self.predictor(z2), k1))


def main() -> None:
    method, name, stem, batch, threads, workers, channels_last = sys.argv[1:]
    torch.set_num_threads(int(threads))
    networks = Networks(method, name, stem)
    layout = torch.channels_last if int(channels_last) else torch.contiguous_format
    networks.to(memory_format=layout)
    optimizer = torch.optim.SGD(
        [p for p in networks.parameters() if p.requires_grad], lr=0.01, momentum=0.9, weight_decay=1e-3
    )
    loader = DataLoader(
        Decoded(), int(batch), shuffle=True, drop_last=True, num_workers=int(workers), persistent_workers=True
    )
    batches = iter(loader)

    def step() -> None:
        nonlocal batches
        views = next(batches, None)
        if views is None:
            batches = iter(loader)
            views = next(batches)
        loss = networks.loss(*(view.contiguous(memory_format=layout) for view in views))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if networks.target is not None:
            update_momentum(networks.online, networks.target, m=0.99)

    step()
    answer(step)


if __name__ == "__main__":
    main()

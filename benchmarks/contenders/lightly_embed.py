"""lightly's embedding of a folder of images with psm's encoder.

    python lightly_embed.py RUN FOLDER THREADS

A step embeds the whole folder by `SelfSupervisedEmbedding.embed`, with as many loader processes as threads.
"""

import contextlib
import io
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

warnings.simplefilter("ignore")
from lightly.data import LightlyDataset  # noqa: E402
from lightly.embedding import SelfSupervisedEmbedding  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torchvision import transforms  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from psm.models.pretrained import load_encoder  # noqa: E402
from turns import answer  # noqa: E402

BATCH = 256


class Model(nn.Module):
    """What lightly embeds with: a module that has a backbone."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone


def main() -> None:
    run, folder, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    encoder = load_encoder(run)
    info = encoder.info
    model = Model(encoder.to(memory_format=torch.channels_last))
    prepare = transforms.Compose(
        [
            transforms.Resize(info.size),
            transforms.CenterCrop(info.size),
            transforms.ToTensor(),
            transforms.Normalize(info.mean, info.std),
        ]
    )
    dataset = LightlyDataset(input_dir=folder, transform=prepare)
    loader = DataLoader(dataset, BATCH, shuffle=False, num_workers=threads)
    embedding = SelfSupervisedEmbedding(model, nn.Identity(), None, None)

    def step() -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
            embedding.embed(loader, torch.device("cpu"))

    answer(step)


if __name__ == "__main__":
    main()

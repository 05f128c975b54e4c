"""PSM in a plain PyTorch loop: no trainer, no configuration, the parts alone. Runs in seconds on a CPU."""

import torch

import psm
from psm.config.schema import ImagesConfig, ViewsConfig
from psm.data import load_dataset
from psm.data.stats import channel_statistics
from psm.models.factory import create_encoder
from psm.models.heads import prediction_head, projection_head
from psm.models.siamese import SiameseNetworks
from psm.views.transform import Views


def main(images: int = 512, epochs: int = 2, batch_size: int = 64, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    train = load_dataset("shapes", ImagesConfig(limit=images), progress=False).train
    mean, std = channel_statistics(train)
    views = Views(ViewsConfig(), 32, mean, std)

    backbone = create_encoder("tiny")
    networks = SiameseNetworks(backbone, projection_head(backbone.width), prediction_head(), target=True)
    optimizer = torch.optim.SGD(
        [p for p in networks.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=1e-3
    )
    criterion = psm.get_method("psm").build_loss()  # or any other row of `psm methods`
    bank = psm.MemoryBank(size=256, width=128)

    losses = []
    for _ in range(epochs):
        for ids in torch.randperm(len(train)).split(batch_size):
            draws = views.sample_params(len(ids), torch.Generator().manual_seed(len(losses)))
            embeddings, _ = networks(views.apply(train.take(ids), draws))
            loss, metrics = psm.method_loss(embeddings, criterion, bank, ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            networks.update_target(0.99)
            bank.enqueue(embeddings.key[1], ids)  # after both directions: a batch never meets itself in the bank
            losses.append(loss.item())
            print(f"loss {losses[-1]:.3f}, guessing {metrics['chance']:.3f}, kept {metrics['negatives_kept']:.2f}")
    return losses


if __name__ == "__main__":
    main()

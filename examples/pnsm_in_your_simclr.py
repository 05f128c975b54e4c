"""PNSM dropped into a SimCLR loss that somebody already has: two lines more."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from psm.mining.pnsm import mine_negatives


def simclr(z1: Tensor, z2: Tensor, temperature: float = 0.5, pnsm: float | None = None) -> Tensor:
    """The usual NT-Xent over 2N anchors; with ``pnsm`` (the paper's a = 0.5) negatives are mined first."""
    z = normalize(torch.cat([z1, z2]), dim=1)
    count = len(z)
    similarity = z @ z.T
    itself = torch.eye(count, dtype=torch.bool)
    positive = itself.roll(count // 2, dims=1)
    dropped = itself
    if pnsm is not None:
        keep = mine_negatives(similarity.detach(), similarity[positive].detach(), pnsm)
        dropped = dropped | ~(keep | positive)
    logits = (similarity / temperature).masked_fill(dropped, -torch.inf)
    return cross_entropy(logits, positive.long().argmax(1))


def main(steps: int = 30, seed: int = 0) -> list[float]:
    """Two noisy copies of fixed vectors stand in for two views."""
    torch.manual_seed(seed)
    images = torch.randn(64, 20)
    network = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        views = (network(images + 0.3 * torch.randn_like(images)) for _ in range(2))
        loss = simclr(*views, pnsm=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()

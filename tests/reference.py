"""The paper's equations as slow loops over plain numbers of a graph: what the fast code is compared with."""

import math
from typing import Any

import torch


def cosine(x: Any, y: Any) -> Any:
    return (x * y).sum() / (x.norm() * y.norm())


def nearest(key: Any, bank: Any, k: Any, bank_ids: Any = None, own: Any = None) -> Any:
    """Eq. 3 with own-image exclusion: indices of the k most similar rows, or none if there are fewer than k."""
    usable = [i for i in range(len(bank)) if own is None or bank_ids[i] != own]
    ranked = sorted(usable, key=lambda i: -float(cosine(key, bank[i])))
    return ranked[:k] if len(ranked) >= k else []


def soft_weights(similarities: Any, weighting: Any, temperature: Any = 1.0) -> Any:
    """Eq. 5 and figure 5, as a list of numbers."""
    k = len(similarities)
    if k == 0:
        return []
    exponentials = [math.exp(s / temperature) for s in similarities]
    weights = [e / sum(exponentials) for e in exponentials]
    survivors = [i for i, w in enumerate(weights) if not w < 1 / k - 1e-12]
    if weighting == "V1":
        return [w if i in survivors else 0.0 for i, w in enumerate(weights)]
    if weighting == "V2":
        return [1 / len(survivors) if i in survivors else 0.0 for i in range(k)]
    if weighting == "V3":
        return [1.0 if i in survivors else 0.0 for i in range(k)]
    if weighting == "V4":
        return [1.0] * k
    return weights


def hard_loss(query: Any, key: Any, other: Any, temperature: Any, keep: Any = None) -> Any:
    """Eq. 4, the mean over queries. ``keep(i, l, view)``: whether PNSM keeps that view of image l for query i."""
    total = 0.0
    for i in range(len(query)):
        positive = torch.exp(cosine(query[i], key[i]) / temperature)
        mass = 0.0
        for image in range(len(query)):
            for view, vectors in enumerate((key, other)):
                if image != i and (keep is None or keep(i, image, view)):
                    mass = mass + torch.exp(cosine(query[i], vectors[image]) / temperature)
        total = total - torch.log(positive / (positive + mass))
    return total / len(query)


def soft_loss(
    query: Any,
    projection: Any,
    key: Any,
    bank: Any,
    k: Any,
    temperature: Any,
    weighting: Any = "V0",
    bank_ids: Any = None,
    ids: Any = None,
    keep: Any = None,
    weight_temperature: Any = 1.0,
    min_similarity: Any = -1.0,
    agree_with: Any = None,
    shares: Any = None,
    mass: Any = None,
    in_denominator: Any = True,
) -> Any:
    """Eq. 6, the mean over queries. ``keep(i, l, j)``: whether PNSM keeps candidate j (0: the key) of image l.

    ``agree_with``: keys of the queries' view, which must mine a row too. ``shares`` (N, k): how much of each row is
    mixed with the key. ``mass(positive, negatives)``: what the negatives weigh, by default their sum.
    ``in_denominator``: whether the positives stand in it.
    """
    count = len(query)
    candidates, rows = [], []
    for i in range(count):
        own = None if ids is None else ids[i]
        found = nearest(key[i], bank, k, bank_ids, own) if k else []
        places = [place for place, j in enumerate(found) if cosine(key[i], bank[j]) >= min_similarity]
        if agree_with is not None:
            others = nearest(agree_with[i], bank, k, bank_ids, own)
            places = [place for place in places if found[place] in others]
        rows.append([bank[found[place]] for place in places])
        mixed = rows[-1]
        if shares is not None:
            mixed = []
            for place in places:
                x, row = float(shares[i, place]), bank[found[place]]
                vector = x * row / row.norm() + (1 - x) * key[i] / key[i].norm()
                mixed.append(vector / vector.norm())
        candidates.append([key[i], *mixed])
    total = 0.0
    for i in range(count):
        similarities = [float(cosine(projection[i], m)) for m in rows[i]]
        weights = [1.0, *soft_weights(similarities, weighting, weight_temperature)]
        exponentials = [torch.exp(cosine(query[i], c) / temperature) for c in candidates[i]]
        negatives = []
        for image in range(count):
            if image != i:
                for j, candidate in enumerate(candidates[image]):
                    if keep is None or keep(i, image, j):
                        negatives.append(torch.exp(cosine(query[i], candidate) / temperature))
        denominator = sum(exponentials) if in_denominator else 0.0
        denominator = denominator + (sum(negatives) if mass is None else mass(exponentials[0], negatives))
        for weight, positive in zip(weights, candidates[i], strict=True):
            total = total - weight * torch.log(torch.exp(cosine(query[i], positive) / temperature) / denominator)
    return total / count


def keep_probability(query: Any, negative: Any, key: Any, a: Any) -> Any:
    """Eq. 8."""
    return float(torch.exp(-a * (cosine(query, negative) - cosine(query, key)) ** 2))


def in_batch_loss(z1: Any, z2: Any, temperature: Any, mass: Any) -> Any:
    """SimCLR's kin: each of the 2N anchors against the other view and both views of the other images."""
    total = 0.0
    for anchors, keys in ((z1, z2), (z2, z1)):
        for i in range(len(z1)):
            positive = torch.exp(cosine(anchors[i], keys[i]) / temperature)
            negatives = [
                torch.exp(cosine(anchors[i], vectors[j]) / temperature)
                for j in range(len(z1))
                if j != i
                for vectors in (keys, anchors)
            ]
            total = total - torch.log(positive / (positive + mass(positive, negatives)))
    return total / (2 * len(z1))


def sum_mass(positive: Any, negatives: Any) -> Any:
    return sum(negatives)


def debiased_mass(temperature: Any, tau: Any) -> Any:
    def mass(positive: Any, negatives: Any) -> Any:
        n = len(negatives)
        estimate = (sum(negatives) - n * tau * positive) / (1 - tau)
        return torch.maximum(estimate, torch.as_tensor(n * math.exp(-1 / temperature), dtype=positive.dtype))

    return mass


def hard_mass(temperature: Any, tau: Any, beta: Any) -> Any:
    def mass(positive: Any, negatives: Any) -> Any:
        n = len(negatives)
        weighted = sum(x ** (1 + beta) for x in negatives) / (sum(x**beta for x in negatives) / n)
        estimate = (weighted - n * tau * positive) / (1 - tau)
        return torch.maximum(estimate, torch.as_tensor(n * math.exp(-1 / temperature), dtype=positive.dtype))

    return mass


def bayesian_mass(tau: Any, alpha: Any, beta: Any) -> Any:
    def mass(positive: Any, negatives: Any) -> Any:
        total = 0.0
        for x in negatives:
            u = sum(y.item() <= x.item() for y in negatives) / len(negatives)
            a = (1 - 2 * alpha) * ((1 - tau) - tau) + 1e-3
            b = 2 * (alpha * (1 - tau) + (1 - alpha) * tau)
            f = (-b + math.sqrt(b * b + 4 * a * u)) / (2 * a)
            phi1, phi2 = 2 * (1 - f), 2 * f
            true, false = alpha * phi1 + (1 - alpha) * phi2, (1 - alpha) * phi1 + alpha * phi2
            hard = (alpha * (1 - beta) * phi1 + (1 - alpha) * beta * phi2) / (
                alpha * (1 - beta) + (1 - alpha) * beta + 1e-3
            )
            total = total + hard / (true * (1 - tau) + false * tau) * x
        return total

    return mass


def bank_loss(query: Any, key: Any, bank: Any, temperature: Any) -> Any:
    """MoCo: the key against the bank, one direction."""
    total = 0.0
    for q, k in zip(query, key, strict=True):
        positive = torch.exp(cosine(q, k) / temperature)
        mass = sum(torch.exp(cosine(q, row) / temperature) for row in bank)
        total = total - torch.log(positive / (positive + mass))
    return total / len(query)


def nearest_loss(query: Any, key: Any, bank: Any, temperature: Any) -> Any:
    """NNCLR: the key's nearest bank row against all predictions, one direction."""
    total = 0.0
    for i in range(len(query)):
        anchor = bank[nearest(key[i], bank, 1)[0]]
        scores = [torch.exp(cosine(anchor, q) / temperature) for q in query]
        total = total - torch.log(scores[i] / sum(scores))
    return total / len(query)


def vicreg_loss(z1: Any, z2: Any) -> Any:
    """VICReg with its published weights, dimension by dimension."""
    count, width = z1.shape
    loss = 25 * sum((a - b) ** 2 for a, b in zip(z1.flatten(), z2.flatten(), strict=True)) / (count * width)
    for z in (z1, z2):
        means = [sum(z[:, d]) / count for d in range(width)]
        covariance = [
            [sum((z[i, a] - means[a]) * (z[i, b] - means[b]) for i in range(count)) / (count - 1) for b in range(width)]
            for a in range(width)
        ]
        deviations = [torch.sqrt(covariance[d][d] + 1e-4) for d in range(width)]
        loss = loss + 25 * sum(torch.clamp(1 - s, min=0) for s in deviations) / width / 2
        loss = loss + sum(covariance[a][b] ** 2 for a in range(width) for b in range(width) if a != b) / width
    return loss

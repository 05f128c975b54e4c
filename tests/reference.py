"""The paper's equations as slow loops over plain numbers of a graph: what the fast code is compared with."""

import math

import torch


def cosine(x, y):
    return (x * y).sum() / (x.norm() * y.norm())


def nearest(key, bank, k, bank_ids=None, own=None):
    """Eq. 3 with own-image exclusion: indices of the k most similar rows, or none if there are fewer than k."""
    usable = [i for i in range(len(bank)) if own is None or bank_ids[i] != own]
    ranked = sorted(usable, key=lambda i: -float(cosine(key, bank[i])))
    return ranked[:k] if len(ranked) >= k else []


def soft_weights(similarities, weighting):
    """Eq. 5 and figure 5, as a list of numbers."""
    k = len(similarities)
    if k == 0:
        return []
    exponentials = [math.exp(s) for s in similarities]
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


def hard_loss(query, key, other, temperature, keep=None):
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


def soft_loss(query, projection, key, bank, k, temperature, weighting="V0", bank_ids=None, ids=None, keep=None):
    """Eq. 6, the mean over queries. ``keep(i, l, j)``: whether PNSM keeps candidate j (0: the key) of image l."""
    count = len(query)
    candidates = []
    for i in range(count):
        found = nearest(key[i], bank, k, bank_ids, None if ids is None else ids[i]) if k else []
        candidates.append([key[i]] + [bank[j] for j in found])
    total = 0.0
    for i in range(count):
        mined = candidates[i][1:]
        weights = [1.0, *soft_weights([float(cosine(projection[i], m)) for m in mined], weighting)]
        denominator = sum(torch.exp(cosine(query[i], c) / temperature) for c in candidates[i])
        for image in range(count):
            if image != i:
                for j, candidate in enumerate(candidates[image]):
                    if keep is None or keep(i, image, j):
                        denominator = denominator + torch.exp(cosine(query[i], candidate) / temperature)
        for weight, positive in zip(weights, candidates[i], strict=True):
            total = total - weight * torch.log(torch.exp(cosine(query[i], positive) / temperature) / denominator)
    return total / count


def keep_probability(query, negative, key, a):
    """Eq. 8."""
    return float(torch.exp(-a * (cosine(query, negative) - cosine(query, key)) ** 2))

"""The terms of a contrastive loss from one product with all of their candidates: few kernels for an accelerator."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from psm.losses.terms import Term
from psm.mining.draws import Draws
from psm.mining.negatives import BatchCandidates, group_products
from psm.mining.pnsm import NegativeSampler
from psm.mining.processes import take_rows
from psm.utils.devices import cached_constant


def holds_targets(terms: Sequence[Term]) -> bool:
    """True if the candidates of each term begin with what its anchors, the same in all terms, are pulled to.

    And if the first of these is the same in all terms, by which samplers measure.
    """
    candidates = [term.candidates for term in terms]
    if not all(isinstance(x, BatchCandidates) and x.targets for x in candidates):
        return False
    same_anchors = all(term.anchors is terms[0].anchors for term in terms)
    return len(terms) == 1 or (same_anchors and all(term.positives.first_mined == 1 for term in terms))


@dataclass(frozen=True)
class TermsAtOnce:
    """The contrastive loss (eq. 4, 6) of a slice of anchors, of all terms, with the plain sum over negatives.

    A term's candidates begin with what an anchor is pulled to (``holds_targets``). So the product of anchors and
    candidates holds the logits of the positives too: those of the anchor's own image. One product, one draw for each
    pair and one mask serve all terms; the columns of each have a softmax of their own.
    """

    temperature: float
    sampler: NegativeSampler
    draws: Draws
    groups: int  # directions that the anchors come from
    widths: tuple[int, ...]  # candidates that an image has in each term, C of them together
    vectors: Tensor  # (N, C, D) the candidates
    exist: Tensor  # (N, C) which of them there are
    weights: Tensor  # (N, C) how strongly an anchor is pulled to those of its own image
    own: Tensor  # (N, C) which of those of its own image stand in its denominator

    @classmethod
    def join(
        cls, terms: Sequence[Term], temperature: float, sampler: NegativeSampler, draws: Draws, groups: int = 1
    ) -> "TermsAtOnce":
        """The terms side by side."""
        candidates = [term.candidates for term in terms if isinstance(term.candidates, BatchCandidates)]
        widths = tuple(x.vectors.shape[1] for x in candidates)
        pulls = [x.positives.weights if x.weight == 1 else x.weight * x.positives.weights for x in terms]
        vectors, exist = _beside([x.vectors for x in candidates]), _beside([x.mask for x in candidates])
        weights, own = _of_own_image(pulls, widths), _of_own_image([term.positives.mask for term in terms], widths)
        return cls(temperature, sampler, draws, groups, widths, vectors, exist, weights, own)

    @property
    def draws_per_anchor(self) -> int:
        """Numbers that are drawn for each anchor."""
        return self.sampler.draws_per_pair * self.columns(self.vectors)

    def columns(self, anchors: Tensor) -> int:
        """How many similarities of an anchor are held at once."""
        return len(anchors) // self.groups * sum(self.widths)

    def __call__(self, rows: slice, anchors: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss () of the anchors (A, D), and sums of each term's chance, kept and allowed (3, T)."""
        scaled = anchors if self.temperature == 1 else anchors / self.temperature
        logits = group_products(scaled, vectors, self.groups).unflatten(2, (-1, sum(self.widths)))  # (G, A, N, C)
        weights = self._rows(self.weights, rows)
        with torch.no_grad():
            keep = self._keep(rows, logits)
            sums = self._sums(rows, keep, weights)
        least = torch.finfo(logits.dtype).min / 4  # finite: what does not exist has the weight 0
        shares = [
            part.masked_fill(dropped, least).flatten(2).log_softmax(2).view_as(part).diagonal(rows.start, 1, 2)
            for part, dropped in zip(*(x.split(self.widths, 3) for x in (logits, ~keep)), strict=True)
        ]
        return -(weights.mT * torch.cat(shares, 1)).sum(), sums

    def _keep(self, rows: slice, logits: Tensor) -> Tensor:
        """Mask (G, A, N, C) of the candidates in the denominator of each anchor, with those that it is pulled to."""
        exist = self.exist.unflatten(0, (self.groups, 1, -1))
        if self.sampler.keeps_all:
            keep = exist.expand_as(logits).clone()
        else:
            self.draws.seek(rows)
            similarity = logits * self.temperature
            key = similarity.diagonal(rows.start, 1, 2)[:, 0].flatten()
            keep = self.sampler.keep(similarity.flatten(0, 1).flatten(1), key, self.draws).view_as(logits) & exist
        keep.diagonal(rows.start, 1, 2).copy_(self._rows(self.own, rows).mT)
        return keep

    def _sums(self, rows: slice, keep: Tensor, weights: Tensor) -> Tensor:
        """Sums (3, T) over the anchors of the loss of guessing, and of their kept and allowed negatives."""
        own, exist = self._rows(self.own, rows), self._rows(self.exist, rows)
        others = self.exist.unflatten(0, (self.groups, -1)).sum(1, keepdim=True) - exist.long()
        members = _members(self.widths, weights.dtype, weights.device)
        pull, pulled_to, allowed = torch.stack([weights, own, others]) @ members  # (G, A, T) each
        counted = keep.sum(2, dtype=weights.dtype) @ members
        return torch.stack([pull * counted.log(), counted - pulled_to, allowed]).sum((1, 2))

    def _rows(self, values: Tensor, rows: slice) -> Tensor:
        """Rows of each direction (G, A, C) of the values (N, C)."""
        return take_rows(values, rows, self.groups).unflatten(0, (self.groups, -1))


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """Columns of several terms side by side."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def _of_own_image(targets: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """Values (N, P) for what an anchor is pulled to in each term, 0 for the other candidates of its image: (N, C)."""
    lacking = [width - x.shape[1] for x, width in zip(targets, widths, strict=True)]
    return _beside([pad(x, (0, number)) if number else x for x, number in zip(targets, lacking, strict=True)])


@cached_constant
def _members(widths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 where a column belongs to a term, (C, T)."""
    return torch.block_diag(*(torch.ones(width, 1, dtype=dtype, device=device) for width in widths))

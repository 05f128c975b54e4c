"""Operations on which training spends its time, each with its definition in plain PyTorch.

A definition says what an operation computes. ``psm.kernels`` registers faster implementations for CPUs; it is imported
when an operation is first used on a CPU, and an implementation runs where it supports the arguments. Values and
gradients are those of the definition to rounding. With ``PSM_KERNELS=0`` in the environment, or within
``psm.kernels.disabled()``, only the definitions run.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from psm.utils.devices import prefers_few_kernels

P = ParamSpec("P")
R = TypeVar("R")

TOPK_BLOCK = 128  # columns that have one maximum
CHUNK_PIXELS = 2**18  # of views made at a time on a CPU: what its cache holds; a third faster from 64 pixels up


class Kernel(NamedTuple):
    """A faster implementation of an operation; both functions take the operation's arguments."""

    supports: Callable[..., bool]
    function: Callable[..., Any]


_definitions: dict[str, Callable[..., Any]] = {}
_kernels: dict[str, Kernel] = {}
_disabled = 0  # how many kernels_disabled() contexts are entered


def op(definition: Callable[P, R]) -> Callable[P, R]:
    """Make a plain definition an operation that runs its kernel where one is registered and supports the arguments."""
    name = definition.__name__
    _definitions[name] = definition

    @wraps(definition)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        kernel = _find_kernel(name, args, kwargs)
        return definition(*args, **kwargs) if kernel is None else kernel(*args, **kwargs)

    return run


def register(name: str, supports: Callable[..., bool], function: Callable[..., Any]) -> None:
    """Register a faster implementation of an operation.

    Args:
        name: the operation.
        supports: True for arguments that the implementation can take and is faster for.
        function: the implementation.
    """
    if name not in _definitions:
        raise KeyError(f"{name!r} is not an operation: choose one of {', '.join(_definitions)}")
    _kernels[name] = Kernel(supports, function)


def has_kernel(operation: Callable[..., Any], *args: Any) -> bool:
    """True if a kernel will run for these arguments instead of the definition."""
    return _find_kernel(operation.__name__, args, {}) is not None


def _find_kernel(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    if not enabled() or torch.compiler.is_compiling() or (args and args[0].device.type != "cpu"):
        return None
    _load_kernels()
    kernel = _kernels.get(name)
    return kernel.function if kernel is not None and kernel.supports(*args, **kwargs) else None


def _load_kernels() -> Any:
    return importlib.import_module("psm.kernels")


def kernel_status() -> str:
    """What kernels run here, or why none do."""
    return str(_load_kernels().status())


def enabled() -> bool:
    """True unless kernels are switched off."""
    return not _disabled and not disabled_by_environment()


def disabled_by_environment() -> bool:
    """True if ``PSM_KERNELS=0`` is set."""
    return os.environ.get("PSM_KERNELS") == "0"


@contextmanager
def kernels_disabled() -> Iterator[None]:
    """Context in which no kernel runs, in any thread; also ``psm.kernels.disabled``."""
    global _disabled
    _disabled += 1
    try:
        yield
    finally:
        _disabled -= 1


@op
def keep_freed_memory() -> bool:
    """Tell the memory allocator of this process to keep what is freed; returns whether it does. Plainly: nothing."""
    return False


def accelerated(module: nn.Module, device: torch.device) -> AbstractContextManager[object]:
    """Context in which forward passes of a module on a device may run kernels; the module itself stays as it is.

    Plainly nothing; on a CPU ``psm.kernels.optimize``.
    """
    if device.type != "cpu" or not enabled():
        return nullcontext()
    return _load_kernels().optimize(module)


@op
def topk_similarity(
    queries: Tensor,
    rows: Tensor,
    k: int,
    ids: Tensor | None = None,
    exclude_ids: Tensor | None = None,
    buffer: Callable[[int], Tensor] | None = None,
    in_use: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest dot products of each query with the rows of a bank, largest first.

    Args:
        queries: (N, D).
        rows: (M, D).
        k: at most M.
        ids: of the rows' images, (M,).
        exclude_ids: of the queries' images, (N,): rows with a query's id are left out for it.
        buffer: gives a tensor of at least so many elements, in which the similarities are written.
        in_use: (M,) mask of the rows that count; None: all.

    Returns:
        The products (N, k), -inf where too few rows are left, and the indices of their rows (N, k).
    """
    out = None if buffer is None else buffer(len(queries) * len(rows))
    out = None if out is None else out[: len(queries) * len(rows)].view(len(queries), len(rows))
    similarity = torch.mm(queries, rows.T, out=out)
    if ids is not None and exclude_ids is not None:
        mask_same_image_(similarity, ids, exclude_ids, -torch.inf)
    if in_use is not None:
        similarity.masked_fill_(~in_use, -torch.inf)
    return topk_blocks(similarity, k)


def mask_same_image_(pairs: Tensor, ids: Tensor, exclude_ids: Tensor, value: float | bool) -> Tensor:
    """``pairs.masked_fill_(ids == exclude_ids[:, None], value)`` for a matrix (N, M) of queries and rows.

    On a CPU only the few columns with an id of the batch are touched: comparing all pairs takes longer there than the
    search itself. Elsewhere that would synchronize with the device, and comparing is cheap.
    """
    if prefers_few_kernels(pairs.device) or not len(exclude_ids):
        return pairs.masked_fill_(ids == exclude_ids[:, None], value)
    ordered = exclude_ids.sort().values
    place = torch.searchsorted(ordered, ids).clamp(max=len(ordered) - 1)
    columns = (ordered[place] == ids).nonzero()[:, 0]
    row, column = (ids[columns] == exclude_ids[:, None]).nonzero(as_tuple=True)
    pairs[row, columns[column]] = value
    return pairs


def topk_blocks(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``values.topk(k, dim=1)``, exactly, by blocks: the k largest lie in the k blocks with the largest maxima."""
    count, width = values.shape
    blocks = width // TOPK_BLOCK
    if blocks <= 2 * k or width % TOPK_BLOCK:
        largest, indices = values.topk(k, dim=1)
        return largest, indices
    chosen = values.view(count, blocks, TOPK_BLOCK).amax(2).topk(k, dim=1).indices
    within = torch.arange(TOPK_BLOCK, device=values.device)
    columns = torch.add(within, chosen[..., None], alpha=TOPK_BLOCK).flatten(1)
    largest, where = values.gather(1, columns).topk(k, dim=1)
    return largest, columns.gather(1, where)


@op
def logsumexp_similarity(queries: Tensor, rows: Tensor) -> Tensor:
    """log of the sum over rows (M, D), which are constants, of exp(q . r) for each of the queries (N, D).

    -inf, with a zero gradient, where there are no rows. The kernel does not write the matrix of products, so its memory
    does not grow with the bank.
    """
    return masked_logsumexp(queries @ rows.to(queries.dtype).T)


def masked_logsumexp(values: Tensor, keep: Tensor | None = None) -> Tensor:
    """log of the sum of exp over the kept values of a row; -inf, with a zero gradient, where none is kept."""
    return _MaskedLogSumExp.apply(values, keep)


class _MaskedLogSumExp(torch.autograd.Function):
    """With half the passes over the values, and half the memory, of ``masked_fill`` and ``logsumexp``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, keep: Tensor | None) -> Tensor:
        least = torch.finfo(values.dtype).min
        if keep is not None:
            values = values.masked_fill(~keep, least)
        if not values.shape[-1]:
            ctx.save_for_backward(values, torch.ones(*values.shape[:-1], 1, dtype=torch.bool, device=values.device))
            return values.new_full(values.shape[:-1], -torch.inf)
        largest = values.amax(-1, keepdim=True)
        none = largest <= least
        shares = values.softmax(-1)  # a row at a time in the cache; the largest is 1 / sum(exp(values - largest))
        ctx.save_for_backward(shares, none)
        return (largest - shares.amax(-1, keepdim=True).log()).masked_fill_(none, -torch.inf).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        shares, none = ctx.saved_tensors
        return shares * grad_out.unsqueeze(-1).masked_fill(none, 0.0), None


@op
def crop_color(
    images: Tensor,
    boxes: Sequence[Tensor],
    flip: Tensor,
    color: Tensor,
    pivot: Tensor,
    luma: Tensor,
    mean: Tensor | None,
    std: Tensor | None,
    out: Tensor,
) -> None:
    """Write V views of each of B images: crop, resize and flip, then an affine color change, then normalization.

    Args:
        images: uint8, (B, 3, H, W).
        boxes: top, left, height and width of each crop in whole pixels, (V, B) each.
        flip: whether a view is mirrored, (V, B).
        color: matrices (V, B, 3, 3) of the color change.
        pivot: (V, B); times the mean luma of a view, added to all its channels after the matrix.
        luma: weights of the channels in the luma, (3,).
        mean: of each channel, (3,), subtracted at the end; None for no normalization.
        std: of each channel, (3,), by which is divided at the end.
        out: float32 views (V, B, 3, S, S), written.
    """
    count, size = out.shape[1], out.shape[-1]
    step = max(1, CHUNK_PIXELS // size**2) if images.device.type == "cpu" else max(1, count)
    for start in range(0, count, step):
        part = slice(start, start + step)
        pixels = images[part].float().div_(255)
        for index, view in enumerate(out[:, part]):
            box = [x.expand(out.shape[:2])[index, part] for x in boxes]
            matrix, weight = color.expand(*out.shape[:2], 3, 3)[index, part], pivot.expand(out.shape[:2])[index, part]
            colored = adjust_color(resized_crop(pixels, box, flip[index, part], size), matrix, weight, luma)
            view.copy_(colored if mean is None or std is None else normalize_channels_(colored, mean, std))


def resized_crop(pixels: Tensor, box: Sequence[Tensor], flip: Tensor, size: int) -> Tensor:
    """The boxes of images (B, 3, H, W), resized and, where ``flip`` (B,) says so, mirrored: (B, 3, size, size)."""
    tops, lefts, heights, widths = box
    rows = resize_matrix(tops, heights, pixels.shape[2], size)
    columns = resize_matrix(lefts, widths, pixels.shape[3], size, flip)
    # Channels and rows as one dimension: one product per image rather than three.
    narrowed = pixels.flatten(1, 2) @ columns.mT
    return rows.unsqueeze(1) @ narrowed.unflatten(1, pixels.shape[1:3])


def resize_matrix(start: Tensor, extent: Tensor, length: int, size: int, flip: Tensor | None = None) -> Tensor:
    """Bilinear weights (B, size, length) that resize ``extent`` pixels from ``start`` on, of ``length``, to ``size``.

    Where that shrinks, the triangle is widened by the same factor (antialiasing), as in Pillow and torchvision.
    """
    start, extent = start[:, None], extent[:, None]
    place = (torch.arange(size, dtype=torch.float32, device=start.device) + 0.5) / size
    if flip is not None:
        place = torch.where(flip[:, None], 1 - place, place)
    centers = start + extent * place
    pixels = torch.arange(length, dtype=torch.float32, device=start.device) + 0.5
    support = (extent / size).clamp(min=1).unsqueeze(-1)
    weights = (pixels - centers.unsqueeze(-1)).abs_().div_(support).neg_().add_(1).clamp_(min=0)
    inside = (pixels > start) & (pixels < start + extent)
    weights.mul_(inside.unsqueeze(1))
    return weights.div_(weights.sum(-1, keepdim=True))


def adjust_color(views: Tensor, matrix: Tensor, pivot: Tensor, luma: Tensor) -> Tensor:
    """``matrix @ color + pivot * mean luma`` for each pixel of the views (B, 3, H, W), clamped to [0, 1]."""
    pixels = views.flatten(2)
    offset = (pivot * (pixels.mean(-1) @ luma))[..., None, None]
    return torch.baddbmm(offset, matrix, pixels).clamp_(0, 1).view_as(views)


def normalize_channels_(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Subtract the mean and divide by the standard deviation of each channel of (B, 3, H, W), in place."""
    return pixels.sub_(mean[:, None, None]).div_(std[:, None, None])

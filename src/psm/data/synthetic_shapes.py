"""A generated data set of ten simple shapes: no download, the same pixels on every machine.

Every image shows four copies of one shape at random positions, scales and rotations, in random colors, over a textured
background with clutter, so that raw pixels say little about the class and outlines nearly everything. Arrays over
pixels use only +, -, *, /, sqrt, minimum and maximum, which are exact to the last bit everywhere; sines are taken of a
few numbers per image only.
"""

from collections.abc import Callable

import numpy as np

SIZE, TRAIN, TEST, MOST = 32, 5_000, 2_000, 50_000  # pixels, images by default, largest images.limit
BLOCK = 128  # a block is drawn from its own seed, so that image i is the same however many are asked for
_VERSION = 1
_SEEDS = {"train": 20_240_917, "test": 77_003_141}
_LUMINANCE = np.array([0.299, 0.587, 0.114], dtype=np.float32)

Field = np.ndarray  # (n, side, side) float32, in units of the shape's radius


def block(split: str, number: int, side: int) -> np.ndarray:
    """Images ``number * BLOCK`` and following of a split, uint8 (BLOCK, 3, side, side)."""
    random = np.random.default_rng([_SEEDS[split], number])
    kind = labels(BLOCK, first=number * BLOCK)
    shape, background, clutter = _colors(random, BLOCK)
    canvas = _ground(random, background, side)
    _scatter(random, canvas, clutter, side)
    _blend(canvas, shape, _coverage(random, kind, side))
    canvas += 0.05 * (random.random(canvas.shape, dtype=np.float32) + random.random(canvas.shape, dtype=np.float32) - 1)
    return (np.clip(canvas, 0, 1) * 255 + 0.5).astype(np.uint8)


def reader(split: str, side: int) -> Callable[[int, int], tuple[np.ndarray, list]]:
    """The function that draws images ``start`` to ``stop`` of a split, with an empty list of failures."""

    def read(start: int, stop: int) -> tuple[np.ndarray, list]:
        first, last = start // BLOCK, (stop - 1) // BLOCK
        drawn = np.concatenate([block(split, number, side) for number in range(first, last + 1)])
        return drawn[start - first * BLOCK : stop - first * BLOCK], []

    return read


def fingerprint(split: str, count: int, side: int) -> str:
    """What the pixels of a split depend on, as the name of its cache entry."""
    return f"shapes-{_VERSION}-{split}-{count}-{side}"


def labels(count: int, first: int = 0) -> np.ndarray:
    """Labels int64 (count,): classes alternate, so that any first images are balanced."""
    return np.arange(first, first + count, dtype=np.int64) % len(CLASSES)


def _uniform(random: np.random.Generator, low: float, high: float, *shape: int) -> np.ndarray:
    return (low + (high - low) * random.random(shape)).astype(np.float32)


def _grid(side: int) -> tuple[Field, Field]:
    """Pixel centers from -1 to 1, as (1, 1, side) and (1, side, 1)."""
    centers = ((2 * np.arange(side, dtype=np.float32) + 1) / side - 1).astype(np.float32)
    return centers[None, None, :], centers[None, :, None]


def _blend(canvas: np.ndarray, color: np.ndarray, coverage: Field) -> None:
    """Paint a color (n, 3) over the canvas (n, 3, side, side) where the coverage (n, side, side) is one."""
    canvas += coverage[:, None] * (color[:, :, None, None] - canvas)


def _tint(random: np.random.Generator, luminance: np.ndarray) -> np.ndarray:
    """Random colors (n, 3) of exactly the given luminance (n,), at most half as saturated as they could be."""
    direction = _uniform(random, -1, 1, len(luminance), 3)
    direction -= direction[:, :1] * _LUMINANCE[0] + direction[:, 1:2] * _LUMINANCE[1] + direction[:, 2:] * _LUMINANCE[2]
    largest = np.where(direction > 0, 1 - luminance[:, None], luminance[:, None]) / np.maximum(np.abs(direction), 1e-6)
    reach = np.minimum(largest.min(axis=1), 1) * _uniform(random, 0, 0.5, len(luminance))
    return luminance[:, None] + reach[:, None] * direction


def _colors(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Colors of shape, background and clutter; shape and background differ in luminance by 0.4 at least."""
    dark = _uniform(random, 0.15, 0.35, count)
    light = dark + _uniform(random, 0.40, 0.50, count)
    bright_shape = random.random(count) < 0.5
    front, back = np.where(bright_shape, light, dark), np.where(bright_shape, dark, light)
    between = back + _uniform(random, 0.3, 0.8, count) * (front - back)
    return _tint(random, front), _tint(random, back), _tint(random, between)


def _ground(random: np.random.Generator, color: np.ndarray, side: int) -> np.ndarray:
    """Backgrounds (n, 3, side, side): a color with a gradient, or with stripes or soft patches over it."""
    across, down = _grid(side)
    count = len(color)
    angle = random.random(count) * 2 * np.pi
    cosine, sine = (f(angle).astype(np.float32)[:, None, None] for f in (np.cos, np.sin))
    along = cosine * across + sine * down
    gradient = _uniform(random, 0, 0.05, count, 1, 1) * along
    cycles = _uniform(random, 1.5, 4.0, count, 1, 1) * along + _uniform(random, 0, 1, count, 1, 1)
    stripes = 4 * np.abs(cycles - np.floor(cycles) - np.float32(0.5)) - 1
    patches = _patches(random, count, side)
    which = random.integers(0, 3, count)
    strength = _uniform(random, 0.01, 0.05, count, 1, 1)
    texture = np.where((which == 1)[:, None, None], stripes, patches) * strength * (which > 0)[:, None, None]
    return color[:, :, None, None] + (gradient + texture).astype(np.float32)[:, None]


def _patches(random: np.random.Generator, count: int, side: int) -> Field:
    """Soft patches from -1 to 1: random values on a coarse grid, blended linearly between its points."""
    coarse = 5
    values = _uniform(random, -1, 1, count, coarse + 1, coarse + 1)
    place = (np.arange(side, dtype=np.float32) + np.float32(0.5)) * np.float32(coarse / side)
    cell = np.minimum(place.astype(np.int64), coarse - 1)
    weight = (place - cell).astype(np.float32)
    rows = values[:, cell] * (1 - weight)[None, :, None] + values[:, cell + 1] * weight[None, :, None]
    return rows[:, :, cell] * (1 - weight) + rows[:, :, cell + 1] * weight


def _scatter(random: np.random.Generator, canvas: np.ndarray, color: np.ndarray, side: int) -> None:
    """Clutter behind the shapes: up to two dots and, in half the images, a thin line."""
    across, down = _grid(side)
    count = len(canvas)
    for place in range(2):
        x, y = (_uniform(random, -1, 1, count, 1, 1) for _ in range(2))
        distance = np.sqrt((across - x) ** 2 + (down - y) ** 2) - _uniform(random, 0.05, 0.13, count, 1, 1)
        shown = random.integers(0, 3, count) > place
        _blend(canvas, color, _smooth(distance, 2 / side) * shown[:, None, None])
    angle = random.random(count) * np.pi
    cosine, sine = (f(angle).astype(np.float32)[:, None, None] for f in (np.cos, np.sin))
    distance = np.abs(cosine * across + sine * down - _uniform(random, -0.9, 0.9, count, 1, 1)) - np.float32(0.03)
    shown = random.random(count) < 0.5
    _blend(canvas, color, 0.7 * _smooth(distance, 2 / side) * shown[:, None, None])


def _smooth(distance: Field, pixel: float | np.ndarray) -> Field:
    """Fraction of a pixel that lies inside, from the signed distance of its center to the outline."""
    return np.clip(np.float32(0.5) - distance / np.float32(pixel), 0, 1)


def _coverage(random: np.random.Generator, kind: np.ndarray, side: int) -> Field:
    """Fraction of every pixel that an image's shapes cover: four on a ring, each with its own scale and rotation.

    Four copies, so that a random crop still shows the class; the ring lies anywhere, so that pixels do not line up.
    """
    across, down = _grid(side)
    count = len(kind)
    coverage = np.zeros((count, side, side), dtype=np.float32)
    ring = random.random(count) * np.pi / 2
    radius = _uniform(random, 0.55, 0.80, count, 1, 1)
    shift_x, shift_y = (_uniform(random, -0.25, 0.25, count, 1, 1) for _ in range(2))
    for quarter in range(4):
        at = ring + quarter * np.pi / 2
        x = shift_x + radius * np.cos(at).astype(np.float32)[:, None, None]
        y = shift_y + radius * np.sin(at).astype(np.float32)[:, None, None]
        scale = _uniform(random, 0.30, 0.46, count, 1, 1)
        angle = (random.random(count) - 0.5) * 2 * np.radians(35)
        cosine, sine = (f(angle).astype(np.float32)[:, None, None] for f in (np.cos, np.sin))
        stretch = _uniform(random, 0.88, 1.12, count, 1, 1)
        u = (cosine * (across - x) + sine * (down - y)) / (scale * stretch)
        v = (cosine * (down - y) - sine * (across - x)) / scale
        for number, distance in enumerate(CLASSES.values()):
            mine = kind == number
            inside = _smooth(distance(u[mine], v[mine]) * scale[mine], 2 / side)
            coverage[mine] = np.maximum(coverage[mine], inside)
    return coverage


def _polygon(*corners: tuple[float, float]) -> Callable[[Field, Field], Field]:
    """The signed distance to a polygon: that to its nearest edge, negative inside by the parity of crossings."""
    edges = list(zip(corners, corners[1:] + corners[:1], strict=True))

    def distance(u: Field, v: Field) -> Field:
        nearest, inside = np.full(u.shape, 1e9, dtype=np.float32), np.zeros(u.shape, dtype=bool)
        for (x0, y0), (x1, y1) in edges:
            dx, dy = np.float32(x1 - x0), np.float32(y1 - y0)
            px, py = u - np.float32(x0), v - np.float32(y0)
            along = np.clip((px * dx + py * dy) / (dx * dx + dy * dy), 0, 1)
            nearest = np.minimum(nearest, (px - along * dx) ** 2 + (py - along * dy) ** 2)
            if dy != 0:
                inside ^= ((v >= y0) != (v >= y1)) & (px < py * (dx / dy))
        return np.where(inside, -np.sqrt(nearest), np.sqrt(nearest))

    return distance


def _box(u: Field, v: Field, width: float, height: float) -> Field:
    return np.maximum(np.abs(u) - np.float32(width), np.abs(v) - np.float32(height))


def _circle(u: Field, v: Field, radius: float, x: float = 0, y: float = 0) -> Field:
    return np.sqrt((u - np.float32(x)) ** 2 + (v - np.float32(y)) ** 2) - np.float32(radius)


def _heart(u: Field, v: Field) -> Field:
    lobes = _circle(np.abs(u), v, 0.53, x=0.46, y=-0.38)
    return np.minimum(lobes, _HEART_TIP(u, v))


def _star_corners(points: int, inner: float) -> list[tuple[float, float]]:
    turns = np.arange(2 * points) * np.pi / points
    radii = np.where(np.arange(2 * points) % 2 == 0, 1.0, inner)
    return [(float(r * np.sin(a)), float(-r * np.cos(a))) for r, a in zip(radii, turns, strict=True)]


_HEART_TIP = _polygon((-0.9, -0.09), (0.0, -0.5), (0.9, -0.09), (0.0, 0.95))

CLASSES: dict[str, Callable[[Field, Field], Field]] = {
    "disc": lambda u, v: _circle(u, v, 0.85),
    "ring": lambda u, v: np.abs(_circle(u, v, 0.72)) - np.float32(0.2),
    "square": lambda u, v: _box(u, v, 0.78, 0.78),
    "triangle": _polygon((0.0, -1.0), (0.95, 0.75), (-0.95, 0.75)),
    "star": _polygon(*_star_corners(5, 0.42)),
    "cross": lambda u, v: np.minimum(_box(u, v, 0.95, 0.28), _box(u, v, 0.28, 0.95)),
    "crescent": lambda u, v: np.maximum(_circle(u, v, 0.92), -_circle(u, v, 0.78, x=0.45)),
    "heart": _heart,
    "bars": lambda u, v: _box(np.abs(u) - np.float32(0.58), v, 0.24, 0.92),
    "arrow": _polygon(
        (0.0, -1.0), (0.85, -0.05), (0.3, -0.05), (0.3, 0.95), (-0.3, 0.95), (-0.3, -0.05), (-0.85, -0.05)
    ),
}

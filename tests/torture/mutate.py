"""Changes of bytes as damage and malice make them: flips, cuts, repeats, numbers too large, and pieces of attacks."""

import io
import json
import zipfile
from collections.abc import Sequence
from random import Random

NUMBERS = (0, 1, -1, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, -(2**31), 2**32 - 1, 2**40, 2**63 - 1)
TEXTS = (b"-1", b"0", b"999999999999", b"1e999", b"nan", b"\xff\xfe", b"\x00", b"null", b"true", b"{}", b"[]", b'""')


def mutated(content: bytes, draw: Random, tokens: Sequence[bytes] = ()) -> bytes:
    """One to eight random changes of a file's content; at least one byte differs, or the length does."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 5, 8))):
        draw.choice(CHANGES)(changed, draw, tokens)
    if changed == content:
        _flip(changed, draw, tokens)
    return bytes(changed)


def _place(content: bytearray, draw: Random) -> int:
    """Headers are short and decide the most: every second place is within the first 200 bytes."""
    return draw.randrange(min(len(content), 200) if draw.random() < 0.5 else len(content)) if content else 0


def _span(content: bytearray, draw: Random) -> slice:
    start = _place(content, draw)
    return slice(start, start + draw.choice((1, 2, 4, 8, 64, 1024)))


def _flip(content: bytearray, draw: Random, tokens: Sequence[bytes]) -> None:
    if content:
        content[_place(content, draw)] ^= 1 << draw.randrange(8)
    else:
        content.append(draw.randrange(256))


def _random_bytes(content: bytearray, draw: Random, tokens: Sequence[bytes]) -> None:
    span = _span(content, draw)
    content[span] = draw.randbytes(len(content[span]))


def _zero(content: bytearray, draw: Random, tokens: Sequence[bytes]) -> None:
    span = _span(content, draw)
    content[span] = bytes(len(content[span]))


def _cut(content: bytearray, draw: Random, tokens: Sequence[bytes]) -> None:
    del content[draw.randrange(len(content) + 1) :]


def _remove(content: bytearray, draw: Random, tokens: Sequence[bytes]) -> None:
    del content[_span(content, draw)]


def _repeat(content: bytearray, draw: Random, tokens: Sequence[bytes]) -> None:
    span, place = _span(content, draw), _place(content, draw)
    content[place:place] = bytes(content[span]) * draw.choice((1, 1, 2, 50))


def _number(content: bytearray, draw: Random, tokens: Sequence[bytes]) -> None:
    width, order = draw.choice((1, 2, 4, 8)), draw.choice(("little", "big"))
    value = draw.choice(NUMBERS) % 2 ** (8 * width)
    place = _place(content, draw)
    content[place : place + width] = value.to_bytes(width, order)


def _token(content: bytearray, draw: Random, tokens: Sequence[bytes]) -> None:
    token, place = draw.choice((*tokens, *TEXTS)), _place(content, draw)
    content[place : place + draw.choice((0, len(token)))] = token


def _digits(content: bytearray, draw: Random, tokens: Sequence[bytes]) -> None:
    """Another number where one stands as text."""
    places = [place for place, byte in enumerate(content[:20_000]) if 48 <= byte <= 57]
    if places:
        place = draw.choice(places)
        content[place : place + 1] = draw.choice((b"9", b"0", b"-7", b"99999999999", b"1.5", b"x"))


CHANGES = (_flip, _flip, _random_bytes, _zero, _cut, _remove, _repeat, _number, _number, _token, _token, _digits)


def mutated_zip(content: bytes, draw: Random, tokens: Sequence[bytes]) -> bytes:
    """A zip file with one member changed and all checksums right: what an attacker or another version would write."""
    source, target = zipfile.ZipFile(io.BytesIO(content)), io.BytesIO()
    names = source.namelist()
    chosen = next(name for name in names if name.endswith("data.pkl")) if draw.random() < 0.8 else draw.choice(names)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as file:
        for name in names:
            member = source.read(name)
            if name == chosen and draw.random() < 0.05:
                continue
            file.writestr(name, mutated(member, draw, tokens) if name == chosen else member)
    return target.getvalue()


def mutated_safetensors(content: bytes, draw: Random, tokens: Sequence[bytes]) -> bytes:
    """A safetensors file whose header is changed and has the length that it says."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    if draw.random() < 0.5:
        header = mutated(header, draw, tokens)
    else:
        header = json.dumps(_changed_tree(json.loads(header), draw)).encode()
    return len(header).to_bytes(8, "little") + header + data


def mutated_json(content: bytes, draw: Random, tokens: Sequence[bytes]) -> bytes:
    """JSON with one value exchanged, removed or of another type, and still JSON."""
    return json.dumps(_changed_tree(json.loads(content), draw)).encode()


ODD: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    10**12,
    1.5,
    float("nan"),
    "",
    "x",
    "../../etc/passwd",
    [],
    {},
    [[[]]],
    {"a": {"b": []}},
)


def _changed_tree(tree: object, draw: Random) -> object:
    """One place of nested containers changed; text that is JSON is changed within."""
    if isinstance(tree, str) and tree.startswith("{") and draw.random() < 0.8:
        try:
            return json.dumps(_changed_tree(json.loads(tree), draw))
        except ValueError:
            return draw.choice(ODD)
    if isinstance(tree, dict) and tree and draw.random() < 0.85:
        key = draw.choice(sorted(tree))
        kept = {name: value for name, value in tree.items() if name != key}
        what = draw.random()
        if what < 0.12:
            return kept
        if what < 0.2:
            return kept | {f"{key}x": tree[key]}
        return tree | {key: _changed_tree(tree[key], draw)}
    if isinstance(tree, list) and tree and draw.random() < 0.85:
        place = draw.randrange(len(tree))
        changed = [] if draw.random() < 0.2 else [_changed_tree(tree[place], draw)]
        return [*tree[:place], *changed, *tree[place + 1 :]]
    return draw.choice(ODD)

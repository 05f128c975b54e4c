"""Shards of a server: copies within a bound, and a server that stalls, truncates or changes its files."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from psm.config.schema import ImagesConfig, ViewsConfig
from psm.data import load_dataset, shard_files
from psm.data.shard_writer import write_shards
from psm.data.stream_loader import StreamLoader
from psm.utils.errors import UserError
from psm.utils.seeding import generator
from psm.views.transform import Views

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


class Server:
    """Serves a folder without ranges. ``faults`` maps a file to what goes wrong with it; ``sent`` lists requests."""

    def __init__(self, folder: Any):
        self.folder, self.faults, self.sent = folder, {}, []
        self.released = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(head=True)

            def do_GET(self) -> None:
                self.answer(head=False)

            def answer(self, head: Any) -> None:
                name = self.path.lstrip("/")
                file, fault = server.folder / name, server.faults.get(name)
                if not file.exists() or fault == "missing":
                    self.send_error(404)
                    return
                content = file.read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("ETag", f'"{hash(content)}"')
                self.end_headers()
                if head:
                    return
                server.sent.append(name)
                if fault == "stalls":
                    self.wfile.write(content[:1000])
                    self.wfile.flush()
                    server.released.wait(20)
                elif fault == "truncates":
                    self.wfile.write(content[:1000])
                elif fault == "truncates once":
                    server.faults.pop(name)
                    self.wfile.write(content[:1000])
                else:
                    self.wfile.write(content)

            def log_message(self, *given: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Eight shards of eight images; a stalled transfer is given up at once."""
    monkeypatch.setattr(shard_files, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(shard_files, "ATTEMPTS", 2)
    (tmp_path / "photos").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 16, 16, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "photos" / f"{number}.bmp")
    write_shards(str(tmp_path / "photos"), str(tmp_path / "web" / "%06d.tar"), ImagesConfig(), 8 * 1536)
    server = Server(tmp_path / "web")
    yield server
    server.close()


def read(server: Any, tmp_path: Any, **more: Any) -> Any:
    count = len(list(server.folder.glob("*.tar")))
    config = ImagesConfig(cache=str(tmp_path / "cache"), size=16, labels="none", **more)
    return load_dataset(f"{server.url}/{{000000..{count - 1:06}}}.tar", config, progress=False)


def loader(data: Any, step: Any = 0) -> Any:
    views = Views(ViewsConfig(size=16), 16, (0.5,) * 3, (0.2,) * 3)

    def draws(step: Any) -> Any:
        params = views.sample_params(8, generator(0, "views", step))
        return params.crop_draws(views.settings.crop_ratio)

    return StreamLoader(data.train.streamed, 8, 5, draws, 16, lambda: step)


def copied(tmp_path: Any) -> Any:
    """Bytes of all copies."""
    return sum(file.stat().st_size for file in (tmp_path / "cache" / "shards").glob("*.tar"))


def test_a_remote_set_is_the_local_set(server: Any, tmp_path: Path) -> None:
    local = load_dataset(str(server.folder), ImagesConfig(cache=str(tmp_path / "c"), size=16, labels="none"), False)
    remote = read(server, tmp_path)
    assert list(remote.train.names) == list(local.train.names)
    for one, other in zip(loader(remote), loader(local), strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.images, other.images)
    drop_copies(tmp_path)
    server.faults |= dict.fromkeys((file.name for file in server.folder.glob("*.tar")), "truncates")
    assert list(read(server, tmp_path).train.names) == list(local.train.names)  # the index is known: nothing is copied


def test_a_slow_file_system_is_copied_and_listed(server: Any, tmp_path: Path) -> None:
    config = ImagesConfig(cache=str(tmp_path / "cache"), size=16, labels="none")
    data = load_dataset(f"file://{server.folder}/*.tar", config, progress=False)
    assert len(data.train) == 64
    assert copied(tmp_path) == sum(file.stat().st_size for file in server.folder.glob("*.tar"))
    with pytest.raises(UserError, match="matches no shard"):
        load_dataset(f"file://{server.folder}/x*.tar", config, progress=False)


def test_copies_stay_within_the_bound_and_are_dropped(server: Any, tmp_path: Path) -> None:
    sizes = [file.stat().st_size for file in server.folder.glob("*.tar")]
    size = max(sizes)
    data = read(server, tmp_path, window=1, shard_cache=6.5 * size / 1e9)
    assert 0 < copied(tmp_path) <= 6.5 * size < sum(sizes)
    assert all(0 < copied(tmp_path) <= 6.5 * size for _ in loader(data))
    with pytest.raises(UserError, match=r"images.shard_cache.*cannot hold the 8 shards in use"):
        read(server, tmp_path, window=4, shard_cache=6.5 * size / 1e9)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("stalls", "nothing for 1 seconds|[Tt]imeout"),
        ("truncates", "of .* bytes|not completed|payload"),
        ("missing", "does not exist"),
    ],
)
def test_a_failing_server_at_the_start(server: Any, tmp_path: Path, fault: Any, reason: Any) -> None:
    server.faults["000002.tar"] = fault
    with pytest.raises(UserError, match=rf"of \d+ images in \d+ shards cannot be read.*000002.tar \(.*({reason})"):
        read(server, tmp_path, max_unreadable=0.05)
    data = read(server, tmp_path, max_unreadable=0.3)
    assert [file.rpartition("/")[2] for file, _ in data.unreadable] == ["000002.tar"]
    assert 0 < len(data.train) < 64


def test_a_transfer_that_fails_once_is_repeated(server: Any, tmp_path: Path) -> None:
    server.faults["000001.tar"] = "truncates once"
    data = read(server, tmp_path)
    assert (len(data.train), data.unreadable) == (64, ())


def drop_copies(tmp_path: Any) -> None:
    for file in (tmp_path / "cache" / "shards").glob("*.tar"):
        file.unlink()


def test_a_server_that_fails_during_training(server: Any, tmp_path: Path) -> None:
    strict, allowed = (read(server, tmp_path, window=2, max_unreadable=share) for share in (0.05, 0.3))
    server.faults["000001.tar"] = "truncates"
    lost = {i for i in range(64) if allowed.train.streamed.table.shard[i] == 1}
    drop_copies(tmp_path)
    ids = torch.cat([batch.ids for batch in loader(allowed)])
    assert len(ids) == 64
    assert not lost & set(ids.tolist())
    drop_copies(tmp_path)
    with pytest.raises(UserError, match=rf"{len(lost)} of 64 images in the shards cannot be read.*000001.tar"):
        list(loader(strict))


def test_a_shard_that_the_server_replaced(server: Any, tmp_path: Path) -> None:
    data = read(server, tmp_path, window=2, max_unreadable=0.3)
    (server.folder / "000000.tar").write_bytes((server.folder / "000001.tar").read_bytes())
    drop_copies(tmp_path)
    list(loader(data))
    assert dict(data.train.streamed.unreadable)[f"{server.url}/000000.tar"].startswith("it has changed")


def test_a_server_that_is_gone_ends_the_run(server: Any, tmp_path: Path) -> None:
    data = read(server, tmp_path, window=2, max_unreadable=1.0)
    server.faults |= dict.fromkeys((file.name for file in server.folder.glob("*.tar")), "missing")
    drop_copies(tmp_path)
    with pytest.raises(UserError, match="no image of 2 shards in use can be read"):
        list(loader(data))

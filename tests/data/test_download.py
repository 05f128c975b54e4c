"""Downloads, against a server on this machine that can misbehave."""

import hashlib
import io
import socket
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psm.config.schema import ImagesConfig
from psm.data import download, load_dataset
from psm.data import registry as catalog
from psm.data.registry import Archive
from psm.utils.errors import UserError

CONTENT = np.random.default_rng(0).bytes(700_000)
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()


class Server:
    """Serves one content; ``drop`` ends every answer after so many bytes, ``stall`` never answers."""

    def __init__(self, content: Any = CONTENT) -> None:
        self.content, self.ranges, self.drop, self.status, self.stall = content, True, None, None, False
        self.asked = []
        self.release = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/file.tar.gz"

    def close(self) -> None:
        self.release.set()
        self._http.shutdown()
        self._http.server_close()

    def _handler(owner: Any) -> Any:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                owner.asked.append(wanted)
                if owner.stall:
                    owner.release.wait(20)
                    return
                if owner.status:
                    self.send_error(owner.status)
                    return
                start = int(wanted[len("bytes=") : -1]) if wanted and owner.ranges else 0
                total = len(owner.content)
                if start >= total:
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{total}")
                    self.end_headers()
                    return
                self.send_response(206 if start else 200)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
                self.send_header("Content-Length", str(total - start))
                self.end_headers()
                self.wfile.write(owner.content[start:][: owner.drop])

            def log_message(self, *arguments: Any) -> None:
                pass

        return Handler


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("no_proxy", "*")
    one = Server()
    yield one
    one.close()


def test_a_plain_download(server: Any, tmp_path: Path) -> None:
    download.fetch(server.url, tmp_path / "x", MD5, progress=False)
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
    download.fetch(server.url, tmp_path / "y", "sha256:" + hashlib.sha256(CONTENT).hexdigest(), progress=False)


def test_a_part_is_resumed(server: Any, tmp_path: Path) -> None:
    (tmp_path / "x.part").write_bytes(CONTENT[:123_456])
    download.fetch(server.url, tmp_path / "x", MD5, progress=False)
    assert server.asked == ["bytes=123456-"]
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_a_server_without_ranges_begins_again(server: Any, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "x.part").write_bytes(b"?" * 1000)
    download.fetch(server.url, tmp_path / "x", MD5, progress=False)
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_a_part_that_is_complete_needs_nothing_more(server: Any, tmp_path: Path) -> None:
    (tmp_path / "x.part").write_bytes(CONTENT)
    download.fetch(server.url, tmp_path / "x", MD5, progress=False)
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_a_part_longer_than_the_file_is_thrown_away(server: Any, tmp_path: Path) -> None:
    (tmp_path / "x.part").write_bytes(CONTENT + b"more")
    download.fetch(server.url, tmp_path / "x", MD5, progress=False)
    assert server.asked == [f"bytes={len(CONTENT) + 4}-", None]
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_a_dropped_connection_is_taken_up_where_it_broke(server: Any, tmp_path: Path) -> None:
    server.drop = 300_000
    download.fetch(server.url, tmp_path / "x", MD5, progress=False)
    assert server.asked == [None, "bytes=300000-", "bytes=600000-"]
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_a_server_that_always_drops_at_the_same_place_ends_with_a_reason(server: Any, tmp_path: Path) -> None:
    server.drop, server.ranges = 300_000, False
    with pytest.raises(UserError, match=r"broke off.*300,000 bytes are kept.*put it as"):
        download.fetch(server.url, tmp_path / "x", MD5, progress=False)
    assert [file.name for file in tmp_path.iterdir()] == ["x.part"]


def test_a_wrong_checksum_deletes_the_file(server: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"arrived damaged, its md5 is not 0000.*deleted"):
        download.fetch(server.url, tmp_path / "x", "md5:" + "0" * 32, progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("status", [404, 403, 500])
def test_a_refusal_is_reported(server: Any, tmp_path: Path, status: Any) -> None:
    server.status = status
    with pytest.raises(UserError, match=f"the server says {status}"):
        download.fetch(server.url, tmp_path / "x", MD5, progress=False)
    assert list(tmp_path.iterdir()) == []
    assert len(server.asked) == 1


def test_a_server_that_never_answers(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    server.stall = True
    with pytest.raises(UserError, match="timed out"):
        download.fetch(server.url, tmp_path / "x", MD5, progress=False)


def closed_url() -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/set.tar.gz"


def test_offline_says_where_from_and_where_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    archive = Archive(closed_url(), MD5, "set")
    with pytest.raises(UserError) as caught:
        download.install(archive, tmp_path / "data", progress=False)
    for text in (archive.url, "refused", str(tmp_path / "data" / "set.tar.gz"), str(tmp_path / "data" / "set")):
        assert text in str(caught.value)


def test_without_download_it_says_where_to_put_the_files(tmp_path: Path) -> None:
    for name in ("cifar10", "cifar100", "tiny-imagenet"):
        with pytest.raises(UserError, match=r"images.download is off; put http") as caught:
            load_dataset(name, ImagesConfig(root=str(tmp_path / "data"), download=False), progress=False)
        assert str(tmp_path / "data" / catalog.ARCHIVES[name].folder) in str(caught.value)
    assert not (tmp_path / "data").exists()


def tar(members: Any) -> Any:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc"
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zipped(members: Any) -> Any:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def visible(folder: Any) -> Any:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.name.startswith("."))


@pytest.mark.parametrize("pack", [tar, zipped])
def test_install_downloads_unpacks_and_clears_up(server: Any, tmp_path: Path, pack: Any) -> None:
    server.content = pack({"set/one.txt": b"1", "set/deep/two.txt": b"2"})
    archive = Archive(server.url, "md5:" + hashlib.md5(server.content).hexdigest(), "set")
    root = tmp_path / "data"
    download.install(archive, root, progress=False)
    assert visible(root) == ["set", "set/deep", "set/deep/two.txt", "set/one.txt"]
    assert (root / "set/deep/two.txt").read_bytes() == b"2"
    download.install(archive, root, progress=False)
    assert len(server.asked) == 1


def test_an_archive_put_there_by_hand_is_used_and_kept(tmp_path: Path) -> None:
    content = tar({"set/one.txt": b"1"})
    (tmp_path / "set.tar.gz").write_bytes(content)
    archive = Archive("http://nowhere.invalid/set.tar.gz", "md5:" + hashlib.md5(content).hexdigest(), "set")
    download.install(archive, tmp_path, progress=False, download=False)
    assert visible(tmp_path) == ["set", "set.tar.gz", "set/one.txt"]


def test_a_wrong_archive_put_there_by_hand_is_refused_but_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz").write_bytes(b"something else")
    with pytest.raises(UserError, match="not the published archive"):
        download.install(Archive("http://nowhere.invalid/set.tar.gz", MD5, "set"), tmp_path, progress=False)
    assert visible(tmp_path) == ["set.tar.gz"]


@pytest.mark.parametrize(
    "content",
    [
        tar({"set/x": b"1", "../escaped": b"2"}),
        tar({"set/x": b"1", "/tmp/../escaped-absolutely/../../escaped": b"2", "../escaped": b"3"}),
        tar({"set/link": None}),
        zipped({"set/x": b"1", "../escaped": b"2"}),
        zipped({"set/x": b"1", "/escaped": b"2"}),
        zipped({"other/x": b"1"}),
        tar({"set/x": CONTENT})[:-5000],
        b"no archive",
    ],
    ids=[
        "tar outside",
        "tar absolute",
        "tar link",
        "zip outside",
        "zip absolute",
        "other folder",
        "cut short",
        "no archive",
    ],
)
def test_archives_that_are_refused_leave_nothing(tmp_path: Path, content: Any) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match="file"):
        download.unpack(tmp_path / "file", "set", root, progress=False)
    assert list(root.iterdir()) == []
    assert visible(tmp_path) == ["data", "file"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"set images\.root"):
        download.install(
            Archive("http://nowhere.invalid/x.zip", MD5, "set"), tmp_path / "file" / "data", progress=False
        )


def test_a_named_set_is_fetched_when_missing(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the name to the images, over the network."""
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    members = {f"cifar-10-batches-bin/{name}": bytes(3073) * 2 for name in names}
    members["cifar-10-batches-bin/batches.meta.txt"] = "\n".join("abcdefghij").encode()
    server.content = tar(members)
    checksum = "md5:" + hashlib.md5(server.content).hexdigest()
    monkeypatch.setitem(catalog.ARCHIVES, "cifar10", Archive(server.url, checksum, "cifar-10-batches-bin"))
    data = load_dataset("cifar10", ImagesConfig(root=str(tmp_path / "data")), progress=False)
    assert (len(data.train), len(data.test)) == (10, 2)

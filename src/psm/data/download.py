"""Download a published archive: resumed where it stopped, verified, unpacked beside its place and renamed into it.

Written on urllib rather than pooch because pooch starts a broken download from the beginning, and these servers are
slow. An incomplete download stays in ``<archive>.part`` for the next attempt; nothing else is left behind.
"""

import hashlib
import http.client
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path, PurePosixPath

from psm.data.registry import Archive
from psm.utils.errors import ResourceError, UserError
from psm.utils.locking import locked
from psm.utils.progress import counting, transferring
from psm.utils.resources import is_disk_full

TIMEOUT = 30.0  # seconds without a byte, after which the connection is given up
_BLOCK = 1 << 18


def install(archive: Archive, root: Path, progress: bool, download: bool = True) -> None:
    """Make ``root / archive.folder`` exist, from the archive if that lies in ``root``, else from the network."""
    try:
        if not download and not (root / archive.file).is_file():
            raise UserError(f"{archive.folder} is not in {root} and images.download is off; {by_hand(archive, root)}.")
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f".{archive.folder}.lock"):
            if (root / archive.folder).is_dir():  # another process was faster
                return
            _install(archive, root, progress)
    except OSError as error:
        raise (ResourceError if is_disk_full(error) else UserError)(
            f"{archive.folder} cannot be stored in {root} ({error.strerror or error}); set images.root to a folder "
            "you can write, with enough space for it."
        ) from None


def _install(archive: Archive, root: Path, progress: bool) -> None:
    file = root / archive.file
    if file.is_file():
        if not matches(file, archive.checksum):
            raise UserError(
                f"{file} is not the published archive, its {_kind(archive.checksum)} differs; remove it to download it "
                f"again, or replace it by {archive.url}."
            )
        unpack(file, archive.folder, root, progress)
        return
    fetch(archive.url, file, archive.checksum, progress, by_hand(archive, root))
    unpack(file, archive.folder, root, progress)
    file.unlink()


def by_hand(archive: Archive, root: Path) -> str:
    """What to do instead of the download, for error messages."""
    return f"put {archive.url} as {root / archive.file}, or its unpacked folder as {root / archive.folder}"


def fetch(url: str, target: Path, checksum: str | None, progress: bool = True, otherwise: str | None = None) -> None:
    """Download a file.

    Args:
        url: where from.
        target: where to.
        checksum: "md5:..." or "sha256:...", or None.
        progress: whether to show a bar.
        otherwise: what to do instead, for error messages.
    """
    part = target.with_name(target.name + ".part")
    otherwise = otherwise or f"put it as {target} yourself"
    most, reason = -1, ""
    # Retry as long as an attempt brought something.
    while (have := part.stat().st_size if part.exists() else 0) > most:
        most = have
        try:
            if _attempt(url, part, progress):
                break
            reason = "the connection broke off"
        except urllib.error.HTTPError as error:
            raise UserError(
                f"{url} cannot be downloaded, the server says {error.code} {error.reason}; {otherwise}."
            ) from None
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            reason = str(getattr(error, "reason", "") or error or type(error).__name__)
    else:
        raise UserError(
            f"{url} cannot be downloaded ({reason}); try again when the network is there ({have:,} bytes are kept), "
            f"or {otherwise}."
        )
    if checksum and not matches(part, checksum):
        part.unlink()
        raise UserError(
            f"{url} arrived damaged, its {_kind(checksum)} is not {checksum.split(':')[1]}; the file was deleted, try "
            f"again, or {otherwise}."
        )
    part.replace(target)


def _attempt(url: str, part: Path, progress: bool) -> bool:
    """Append what the server sends to the part file; True if the file is complete."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "psm", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # the part is as long as the file, or longer than it
            if error.headers.get("Content-Range", "").rpartition("/")[2] == str(have):
                return True
            part.unlink()
            return _attempt(url, part, progress)
        raise
    with response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if not resumed:  # the server knows no ranges and begins again
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if resumed else "wb") as file, transferring(part.stem, total, progress) as done:
            while block := response.read(_BLOCK):
                file.write(block)
                have += len(block)
                done(have)
    return total is None or have == total


def _kind(checksum: str) -> str:
    return checksum.split(":")[0]


def matches(file: Path, checksum: str) -> bool:
    """True if a file has the checksum, "md5:..." or "sha256:..."."""
    kind, _, value = checksum.partition(":")
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest() == value


def unpack(file: Path, folder: str, root: Path, progress: bool = True) -> None:
    """Unpack an archive's folder into ``root``, whole or not at all. No member may leave the folder."""
    beside = root / f".{folder}.unpacking"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        if zipfile.is_zipfile(file):
            _unpack_zip(file, beside, progress)
        else:
            _unpack_tar(file, beside, progress)
        if not (beside / folder).is_dir():
            raise UserError(f"{file} holds no folder {folder}; replace it by the published archive.")
        (beside / folder).rename(root / folder)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{file} cannot be unpacked ({error}); replace it by the published archive.") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _unpack_tar(file: Path, target: Path, progress: bool) -> None:
    with tarfile.open(file) as archive:
        members = archive.getmembers()
        with counting(f"unpacking {file.name}", len(members), progress) as done:
            for number, member in enumerate(members, 1):
                archive.extract(member, target, filter="data")
                done(number)


def _unpack_zip(file: Path, target: Path, progress: bool) -> None:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        for name in names:
            path = PurePosixPath(name.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts:
                raise UserError(f"{file} was refused, its member {name!r} would be written outside the target folder.")
        with counting(f"unpacking {file.name}", len(names), progress) as done:
            for number, name in enumerate(names, 1):
                archive.extract(name, target)
                done(number)

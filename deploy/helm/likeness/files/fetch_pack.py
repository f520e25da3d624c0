"""Fetches a face pack, checks its SHA-256 and unpacks it: fetch_pack.py URL SHA256 DIRECTORY.

Standard library only. The directory appears when it is complete; one that is there already is kept. PACK_AUTHORIZATION,
when set, is sent as Authorization header, and not to where the server redirects.
"""

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

TIMEOUT_S = 60
CHUNK_BYTES = 2**20


def download(url: str, target: Path) -> str:
    """Writes what a URL answers to a file; returns its SHA-256, hexadecimal."""
    request = urllib.request.Request(url)
    if authorization := os.environ.get("PACK_AUTHORIZATION"):
        request.add_unredirected_header("Authorization", authorization)
    digest = hashlib.sha256()
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer, target.open("wb") as file:
        while chunk := answer.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def unpack(archive: Path, target: Path) -> None:
    """Unpacks a zip or tar archive; raises ValueError for anything else. Nothing is written outside `target`."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as source:
            source.extractall(target)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as source:
            source.extractall(target, filter="data")
    else:
        raise ValueError("it is neither a zip nor a tar archive")


def folder_with_networks(root: Path) -> Path:
    """Returns the one folder that holds *.onnx; raises ValueError when there is none, or more than one."""
    folders = sorted({path.parent for path in root.rglob("*.onnx")})
    if len(folders) != 1:
        names = ", ".join(str(folder.relative_to(root)) for folder in folders) or "none"
        raise ValueError(f"one folder with *.onnx is expected, found {names}")
    return folders[0]


def fetch(url: str, sha256: str, directory: Path) -> None:
    """Makes `directory` from the archive at `url`; raises ValueError or OSError and leaves nothing behind."""
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".fetch-") as temporary:
        archive, unpacked = Path(temporary) / "archive", Path(temporary) / "unpacked"
        found = download(url, archive)
        if found != sha256.lower():
            raise ValueError(f"its SHA-256 is {found}, expected was {sha256.lower()}")
        unpacked.mkdir()
        unpack(archive, unpacked)
        shutil.move(folder_with_networks(unpacked), directory)
    print(f"{directory}: {', '.join(sorted(path.name for path in directory.iterdir()))}")


def main() -> None:
    """Runs the command; exits with a line that says what is wrong."""
    url, sha256, name = sys.argv[1:]
    if Path(name).exists():
        print(f"{name} is there already")
        return
    try:
        fetch(url, sha256, Path(name))
    except (ValueError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        sys.exit(f"error: pack {url}: {error}")


if __name__ == "__main__":
    main()

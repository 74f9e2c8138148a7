"""Downloads one large file with curl, in as many tries as it takes, and checks it.

    source = look_up(url, folder)       # size, MD5 and release, where UniProt tells them
    path = download(source, folder)     # there when it is whole and checked
    with stream(source) as file: ...    # its beginning only, nothing is kept

A lost connection is continued at the byte reached, also by the next call. curl says itself what the
network or the server does. prepare_uniref50.py uses this.
"""
import contextlib
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

METALINK = "RELEASE.metalink"   # UniProt's list of files with size and MD5, beside the files
CHUNK = 1 << 20                 # bytes per read
TRIES = 8                       # calls of curl in a row that bring no byte, over four minutes
NO_RANGES = 33                  # curl's exit code for a server that cannot continue a file
PAUSE = 2.0                     # seconds after the first of these; doubled each time
GZIP = b"\x1f\x8b"              # the first two bytes of a gzip file
# A connection that brings nothing for a minute counts as lost. Brackets in an address mean
# themselves. Not --retry: with it, curl throws away what came before it lost the connection.
CURL = ("curl", "--fail", "--location", "--globoff", "--speed-limit", "1", "--speed-time", "60")
QUIET = ("--silent", "--show-error")
CURL_ADVICE = ("Check the network (on a cluster: a login node, or set https_proxy), name a mirror "
               "(--url), or give files of your own (--fasta)")


class Source(NamedTuple):
    """A file to download: size in bytes, MD5 in hex and release, each None where not known."""
    url: str
    size: int | None = None
    md5: str | None = None
    release: str | None = None


def look_up(url: str, folder: Path) -> Source:
    """The Source of a url, by RELEASE.metalink beside it. The list is kept in the folder, so that a
    finished download needs no network.

    Raises: OSError without curl."""
    listing = downloaded_path(url, folder).with_suffix(".metalink")
    if not downloaded_path(url, folder).exists():
        listing.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        run_curl(urljoin(url, METALINK), *QUIET, "--output", str(listing))
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    try:
        return read_metalink(listing, url, name)
    except (OSError, ValueError, TypeError, xml.etree.ElementTree.ParseError) as error:
        print(f"{safe_url(url)}: MD5 and release are not known and not checked ({error}).",
              file=sys.stderr)
        return Source(url)


def read_metalink(listing: Path, url: str, name: str) -> Source:
    """The Source of a file by its name in a list. Raises: ValueError where the list lacks it."""
    root = xml.etree.ElementTree.parse(listing).getroot()
    entries = [entry for entry in root.iterfind(".//{*}file") if entry.get("name") == name]
    md5 = ""
    if entries:
        md5 = entries[0].findtext(".//{*}hash[@type='md5']", "")
    if not re.fullmatch("[0-9a-fA-F]{32}", md5):
        raise ValueError(f"{METALINK} has no MD5 of {name}")
    size = int(entries[0].findtext("{*}size"))
    return Source(url, size, md5.lower(), root.findtext("{*}version"))


def downloaded_path(url: str, folder: Path) -> Path:
    """Where a url is downloaded to: of another url, another file."""
    return folder / quote(safe_url(url), safe="")


def download(source: Source, folder: Path) -> Path:
    """Download a Source into the folder -> its path. The same call continues it, or finds it there.

    Raises: OSError for what curl could not do; RuntimeError for a file that is not the one that was
    asked for: it is removed."""
    path = downloaded_path(source.url, folder)
    if path.exists():
        return path
    part = Path(f"{path}.part")
    receive(source, part)
    problem = problem_of(source, part)
    if problem:
        part.unlink()
        raise RuntimeError(f"{safe_url(source.url)}: {problem}. The data is removed; run the same "
                           "command again, or name a mirror (--url).")
    synchronise(part)
    os.replace(part, path)
    return path


def receive(source: Source, part: Path) -> None:
    """Call curl until the part is whole. What fails before a byte has come is not tried again.

    Raises: OSError."""
    progress = () if sys.stderr.isatty() else QUIET
    size_at_first = size_of(part)
    failures = 0
    while source.size is None or size_of(part) < source.size:
        before = size_of(part)
        code = run_curl(source.url, "--continue-at", "-", "--output", str(part), *progress)
        if code == 0:
            return
        if code == NO_RANGES:
            part.unlink(missing_ok=True)
            raise OSError(f"{safe_url(source.url)}: this server cannot continue a download, so "
                          f"{part} is removed. The same command begins it anew; expected a server "
                          "that can (--url).")
        after = size_of(part)
        failures = 1 if after > before else failures + 1
        if after == size_at_first or failures == TRIES:
            raise OSError(f"{safe_url(source.url)}: curl ended with code {code}, see its words "
                          f"above; {part} has {after:,} bytes. {CURL_ADVICE}; the same command "
                          "goes on (if this server cannot, remove that file first).")
        time.sleep(PAUSE * 2 ** (failures - 1))


def problem_of(source: Source, part: Path) -> str | None:
    """What shows that a downloaded file is not the one that was asked for; None: nothing."""
    if source.md5:
        print("checking the MD5 ...", file=sys.stderr)
        found = md5_of(part)
        return None if found == source.md5 else f"found MD5 {found}, expected {source.md5}"
    with open(part, "rb") as file:
        beginning = file.read(2)
    if urlsplit(source.url).path.endswith(".gz") and beginning != GZIP:
        return (f"found a file that begins with {beginning}, expected gzip. Does a proxy or a "
                "login page stand before it?")
    return None


@contextlib.contextmanager
def stream(source: Source) -> Iterator[io.BufferedReader]:
    """The bytes of a Source from its beginning, as they arrive. Nothing is kept."""
    with subprocess.Popen(command_of(source.url, *QUIET), bufsize=0,
                          stdout=subprocess.PIPE) as curl:
        try:
            yield io.BufferedReader(CurlOutput(curl, safe_url(source.url)))
        finally:
            curl.kill()


class CurlOutput(io.RawIOBase):
    """What a running curl writes. Its end raises an OSError, if curl has failed."""

    def __init__(self, curl, name):
        super().__init__()
        self.curl = curl
        self.name = name

    def readable(self):
        return True

    def readinto(self, buffer):
        n_bytes = self.curl.stdout.readinto(buffer)
        if n_bytes == 0 and self.curl.wait() != 0:
            raise OSError(f"{self.name}: curl ended with code {self.curl.returncode}, see its "
                          f"words above. {CURL_ADVICE}.")
        return n_bytes


def run_curl(url: str, *options: str) -> int:
    """Exit code of curl, whose words go to standard error. Raises: OSError without curl."""
    return subprocess.run(command_of(url, *options), check=False).returncode


def command_of(url: str, *options: str) -> list[str]:
    """The command line of curl. Raises: FileNotFoundError if it is missing."""
    if shutil.which(CURL[0]) is None:
        raise FileNotFoundError("found no program curl, which downloads; expected it in PATH. "
                                "Install it, or download the file by other means and give it "
                                "(--fasta).")
    return [*CURL, *options, "--url", url]


def size_of(path: Path) -> int:
    """Bytes of a file, 0 if it is missing."""
    return path.stat().st_size if path.exists() else 0


def md5_of(path: Path) -> str:
    """MD5 of a file, in hex."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()


def safe_url(url: str) -> str:
    """The url without user, password and query, which may be secret: to be shown or saved."""
    split = urlsplit(url)
    return urlunsplit((split.scheme, split.netloc.rpartition("@")[2], split.path, "", ""))


def synchronise(path: Path) -> None:
    """Force a file or folder to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

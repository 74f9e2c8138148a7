"""Downloads one large file, in as many tries as it takes, and checks that it is that file.

    source = look_up("https://.../uniref50.fasta.gz")     # size, MD5, release where UniProt tells
    download(source, path)                                # appears when whole and checked

A lost connection is continued at the byte reached, also by the next call, but only where the server
shows that the rest is of the same file. prepare_uniref50.py uses this. Needs tqdm.
"""
import hashlib
import http.client
import io
import json
import os
import re
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from tqdm import tqdm

METALINK = "RELEASE.metalink"   # UniProt's list of files with size and MD5, beside the files
CHUNK = 1 << 20                 # bytes per read, at most
TIMEOUT = 60                    # seconds without a byte, after which a connection counts as dropped
TRIES = 10                      # failures in a row without progress; takes about four minutes
BACKOFF = 1.0                   # seconds before the second try; doubled each time
LONGEST_WAIT = 60               # seconds between two tries
GZIP = b"\x1f\x8b"              # the first two bytes of a gzip file
NO_SERVER = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError)
ADVICE = ("Check the network (on a cluster: a login node, or set https_proxy), name a mirror "
          "(--url), or give files of your own (--fasta)")


class Source(NamedTuple):
    """A file to download: size in bytes, MD5 in hex and release, each None where not known."""
    url: str
    size: int | None = None
    md5: str | None = None
    release: str | None = None


class Dropped(OSError):
    """An error that another try may mend: a lost connection, too little data, a busy server."""


def look_up(url):
    """Source of the url, with size, MD5 and release from RELEASE.metalink beside it, if known.

    Raises ValueError for a url that is not http or https, OSError where the server does not answer.
    """
    check_url(url)
    listing = Source(urljoin(url, METALINK))
    name = unquote(urlsplit(url).path.rpartition("/")[2])

    def read_listing():
        with open_url(listing) as file:
            return file.readall()
    try:
        root = xml.etree.ElementTree.fromstring(retry(read_listing))
        entries = [entry for entry in root.iterfind(".//{*}file") if entry.get("name") == name]
        md5 = ""
        if entries:
            md5 = entries[0].findtext(".//{*}hash[@type='md5']", "")
        if not re.fullmatch("[0-9a-fA-F]{32}", md5):
            raise ValueError(f"{METALINK} has no MD5 of {name}")
        size = int(entries[0].findtext("{*}size"))
        return Source(url, size, md5.lower(), release=root.findtext("{*}version"))
    except (ValueError, RuntimeError, TypeError, xml.etree.ElementTree.ParseError) as error:
        say(f"{safe_url(url)}: MD5 and release are not known and not checked ({error}).")
        return Source(url)


def download(source, path):
    """Download a Source to path, which appears when whole and checked. The same call resumes it.

    Raises ValueError if there is no such file (wrong url, 4xx, a web page), OSError or RuntimeError
    for network, server and disk.
    """
    partial = PartialFile(source, path)
    if partial.is_finished:
        return
    if partial.differences:
        partial.clear(f"it is of another file ({', '.join(partial.differences)} differ)")
    retry(lambda: receive(source, partial), lambda: partial.size)
    synchronise(partial.part)
    if source.md5:
        found = md5_of(partial.part)
        if found != source.md5:
            partial.part.unlink()
            raise RuntimeError(f"{safe_url(source.url)}: found MD5 {found}, expected {source.md5}. "
                               "The data is removed; run the same command again, or name a mirror.")
    os.replace(partial.part, path)


class PartialFile:
    """The bytes of a download that have arrived, in PATH.part, and the note PATH.part.json.

    The note says to which file the bytes belong: what was asked for, and the size and the version
    that the server named. A whole file is renamed to PATH. The note is kept, so that the same
    command finds the download finished.

    note: the dict in the note, {} if there is none. differences: keys in which it differs from what
    is asked for now.
    """

    def __init__(self, source, path):
        self.path = path
        self.part = Path(f"{path}.part")
        self.note_path = Path(f"{path}.part.json")
        query = hashlib.blake2b(urlsplit(source.url).query.encode(), digest_size=8).hexdigest()
        self.wanted = {**source._asdict(), "url": safe_url(source.url), "query_digest": query}
        try:
            self.note = json.loads(self.note_path.read_text())
        except (OSError, ValueError, RecursionError):
            self.note = {}
        if not isinstance(self.note, dict) or not self.wanted.keys() <= self.note.keys():
            self.note = {}
        self.differences = [key for key, value in self.wanted.items()
                            if value not in (None, self.note.get(key))]
        self.is_finished = path.exists() and not self.differences

    @property
    def size(self):
        return self.part.stat().st_size if self.part.exists() else 0

    def clear(self, reason):
        """Delete what has arrived, and say why."""
        if self.size:
            say(f"{self.part.name}: {self.size:,} bytes are thrown away: {reason}.")
        self.part.unlink(missing_ok=True)
        self.note = {}

    def begin(self, total, version):
        """Write the note on a file of `total` bytes before its first byte is written."""
        # The part is empty here, so the note is right even if the process is killed right after.
        self.path.unlink(missing_ok=True)
        self.note = {**self.wanted, "size": total, "version": version}
        self.note_path.write_text(json.dumps(self.note))


def receive(source, partial):
    """Append what one connection delivers to the part. Raises Dropped if it ends too early."""
    note = partial.note
    if partial.size and partial.size == note["size"]:
        return
    # Without a version, start again: nothing would show that the rest is of another file.
    start = partial.size if note.get("version") else 0
    with open_url(source, start, note.get("version")) as file:
        if file.status == 200:
            partial.clear("the server sends the file from its beginning")
            partial.begin(file.total, file.version)
        elif not continues(file, start, note):
            partial.clear(f"{file.name} is another file now, or does not continue it")
            raise Dropped(f"{file.name}: the answer is not the rest of the file")
        with open(partial.part, "ab") as target, progress_bar(
                partial.path.name, file.total, initial=partial.size) as bar:
            while data := file.read(CHUNK):
                target.write(data)
                bar.update(len(data))


def continues(file, start, note):
    """Whether an HttpFile is the rest, from byte `start` on, of the file that the note is on."""
    same_version = file.version in (None, note["version"])
    return same_version and file.start == start and file.total == note["size"]


class HttpFile(io.RawIOBase):
    """A file on a server, as it arrives, from byte `start` on.

    name: the address. status: 200 (the server sends the whole file) or 206 (from start on). total:
    bytes of the whole file. version: ETag or time of the file, None if not known.
    A read before the end raises Dropped if no more comes.
    """

    def __init__(self, answer, url, start, total):
        super().__init__()
        self.answer = answer
        self.name = url
        self.status = answer.status
        self.start = start
        self.total = total
        self.n_read = 0
        etag = answer.headers["ETag"] or "W/"           # a weak ETag does not vouch for each byte
        self.version = answer.headers["Last-Modified"] if etag.startswith("W/") else etag

    def readable(self):
        return True

    def readinto(self, buffer):
        left = self.total - self.start - self.n_read
        if not left:
            return 0
        try:                    # read1, because read loses what came before an error
            data = self.answer.read1(min(len(buffer), left))
        except (OSError, http.client.HTTPException) as error:
            raise Dropped(f"{self.name}: lost after {self.n_read:,} bytes ({error!r})") from None
        if not data:
            raise Dropped(f"{self.name}: ended after {self.n_read:,} bytes; expected {left:,} more")
        self.n_read += len(data)
        buffer[:len(data)] = data
        return len(data)

    def close(self):
        self.answer.close()
        super().close()


class SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but none from https to http or to ftp, where anyone could answer."""

    def redirect_request(self, request, answer, code, message, headers, url):
        if urlsplit(url).scheme not in ("https", request.type):
            raise ValueError(f"{safe_url(request.full_url)}: found a redirect to {safe_url(url)}, "
                             f"expected https. Name a mirror (--url).")
        return super().redirect_request(request, answer, code, message, headers, url)


def open_url(source, start=0, version=None):
    """HttpFile of a Source, from byte `start` on if the server still has this version of it.

    Raises Dropped, ValueError if the answer is not the file, RuntimeError for a size that is wrong
    or not known.
    """
    check_url(source.url)
    url = safe_url(source.url)
    headers = {"User-Agent": "protein-ddp"}
    if start:
        headers |= {"Range": f"bytes={start}-", "If-Range": version}
    try:
        request = urllib.request.Request(source.url, headers=headers)
        answer = urllib.request.build_opener(SafeRedirects).open(request, timeout=TIMEOUT)
        beginning = answer.peek(2)[:2]
    except urllib.error.HTTPError as error:
        kind = Dropped if error.code == 429 or error.code >= 500 else ValueError
        raise kind(f"{url}: found the answer {error.code} {error.reason}, expected the "
                   f"file") from None
    except (http.client.InvalidURL, UnicodeError):
        raise ValueError(f"found the address {url!r}; expected blanks (%20) and characters "
                         f"beyond ASCII percent-encoded.") from None
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        cause = reason if isinstance(reason, Exception) else error
        raise Dropped(f"{url}: no answer ({reason!r})") from cause
    if start and answer.status == 206:
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers["Content-Range"] or "")
        if not span:
            return HttpFile(answer, url, -1, -1)    # which continues nothing
        return HttpFile(answer, url, int(span[1]), int(span[2]))
    if answer.status != 200:
        raise ValueError(f"{url}: found the answer {answer.status}, expected 200 with the file")
    total = source.size if answer.length is None else answer.length
    if not total or source.size not in (None, total):
        found = "no Content-Length" if total is None else f"{total:,} bytes"
        expected = "some" if source.size is None else f"{source.size:,} ({METALINK})"
        raise RuntimeError(f"{url}: found {found}, expected {expected}. Try again later (a new "
                           f"release?), or name a mirror.")
    is_no_gzip = urlsplit(source.url).path.endswith(".gz") and beginning not in (GZIP, b"")
    if is_no_gzip or answer.headers.get_content_type() == "text/html":
        raise ValueError(f"{url}: found {answer.headers.get_content_type()} that begins with "
                         f"{beginning}, expected the file. Check the address, and whether a proxy "
                         f"or a login page stands before it.")
    return HttpFile(answer, url, 0, total)


def retry(work, bytes_arrived=lambda: 0):
    """Call work(), again after Dropped. A try in which more bytes arrived resets the count."""
    failures = 0
    while True:
        before = bytes_arrived()
        try:
            return work()
        except Dropped as error:
            if not failures and isinstance(error.__cause__, NO_SERVER):
                raise OSError(f"{error}. {ADVICE}.") from None
            after = bytes_arrived()
            failures = 1 if after > before else failures + 1
            arrived = f"{after:,} bytes are kept; " if after else ""
            state = f"{arrived}tries without progress: {failures} of {TRIES}"
            if failures >= TRIES:
                raise OSError(f"{error}. {state}. {ADVICE}; the same command goes on.") from None
            wait = min(LONGEST_WAIT, BACKOFF * 2 ** (failures - 1))
            say(f"{error}; {state}. Next in {wait:g} s.")
            time.sleep(wait)


def md5_of(path):
    """MD5 of a file, in hex."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file, progress_bar("checking MD5", path.stat().st_size) as bar:
        while data := file.read(CHUNK):
            digest.update(data)
            bar.update(len(data))
    return digest.hexdigest()


def check_url(url):
    """Raise ValueError for an address that is not http or https, or that holds a password."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError(f"found the address {safe_url(url)}; expected http://HOST/FILE or "
                         f"https://HOST/FILE, without user and password.")


def safe_url(url):
    """The url without user, password and query, which may be secret: to be shown or saved."""
    split = urlsplit(url)
    return urlunsplit((split.scheme, split.netloc.rpartition("@")[2], split.path, "", ""))


def say(text):
    """Print a line to standard error, above a progress bar."""
    tqdm.write(text, file=sys.stderr)


def synchronise(path):
    """Force a file or folder to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def progress_bar(what, total, unit="B", initial=0):
    """A progress bar; without a terminal, as in a job's log, it writes a line per half minute."""
    watched = sys.stderr.isatty()
    line = "{l_bar}{bar}{r_bar}\n" if total else "{desc}: {n_fmt}{unit} [{elapsed}, {rate_fmt}]\n"
    return tqdm(desc=what, total=total, initial=initial, unit=unit, unit_scale=True, ncols=80,
                file=sys.stderr, mininterval=0.2 if watched else 30,
                bar_format=None if watched else line)

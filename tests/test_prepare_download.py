"""prepare_uniref50: does the download survive, or refuse in words, what servers and networks do?

A real HTTP server on this machine plays each fault: `web.faults` has a function for each request.
"""

import gzip
import hashlib
import http.server
import json
import os
import random
import resource
import signal
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from email.utils import formatdate
from pathlib import Path

import pytest

import prepare_uniref50
from prepare_uniref50 import Source, download, look_up, open_stream

DATA = gzip.compress(random.Random(0).randbytes(300_000), mtime=0)
OTHER = gzip.compress(random.Random(1).randbytes(300_000), mtime=0)
MD5 = hashlib.md5(DATA).hexdigest()
HALF = len(DATA) // 2
FAST = dict(backoff=0, timeout=20, tries=4)


class Answer(http.server.BaseHTTPRequestHandler):
    """One request: a sane server of web.files, unless web.faults has something else for it."""
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        web = self.server
        web.asked.append((self.path, self.headers))
        listing = self.path.endswith("RELEASE.metalink")
        faults = web.listing_faults if listing else web.faults
        otherwise = answers(404) if listing and self.path not in web.files else Answer.sane
        fault = faults.pop(0) if faults else otherwise
        fault(self)

    def log_message(self, *_):
        pass

    @property
    def data(self):
        return self.server.files[self.path.partition("?")[0]]

    @property
    def start(self):
        return int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))

    def sane(self, stop=None):
        """As the standard says: 206, 200 if If-Range does not hold, 416. Ends after byte `stop`."""
        held = self.headers["If-Range"] in (None, *self.server.validators.values())
        if not self.headers["Range"] or not held:
            self.whole(stop)
        elif self.start >= len(self.data):
            self.head(416, 0, {"Content-Range": f"bytes */{len(self.data)}"})
        else:
            self.rest(self.start, stop)

    def whole(self, stop=None, headers={}):
        self.head(200, len(self.data), headers)
        self.send(self.data[:stop])

    def rest(self, start, stop=None):
        span = f"bytes {start}-{len(self.data) - 1}/{len(self.data)}"
        self.head(206, len(self.data) - start, {"Content-Range": span})
        self.send(self.data[start:stop])

    def head(self, code, length, headers={}):
        self.send_response(code)
        for name, value in {"Content-Length": length, **self.server.validators, **headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()

    def send(self, data):
        self.wfile.write(data)
        self.wfile.flush()
        self.close_connection = True      # before Content-Length, too: a clean end of too little

    def reset(self):
        """Drop the connection as a crash does: the client sees a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.connection.shutdown(socket.SHUT_RD)
        self.close_connection = True

    def error(self, code, body=b"<html>sorry</html>"):
        self.head(code, len(body), {"Content-Type": "text/html"})
        self.send(body)


def drops_after(count):
    """Sends `count` bytes more of what was asked for, then ends the connection."""
    return lambda answer: answer.sane(answer.start + count)


def answers(code):
    return lambda answer: answer.error(code)


@pytest.fixture
def web():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    server.files = {"/u/uniref50.fasta.gz": DATA}
    server.validators = {"ETag": '"one"', "Last-Modified": formatdate(1e9, usegmt=True)}
    server.faults, server.listing_faults, server.asked = [], [], []
    server.root = f"http://127.0.0.1:{server.server_address[1]}"
    server.url = f"{server.root}/u/uniref50.fasta.gz"
    server.ranges = lambda: [headers["Range"] for path, headers in server.asked]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "uniref50.fasta.gz"


def part_of(path):
    return Path(f"{path}.part")


def note_of(path):
    return Path(f"{path}.part.json")


def change_note(path, **fields):
    note_of(path).write_text(json.dumps({**json.loads(note_of(path).read_text()), **fields}))


def get(web, path, **known):
    """Download to path what the server has, and see that it arrives."""
    download(Source(web.url, **known), path, **FAST)
    assert path.read_bytes() == web.files["/u/uniref50.fasta.gz"]


def refusal(expected, call, *args, **options):
    with pytest.raises(expected) as caught:
        call(*args, **{**FAST, **options})
    assert type(caught.value) in (expected, *expected.__subclasses__())
    return str(caught.value)


def half_arrives(web, path, source=None, count=HALF):
    """Download until `count` bytes are there; the try after that is answered 404."""
    web.faults += [drops_after(count), answers(404)]
    refusal(ValueError, download, source or Source(web.url), path)
    assert part_of(path).stat().st_size == count and not path.exists()
    web.asked.clear()


def metalink(md5=MD5, size=len(DATA), name="uniref50.fasta.gz", head=""):
    return f"""<?xml version="1.0" encoding="UTF-8"?>{head}
        <metalink version="3.0" xmlns="http://www.metalinker.org/" type="dynamic">
          <publisher><name>UniProt</name></publisher><version>2025_04</version>
          <files>
            <file name="README"><size>5</size>
              <verification><hash type="md5">{'0' * 32}</hash></verification></file>
            <file name="{name}"><size>{size}</size>
              <verification><hash type="sha1">ff</hash><hash type="md5">{md5}</hash></verification>
              <resources><url type="http" location="us">http://x/y</url></resources></file>
          </files></metalink>""".encode()


# ---- the source ----

def test_the_metalink_beside_the_file_gives_size_md5_and_release(web, capsys):
    web.files["/u/RELEASE.metalink"] = metalink()
    assert look_up(web.url, **FAST) == Source(web.url, len(DATA), MD5, "2025_04")
    assert capsys.readouterr().err == ""
    web.listing_faults = [answers(503), *(drops_after(count) for count in (100, 0))]
    assert look_up(web.url, **FAST).md5 == MD5


def test_without_a_metalink_or_an_entry_nothing_is_known_and_one_line_says_so(web, capsys):
    loop = '<!DOCTYPE m [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>'
    for text in (None, metalink(name="other.gz"), metalink(md5="none"), metalink(size=""),
                 b"<html>", b"\xff\xfe", metalink(name="&b;", head=loop)):
        web.files.pop("/u/RELEASE.metalink", None)
        if text is not None:
            web.files["/u/RELEASE.metalink"] = text
        assert look_up(web.url, **FAST) == Source(web.url)
        assert capsys.readouterr().err.count("\n") == 1


# ---- what goes well ----

def test_a_download_is_the_file_and_leaves_no_part(web, path, capsys):
    get(web, path, size=len(DATA), md5=MD5)
    assert not part_of(path).exists() and web.ranges() == [None]
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert any("300k/300k" in line and "B/s" in line and "<" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert web.asked[0][1]["User-Agent"].startswith("protein-ddp")


def test_the_same_call_after_the_end_asks_for_nothing_but_another_source_is_downloaded(web, path):
    get(web, path)
    get(web, path)
    assert len(web.asked) == 1
    web.files["/u/uniref50.fasta.gz"] = OTHER
    get(web, path, md5=hashlib.md5(OTHER).hexdigest())
    web.files["/u/uniref50.fasta.gz"] = DATA
    download(Source(f"{web.url}?version=2"), path, **FAST)
    assert path.read_bytes() == DATA


def test_a_finished_download_needs_neither_network_nor_list(web, tmp_path):
    one, other = (gzip.compress(b">a\n%b\n" % letters, mtime=0) for letters in (b"MKV", b"MKVLA"))

    def download_input(data, url):
        web.files = {"/u/uniref50.fasta.gz": data,
                     "/u/RELEASE.metalink": metalink(hashlib.md5(data).hexdigest(), len(data))}
        (entry,), release = prepare_uniref50.download_input(url, tmp_path, None)
        assert Path(entry.name).read_bytes() == data and release == "2025_04"
    download_input(one, web.url)
    web.asked.clear()
    download_input(one, web.url)
    assert web.asked == []
    download_input(other, f"{web.url}?version=2")       # of the same name, but another file


def test_a_part_is_continued_though_its_list_cannot_be_read_now(web, path):
    half_arrives(web, path, Source(web.url, len(DATA), MD5, "2025_04"))
    get(web, path)
    assert web.ranges() == [f"bytes={HALF}-"]


def test_a_file_that_is_there_stays_until_another_begins_to_arrive(web, path):
    path.write_bytes(b"mine")
    web.faults = [answers(404)]
    refusal(ValueError, download, Source(web.url), path)
    assert path.read_bytes() == b"mine"
    half_arrives(web, path)


def test_the_data_is_on_the_disk_before_it_gets_its_name(web, path, monkeypatch):
    steps, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda file: steps.append(os.fstat(file).st_size))
    monkeypatch.setattr(os, "replace", lambda *names: (steps.append(names), replace(*names)))
    get(web, path)
    assert steps == [len(DATA), (part_of(path), path)]


def test_proxies_of_the_environment_are_used(web, path, monkeypatch):
    monkeypatch.setenv("http_proxy", web.root)
    web.files["http://uniprot.invalid/u/uniref50.fasta.gz"] = DATA
    download(Source("http://uniprot.invalid/u/uniref50.fasta.gz"), path, **FAST)
    assert path.read_bytes() == DATA


def test_a_secret_in_the_address_is_not_shown_or_written_and_a_password_refused(web, path, capsys):
    web.faults = [drops_after(HALF)]
    url = web.url + "?key=hidden"
    download(look_up(url, **FAST), path, **FAST)
    message = refusal(ValueError, download, Source(url.replace("u/", "n o/")), path)
    message += refusal(ValueError, download, Source(url.replace("//", "//me:safe@") + "3"), path)
    message += refusal(OSError, download, Source(url.replace("127.0.0.1", "no.invalid")), path)
    web.faults = [answers(404), answers(503)]
    message += refusal(ValueError, download, Source(url + "4"), path)
    message += refusal(OSError, download, Source(url + "5"), path, tries=1)
    message += capsys.readouterr().err + note_of(path).read_text()
    assert "safe" not in message and "hidden" not in message


def test_a_redirect_is_followed(web, path):
    web.files["/moved.gz"] = DATA
    web.faults = [lambda answer: answer.head(302, 0, {"Location": "/moved.gz"})]
    get(web, path)
    assert len(web.asked) == 2


# ---- connections that break ----

def resets(answer):
    answer.sane(100_000)
    time.sleep(0.05)            # for the data to leave: a reset discards what has not been sent
    answer.reset()


def whole_until(stop):
    return lambda answer: answer.whole(stop)


@pytest.mark.parametrize("faults, starts", [
    ([drops_after(100_000), drops_after(50_000), drops_after(50_000)], [100_000, 150_000, 200_000]),
    ([whole_until(HALF)], [HALF]), ([resets], None),
    ([answers(429), answers(500), drops_after(HALF), answers(502), answers(503)],
     [0, 0, HALF, HALF, HALF])],
    ids=["dropped", "a clean end of too little", "reset", "busy or broken"])
def test_what_breaks_is_continued_at_the_byte_reached(web, path, faults, starts, capsys):
    web.faults = list(faults)
    get(web, path)
    if starts:
        asked = [int((range or "bytes=0-")[6:-1]) for range in web.ranges()]
        assert asked == [0, *starts]
    assert len(web.asked) == len(faults) + 1
    assert {headers["If-Range"] for _, headers in web.asked if headers["Range"]} <= {'"one"'}
    assert "bytes" in capsys.readouterr().err


def test_a_server_that_stalls_is_a_dropped_connection(web, path):
    go_on = threading.Event()

    def stalls(answer):
        answer.sane(100_000)
        go_on.wait(20)
    web.faults = [stalls, lambda answer: go_on.wait(20)]
    download(Source(web.url), path, **{**FAST, "timeout": 0.5})
    go_on.set()
    assert path.read_bytes() == DATA and web.ranges()[-2:] == ["bytes=100000-"] * 2


def test_tries_count_only_in_a_row_without_progress(web, path):
    nothing = drops_after(0)
    web.faults = [nothing] * 3 + [drops_after(10), nothing, nothing] * 2
    get(web, path)
    assert len(web.asked) == 10


def test_without_progress_it_gives_up_saying_what_arrived_and_the_same_call_goes_on(web, path):
    web.faults = [drops_after(HALF)] + [drops_after(0)] * 3
    message = refusal(OSError, download, Source(web.url), path)
    assert f"{HALF:,} bytes" in message and "same command" in message and web.url in message
    assert len(web.asked) == 4
    get(web, path)
    assert web.ranges()[-1] == f"bytes={HALF}-"


def test_waits_double_up_to_a_minute(web, path, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    web.faults = [answers(503)] * 9
    message = refusal(OSError, download, Source(web.url), path, tries=9, backoff=1)
    assert "503" in message and web.url in message
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_wrong_address_is_refused_at_once(web, path):
    web.faults = [answers(401)]
    message = refusal(ValueError, download, Source(web.url), path)
    assert "401" in message and web.url in message and len(web.asked) == 1


def test_no_server_and_no_such_host_are_refused_at_once(path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}/f.gz"
        for url in (closed, "http://no.such.host.invalid/f.gz"):
            for call in (lambda **options: download(Source(url), path, **options),
                         lambda **options: look_up(url, **options)):
                message = refusal(OSError, call)
                assert url.rpartition("/")[0] in message and "https_proxy" in message


def test_an_untrusted_certificate_is_refused_at_once(web, path, monkeypatch):
    def distrusts(*_, **__):
        raise urllib.error.URLError(ssl.SSLCertVerificationError("certificate verify failed"))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
    monkeypatch.setattr(urllib.request.OpenerDirector, "open", distrusts)
    assert "certificate" in refusal(OSError, download, Source(web.url), path)


def test_a_server_that_goes_away_in_mid_download_is_waited_for(web, path, monkeypatch):
    waits = []

    def gone(answer):
        answer.sane(HALF)
        web.socket.close()
    monkeypatch.setattr(time, "sleep", waits.append)
    web.faults = [gone]
    message = refusal(OSError, download, Source(web.url), path, backoff=1)
    assert len(waits) == 3 and f"{HALF:,} bytes" in message


# ---- too little, too much, something else ----

def test_a_shorter_range_than_asked_for_is_continued(web, path):
    half_arrives(web, path)

    def short(answer):
        answer.head(206, 1000, {"Content-Range": f"bytes {HALF}-{HALF + 999}/{len(DATA)}"})
        answer.send(DATA[HALF:HALF + 1000])
    web.faults = [short]
    get(web, path)
    assert web.ranges()[1] == f"bytes={HALF + 1000}-"


def test_a_server_that_ignores_range_starts_over_and_says_so(web, path, capsys):
    half_arrives(web, path)
    web.faults = [Answer.whole]
    get(web, path)
    assert len(web.asked) == 1 and f"{HALF:,} bytes" in capsys.readouterr().err


def test_a_server_that_ignores_range_and_always_drops_ends_in_words(web, path):
    web.faults = [whole_until(HALF)] * 9
    assert "same command" in refusal(OSError, download, Source(web.url), path)
    assert len(web.asked) == 4


LATER = {"ETag": None, "Last-Modified": formatdate(2e9, usegmt=True)}


@pytest.mark.parametrize("obeys_if_range", [True, False])
@pytest.mark.parametrize("etag, change, data", [
    ('"one"', {"ETag": '"two"'}, OTHER), (None, LATER, OTHER), ('"one"', {}, OTHER + b"more")],
    ids=["ETag", "Last-Modified", "size"])
def test_another_file_after_a_resume_is_never_mixed_with_the_old(
        web, path, etag, change, data, obeys_if_range, capsys):
    web.validators["ETag"] = etag
    half_arrives(web, path)
    web.files["/u/uniref50.fasta.gz"] = data
    web.validators.update(change)
    if not obeys_if_range or not change:
        web.faults = [lambda answer: answer.rest(HALF)]
    get(web, path)
    assert "thrown away" in capsys.readouterr().err


@pytest.mark.parametrize("field, old, new", [
    ("md5", None, MD5), ("md5", "0" * 32, MD5), ("release", "2025_03", "2025_04"),
    ("size", 5, len(DATA))])
def test_a_part_of_another_source_is_thrown_away(web, path, field, old, new, capsys):
    half_arrives(web, path)
    change_note(path, **{field: old})
    get(web, path, **{field: new})
    assert web.ranges() == [None] and field in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "", '{"url"'])
def test_a_part_without_a_note_of_its_source_is_thrown_away(web, path, text):
    part_of(path).write_bytes(DATA[:HALF])
    if text is not None:
        note_of(path).write_text(text)
    get(web, path)
    assert web.ranges() == [None]


def test_without_anything_to_tell_files_apart_nothing_is_continued(web, path):
    web.validators = {"ETag": 'W/"weak"'}
    half_arrives(web, path)
    get(web, path)
    assert web.ranges() == [None]


@pytest.mark.parametrize("fault", [
    lambda answer: answer.rest(HALF - 1), lambda answer: answer.rest(0),
    lambda answer: answer.head(206, 0)])
def test_a_206_from_elsewhere_is_not_appended(web, path, fault):
    half_arrives(web, path)
    web.faults = [fault]
    get(web, path)
    assert web.ranges() == [f"bytes={HALF}-", None]


def test_a_206_or_416_that_nobody_asked_for_is_refused(web, path):
    web.validators = {}
    half_arrives(web, path)
    for fault in (lambda answer: answer.rest(0), answers(416)):
        for call, *target in ((download, path), (open_stream,)):
            web.faults = [fault]
            refusal(ValueError, call, Source(web.url), *target)
    assert part_of(path).read_bytes() == DATA[:HALF]


def test_a_part_that_is_whole_is_finished_without_asking(web, path):
    half_arrives(web, path)
    part_of(path).write_bytes(DATA)
    get(web, path)
    assert web.asked == []


def test_a_wrong_md5_is_refused_and_the_file_removed(web, path):
    message = refusal(RuntimeError, download, Source(web.url, md5="0" * 32), path)
    assert MD5 in message and "0" * 32 in message
    assert not path.exists() and not part_of(path).exists()
    half_arrives(web, path, Source(web.url, md5=MD5))
    part_of(path).write_bytes(OTHER[:HALF])
    refusal(RuntimeError, download, Source(web.url, md5=MD5), path)
    get(web, path, md5=MD5)


def test_another_size_than_the_metalink_says_is_refused_before_anything_is_read(web, path):
    message = refusal(RuntimeError, download, Source(web.url, size=5), path)
    assert f"{len(DATA):,}" in message and "5" in message
    assert not path.exists() and not part_of(path).exists()


@pytest.mark.parametrize("kind, body", [
    ("text/plain", b"<html>log in</html>"),
    ("application/gzip", b"sorry"), ("application/gzip", b"\x1f")])
def test_a_page_instead_of_the_file_is_refused_and_spares_the_part(web, path, kind, body):
    half_arrives(web, path)
    web.faults = [lambda answer: (answer.head(200, len(body), {"Content-Type": kind}),
                                  answer.send(body))]
    message = refusal(ValueError, download, Source(web.url), path)
    assert web.url in message and part_of(path).stat().st_size == HALF


def test_a_file_without_gz_in_its_name_need_not_be_gzip(web, path):
    web.files["/a.fasta"] = b">a\nMKV\n"
    download(Source(f"{web.root}/a.fasta"), path, **FAST)
    assert path.read_bytes() == b">a\nMKV\n"


@pytest.mark.parametrize("target", ["file:///etc/hostname", "data:,x"])
def test_only_http_and_https_are_asked_also_after_a_redirect(web, path, target):
    web.faults = [lambda answer: answer.head(302, 0, {"Location": target})]
    refusal(ValueError, download, Source(web.url), path)
    assert not path.exists() and len(web.asked) == 1
    for call in (look_up, lambda url, **options: download(Source(url), path, **options)):
        assert "http" in refusal(ValueError, call, target)


def unstated(data):
    return lambda answer: (answer.head(200, None, {"Connection": "close"}), answer.send(data))


def test_an_end_without_length_counts_only_with_a_size(web, path):
    web.faults = [unstated(DATA)]
    assert "Content-Length" in refusal(RuntimeError, download, Source(web.url), path)
    web.faults = [unstated(DATA)]
    get(web, path, size=len(DATA))
    path.unlink()
    web.faults = [unstated(DATA[:HALF])]
    get(web, path, size=len(DATA))


# ---- no room ----

def test_no_room_is_refused_and_keeps_what_arrived(web, path):
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HALF, most))
    try:
        refusal(OSError, download, Source(web.url), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        signal.signal(signal.SIGXFSZ, before)
    assert len(web.asked) == 1
    get(web, path)
    assert web.ranges()[1] == f"bytes={HALF}-"


# ---- the stream ----

def test_a_stream_that_ends_early_or_stalls_is_an_error_in_words(web):
    held = threading.Event()

    def stalls(answer):
        answer.whole(HALF)
        held.wait(20)
    for fault in (whole_until(HALF), stalls):
        web.faults = [fault]
        with open_stream(Source(web.url), timeout=1) as stream:
            with pytest.raises(OSError, match=f"{web.url}.* {HALF:,} bytes"):
                while stream.read(1 << 16):
                    pass
    held.set()


def test_opening_a_stream_is_tried_again_and_refuses_what_is_no_file(web):
    web.faults = [answers(503)] * 2
    with gzip.open(open_stream(Source(web.url), **FAST)) as file:
        assert file.read() == gzip.decompress(DATA)
    web.faults = [answers(404)]
    assert "404" in refusal(ValueError, open_stream, Source(web.url))
    web.files["/u/uniref50.fasta.gz"] = b"no gzip"
    assert "gzip" in refusal(ValueError, open_stream, Source(web.url))

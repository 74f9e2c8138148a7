"""prepare_uniref50: does the download survive, or refuse in words, what servers and networks do?

A real HTTP server on this machine plays each fault: `web.faults` has a function for each request.
"""

import gzip
import hashlib
import http.server
import json
import os
import random
import threading
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

    def error(self, code, body=b"<html>sorry</html>"):
        self.head(code, len(body), {"Content-Type": "text/html"})
        self.send(body)


def drops_after(count):
    """Sends `count` bytes more of what was asked for, then ends the connection."""
    return lambda answer: answer.sane(answer.start + count)


def rests_at(start):
    return lambda answer: answer.rest(start)


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
    return str(caught.value)


def half_arrives(web, path, source=None, count=HALF):
    """Download until `count` bytes are there; the try after that is answered 404."""
    web.faults += [drops_after(count), answers(404)]
    refusal(ValueError, download, source or Source(web.url), path)
    assert part_of(path).stat().st_size == count and not path.exists()
    web.asked.clear()


def metalink(md5=MD5, size=len(DATA), name="uniref50.fasta.gz", head=""):
    return f"""<?xml version="1.0" encoding="UTF-8"?>{head}
        <metalink version="3.0" xmlns="http://www.metalinker.org/"><version>2025_04</version>
          <files>
            <file name="README"><size>5</size>
              <verification><hash type="md5">{'0' * 32}</hash></verification></file>
            <file name="{name}"><size>{size}</size>
              <verification><hash type="sha1">ff</hash><hash type="md5">{md5}</hash></verification>
            </file></files></metalink>""".encode()


# ---- the source ----

def test_without_a_metalink_or_an_entry_nothing_is_known_and_one_line_says_so(web, capsys):
    loop = '<!DOCTYPE m [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>'
    for text in (None, metalink(name="other.gz"), metalink(md5="none"), b"<html>",
                 metalink(name="&b;", head=loop)):
        web.files.pop("/u/RELEASE.metalink", None)
        if text is not None:
            web.files["/u/RELEASE.metalink"] = text
        assert look_up(web.url, **FAST) == Source(web.url)
        assert capsys.readouterr().err.count("\n") == 1


# ---- what goes well ----

def test_the_same_call_after_the_end_asks_for_nothing_but_another_source_is_downloaded(web, path):
    for _ in range(2):
        get(web, path, size=len(DATA), md5=MD5)
        assert web.ranges() == [None] and not part_of(path).exists()
    web.files["/u/uniref50.fasta.gz"] = OTHER
    get(web, path, md5=hashlib.md5(OTHER).hexdigest())
    web.files["/u/uniref50.fasta.gz"] = DATA
    download(Source(f"{web.url}?version=2"), path, **FAST)
    assert path.read_bytes() == DATA


def test_a_url_is_prepared_with_its_release_and_downloaded_once(web, tmp_path, monkeypatch):
    data = gzip.compress("".join(f">{n}\nMKV{n * 'A'}\n" for n in range(50)).encode(), mtime=0)
    web.files = {"/u/uniref50.fasta.gz": data,
                 "/u/RELEASE.metalink": metalink(hashlib.md5(data).hexdigest(), len(data))}

    web.listing_faults = [drops_after(100)]

    def prepare(name, *more):
        return prepare_uniref50.main([str(tmp_path / name), "--url", web.url, "--val_fraction", "0",
                                      *more])
    with monkeypatch.context() as patch:
        patch.setattr(prepare_uniref50, "collect", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare("out")
    assert not (tmp_path / "out").exists()
    web.asked.clear()
    assert prepare("out") == 0 == prepare("out") and web.asked == []
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert (meta["release"], meta["source"]) == ("2025_04", [web.url])
    assert meta["report"]["n_proteins"] == 50 and not (tmp_path / "out.partial").exists()
    monkeypatch.setattr(prepare_uniref50, "download", lambda *_: pytest.fail("downloaded"))
    assert prepare("few", "--max_sequences", "2") == 0      # for which the head is enough
    meta = json.loads((tmp_path / "few" / "meta.json").read_text())
    assert meta["report"]["n_proteins"] == 2


def test_a_file_that_is_there_stays_until_another_begins_to_arrive(web, path):
    path.write_bytes(b"mine")
    web.faults = [answers(404)]
    refusal(ValueError, download, Source(web.url), path)
    assert path.read_bytes() == b"mine"
    half_arrives(web, path)


def test_proxies_of_the_environment_are_used(web, path, monkeypatch):
    monkeypatch.setenv("http_proxy", web.root)
    web.files["http://uniprot.invalid/u/uniref50.fasta.gz"] = DATA
    download(Source("http://uniprot.invalid/u/uniref50.fasta.gz"), path, **FAST)
    assert path.read_bytes() == DATA


# ---- connections that break ----


def whole_until(stop):
    return lambda answer: answer.whole(stop)


@pytest.mark.parametrize("faults, starts", [
    ([drops_after(100_000), drops_after(50_000), drops_after(50_000)], [100_000, 150_000, 200_000]),
    ([whole_until(HALF)], [HALF]),
    ([answers(429), answers(500), drops_after(HALF), answers(502), answers(503)],
     [0, 0, HALF, HALF, HALF])],
    ids=["dropped", "a clean end of too little", "busy or broken"])
def test_what_breaks_is_continued_at_the_byte_reached(web, path, faults, starts, capsys):
    web.faults = list(faults)
    get(web, path)
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


# ---- too little, too much, something else ----

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
        web.faults = [rests_at(HALF)]
    get(web, path)
    assert "thrown away" in capsys.readouterr().err


@pytest.mark.parametrize("field, old, new", [
    ("md5", "0" * 32, MD5), ("release", "2025_03", "2025_04"), ("size", 5, len(DATA)),
    (None, None, None)])
def test_a_part_of_another_source_or_without_its_note_is_thrown_away(web, path, field, old, new):
    half_arrives(web, path)
    if field:
        change_note(path, **{field: old})
    else:
        note_of(path).write_text('{"url"')
    get(web, path, **({field: new} if field else {}))
    assert web.ranges() == [None]


def test_without_anything_to_tell_files_apart_nothing_is_continued(web, path):
    web.validators = {"ETag": 'W/"weak"'}
    half_arrives(web, path)
    get(web, path)
    assert web.ranges() == [None]


def test_a_206_or_416_that_nobody_asked_for_is_refused(web, path):
    web.validators = {}
    half_arrives(web, path)
    for fault in (rests_at(0), answers(416)):
        for call, *target in ((download, path), (open_stream,)):
            web.faults = [fault]
            refusal(ValueError, call, Source(web.url), *target)
    assert part_of(path).read_bytes() == DATA[:HALF]


def test_a_wrong_md5_is_refused_and_the_file_removed(web, path):
    half_arrives(web, path, Source(web.url, md5=MD5))
    part_of(path).write_bytes(OTHER[:HALF])
    assert MD5 in refusal(RuntimeError, download, Source(web.url, md5=MD5), path)
    assert not path.exists() and not part_of(path).exists()
    get(web, path, md5=MD5)


@pytest.mark.parametrize("kind, body", [
    ("text/plain", b"<html>log in</html>"),
    ("application/gzip", b"sorry"), ("application/gzip", b"\x1f")])
def test_a_page_instead_of_the_file_is_refused_and_spares_the_part(web, path, kind, body):
    half_arrives(web, path)
    web.faults = [lambda answer: (answer.head(200, len(body), {"Content-Type": kind}),
                                  answer.send(body))]
    message = refusal(ValueError, download, Source(web.url), path)
    assert web.url in message and part_of(path).stat().st_size == HALF


def test_only_http_and_https_are_asked_also_after_a_redirect(web, path):
    target = "file:///etc/hostname"
    web.faults = [lambda answer: answer.head(302, 0, {"Location": target})]
    refusal(ValueError, download, Source(web.url), path)
    assert not path.exists() and len(web.asked) == 1
    for call in (look_up, lambda url, **options: download(Source(url), path, **options)):
        assert "http" in refusal(ValueError, call, target)


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


@pytest.mark.parametrize("fault", [
    lambda answer: answer.rest(HALF - 1), lambda answer: answer.rest(0),
    lambda answer: answer.head(206, 0)])
def test_a_206_from_elsewhere_is_not_appended(web, path, fault):
    half_arrives(web, path)
    web.faults = [fault]
    get(web, path)
    assert web.ranges() == [f"bytes={HALF}-", None]


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


def test_a_part_that_is_whole_is_finished_without_asking(web, path):
    half_arrives(web, path)
    part_of(path).write_bytes(DATA)
    get(web, path)
    assert web.asked == []

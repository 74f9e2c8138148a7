"""Does the download survive, or refuse in words, what servers and networks do?

A real HTTP server on this machine plays each fault: `web.faults` has one for each request, such as
answer("error", 404) for Answer.error(404).
"""

import gzip
import hashlib
import http.client
import http.server
import json
import random
import threading
import urllib.request
from email.utils import formatdate
from operator import methodcaller as answer

import pytest

import prepare_uniref50
from sedd import download as downloading
from sedd.download import Source, download, look_up, open_url

FILE = "/u/uniref50.fasta.gz"
LISTING = "/u/RELEASE.metalink"
DATA, OTHER = (gzip.compress(random.Random(k).randbytes(300_000), mtime=0) for k in (0, 1))
MD5 = hashlib.md5(DATA).hexdigest()
HALF = len(DATA) // 2


class Answer(http.server.BaseHTTPRequestHandler):
    """One request: a sane server of web.files, unless web.faults has something else for it."""
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        web = self.server
        span = self.headers["Range"] or "bytes=0-"
        self.start = int(span.removeprefix("bytes=").removesuffix("-"))
        self.data = web.files.get(self.path.partition("?")[0])
        web.asked.append((self.start, self.headers["If-Range"]))
        fault = web.faults.pop(0) if web.faults else answer("sane")
        fault(self)

    def log_message(self, *_):
        pass

    def sane(self, stop=None):
        """As the standard says: 206, or 200 if If-Range does not hold. Ends after byte `stop`."""
        if self.data is None:
            self.error(404)
        elif self.start and self.headers["If-Range"] in (None, *self.server.validators.values()):
            self.rest(self.start, stop)
        else:
            self.whole(stop)

    def whole(self, stop=None):
        self.give(200, self.data[:stop], len(self.data))

    def rest(self, start, stop=None):
        size = len(self.data)
        self.give(206, self.data[start:stop], size - start,
                  Content_Range=f"bytes {start}-{size - 1}/{size}")

    def error(self, code):
        self.give(code, b"<html>sorry</html>", Content_Type="text/html")

    def drop_after(self, count):
        """Send `count` bytes more of what was asked for, then end the connection."""
        self.sane(self.start + count)

    def stall_after(self, count):
        self.drop_after(count)
        self.server.go_on.wait(20)

    def give(self, code, body, length=None, **headers):
        self.send_response(code)
        headers = {"Content-Length": length or len(body), **self.server.validators, **headers}
        for name, value in headers.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True      # before Content-Length, too: a clean end of too little


@pytest.fixture
def web(tmp_path, monkeypatch):
    """The server, what it was asked for (first byte, If-Range), and where its file goes here."""
    monkeypatch.setenv("no_proxy", "*")
    for name, value in {"BACKOFF": 0, "TIMEOUT": 20, "TRIES": 4}.items():
        monkeypatch.setattr(downloading, name, value)
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    web.daemon_threads = True
    web.go_on = threading.Event()
    web.files = {FILE: DATA}
    web.faults = []
    web.asked = []
    web.validators = {"ETag": '"one"', "Last-Modified": formatdate(1e9, usegmt=True)}
    web.root = f"http://127.0.0.1:{web.server_address[1]}"
    web.url = web.root + FILE
    web.path, web.part, web.note = (tmp_path / f"uniref50.fasta.gz{end}"
                                    for end in ("", ".part", ".part.json"))
    thread = threading.Thread(target=web.serve_forever, args=(0.01,))
    thread.start()
    yield web
    web.go_on.set()
    web.shutdown()
    web.server_close()
    thread.join()


def get(web, **known):
    """Download what the server has, and see that it arrives."""
    download(Source(web.url, **known), web.path)
    assert web.path.read_bytes() == web.files[FILE]


def refusal(expected, web, url=None, md5=None):
    """What is said when the download is refused."""
    with pytest.raises(expected) as caught:
        download(Source(url or web.url, md5=md5), web.path)
    return str(caught.value)


def half_arrives(web, **known):
    """Download until half of the file is there; the try after that is answered 404."""
    web.faults = [answer("drop_after", HALF), answer("error", 404)]
    with pytest.raises(ValueError):
        download(Source(web.url, **known), web.path)
    assert web.part.stat().st_size == HALF and not web.path.exists()
    web.asked.clear()


def metalink(md5=MD5, size=len(DATA), name="uniref50.fasta.gz"):
    return f"""<metalink xmlns="http://www.metalinker.org/"><version>2025_04</version><files>
        <file name="README"><size>5</size><hash type="md5">{'0' * 32}</hash></file>
        <file name="{name}"><size>{size}</size><verification><hash type="sha1">ff</hash>
            <hash type="md5">{md5}</hash></verification></file></files></metalink>""".encode()


def test_without_a_metalink_or_an_entry_nothing_is_known_and_one_line_says_so(web, capsys):
    for text in (None, metalink(name="other.gz"), metalink(md5="none"), b"<html>"):
        web.files[LISTING] = text
        assert look_up(web.url) == Source(web.url)
        assert capsys.readouterr().err.count("\n") == 1


def test_the_same_call_after_the_end_asks_for_nothing_but_another_source_is_downloaded(web):
    for _ in range(2):
        get(web, size=len(DATA), md5=MD5)
        assert web.asked == [(0, None)] and not web.part.exists()
    other = hashlib.md5(OTHER).hexdigest()
    web.files[FILE] = OTHER
    web.faults = [answer("error", 404)]
    refusal(ValueError, web, md5=other)
    assert web.path.read_bytes() == DATA            # until another begins to arrive
    half_arrives(web, md5=other)
    get(web, md5=other)
    web.files[FILE] = DATA
    download(Source(f"{web.url}?version=2"), web.path)
    assert web.path.read_bytes() == DATA


def test_a_file_is_on_the_disk_before_it_has_its_name(web, disk_calls):
    get(web)
    renamed = disk_calls.index(("rename", web.path))
    assert ("fsync", DATA) in disk_calls[:renamed]


def test_a_url_is_prepared_with_its_release_and_downloaded_once(web, tmp_path, monkeypatch):
    data = gzip.compress("".join(f">{n}\nMKV{n * 'A'}\n" for n in range(50)).encode(), mtime=0)
    web.files = {FILE: data, LISTING: metalink(hashlib.md5(data).hexdigest(), len(data))}
    web.faults = [answer("drop_after", 100)]

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


def test_proxies_of_the_environment_are_used(web, monkeypatch):
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", web.root)
    web.url = "http://uniprot.invalid/u/uniref50.fasta.gz"
    web.files[web.url] = DATA
    get(web)


@pytest.mark.parametrize("faults, starts", [
    ([answer("drop_after", count) for count in (100_000, 50_000, 50_000)],
     [0, 100_000, 150_000, 200_000]),
    ([answer("error", 429), answer("error", 500), answer("drop_after", HALF), answer("error", 502)],
     [0, 0, 0, HALF, HALF])], ids=["dropped", "busy or broken"])
def test_what_breaks_is_continued_at_the_byte_reached(web, faults, starts, capsys):
    web.faults = list(faults)
    get(web)
    assert web.asked == [(start, '"one"' if start else None) for start in starts]
    assert "bytes" in capsys.readouterr().err


def test_a_server_that_stalls_or_always_drops_ends_in_words(web, monkeypatch):
    web.faults = [answer("whole", HALF)] * 9                # without regard to Range
    assert "same command" in refusal(OSError, web)
    assert len(web.asked) == 4
    web.part.unlink()
    web.asked.clear()
    monkeypatch.setattr(downloading, "TIMEOUT", 0.5)
    web.faults = [answer("stall_after", 100_000), answer("stall_after", 0)]
    get(web)
    assert web.asked[1:] == [(100_000, '"one"')] * 2
    web.faults = [answer("stall_after", HALF)]
    with open_url(Source(web.url)) as stream:
        with pytest.raises(OSError, match=f"{web.url}: lost after {HALF:,} bytes"):
            while stream.read(1 << 16):
                pass


@pytest.mark.parametrize("obeys_if_range", [True, False])
@pytest.mark.parametrize("etag, change, data", [
    ('"one"', {"ETag": '"two"'}, OTHER), ('"one"', {}, OTHER + b"more"),
    (None, {"ETag": None, "Last-Modified": formatdate(2e9, usegmt=True)}, OTHER)],
    ids=["ETag", "size", "Last-Modified"])
def test_another_file_after_a_resume_is_never_mixed_with_the_old(
        web, etag, change, data, obeys_if_range, capsys):
    web.validators["ETag"] = etag
    half_arrives(web)
    web.files[FILE] = data
    web.validators.update(change)
    if not obeys_if_range:
        web.faults = [answer("rest", HALF)]
    get(web)
    assert "thrown away" in capsys.readouterr().err


RESUMED = (HALF, '"one"')
ANEW = (0, None)
NO_NOTES = ['{"url"', "[" * 1000, "[1]", "3", "{}"]


@pytest.mark.parametrize("change, known, asked", [
    (lambda web: web.part.write_bytes(DATA), {}, []),
    *((lambda web, text=text: web.note.write_text(text), {}, [ANEW]) for text in NO_NOTES),
    (lambda web: None, {"md5": MD5}, [ANEW]),                 # not known when the half came
    (lambda web: None, {"release": "2025_04"}, [ANEW]),
    (lambda web: web.faults.append(answer("rest", HALF - 1)), {}, [RESUMED, ANEW]),
    (lambda web: web.faults.append(answer("give", 206, b"")), {}, [RESUMED, ANEW])],
    ids=["all is there", *NO_NOTES, "MD5", "release", "another 206", "206 of nothing"])
def test_half_a_file_is_continued_only_where_it_is_of_that_file(web, change, known, asked):
    half_arrives(web)
    change(web)
    get(web, **known)
    assert web.asked == asked


def test_without_anything_to_tell_files_apart_nothing_is_continued(web):
    web.validators = {"ETag": 'W/"weak"'}
    half_arrives(web)
    web.faults = [answer("rest", 0)]        # nobody asked for it
    refusal(ValueError, web)
    assert web.part.read_bytes() == DATA[:HALF]
    get(web)
    assert web.asked == [(0, None)] * 2


def test_a_wrong_md5_is_refused_and_the_file_removed(web):
    half_arrives(web, md5=MD5)
    web.part.write_bytes(OTHER[:HALF])
    assert MD5 in refusal(RuntimeError, web, md5=MD5)
    assert not web.path.exists() and not web.part.exists()
    get(web, md5=MD5)


@pytest.mark.parametrize("kind, body", [
    ("text/html", DATA[:99]), ("application/gzip", b"sorry"), ("application/gzip", b"\x1f")])
def test_a_page_instead_of_the_file_is_refused_and_spares_the_part(web, kind, body):
    half_arrives(web)
    web.faults = [answer("give", 200, body, Content_Type=kind)]
    assert web.url in refusal(ValueError, web) and web.part.stat().st_size == HALF


def test_only_http_and_https_are_asked_also_after_a_redirect_and_no_http_after_https(
        web, monkeypatch):
    target = "file:///etc/hostname"
    web.faults = [answer("give", 302, b"", Location=target)]
    refusal(ValueError, web)
    assert not web.path.exists() and len(web.asked) == 1
    assert "http" in refusal(ValueError, web, target)
    with pytest.raises(ValueError, match="http"):
        look_up(target)
    monkeypatch.setattr(urllib.request.HTTPSHandler, "https_open",    # a server without certificate
                        lambda self, request: self.do_open(http.client.HTTPConnection, request))
    web.faults = [answer("give", 302, b"", Location=web.url)]
    message = refusal(ValueError, web, web.url.replace("http", "https"))
    assert f"redirect to {web.url}, expected https" in message and len(web.asked) == 2


def test_a_secret_in_the_address_is_not_shown_or_written_and_a_password_refused(web, capsys):
    url = web.url + "?key=hidden"
    source = look_up(url)
    web.faults = [answer("drop_after", HALF)]
    download(source, web.path)
    message = refusal(ValueError, web, url.replace("u/", "n o/"))
    message += refusal(ValueError, web, url.replace("//", "//me:safe@") + "3")
    message += refusal(OSError, web, url.replace("127.0.0.1", "no.invalid"))
    web.faults = [answer("error", 404)] + [answer("error", 503)] * 4
    message += refusal(ValueError, web, url + "4") + refusal(OSError, web, url + "5")
    message += capsys.readouterr().err + web.note.read_text()
    assert "safe" not in message and "hidden" not in message

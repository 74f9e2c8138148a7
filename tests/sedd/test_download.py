"""Does the download by curl survive, or refuse in words, what servers and networks do?

A real HTTP server on this machine plays the faults: `web.faults` has one for each request.
"""
import gzip
import hashlib
import http.server
import json
import random
import shutil
import threading

import pytest

import prepare_uniref50
from sedd import download as downloading
from sedd.download import Source, download, downloaded_path, look_up

FILE = "/u/uniref50.fasta.gz"
LISTING = "/u/RELEASE.metalink"
DATA = gzip.compress(random.Random(0).randbytes(300_000), mtime=0)
MD5 = hashlib.md5(DATA).hexdigest()
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no program curl")


class Answer(http.server.BaseHTTPRequestHandler):
    """One request: a server of web.files that knows ranges, unless web.faults has a number for it:
    of bytes, after which the connection is dropped."""
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        web = self.server
        span = web.knows_ranges and self.headers["Range"] or "bytes=0-"
        start = int(span.removeprefix("bytes=").removesuffix("-"))
        data = web.files.get(self.path.partition("?")[0])
        web.asked.append((self.path, start))
        if data is None:
            self.send_error(404)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        is_listing = self.path == LISTING
        n_bytes = web.faults.pop(0) if web.faults and not is_listing else len(data)
        self.wfile.write(data[start:start + n_bytes])
        self.close_connection = True      # before Content-Length, too: a clean end of too little

    def log_message(self, *_):
        pass


@pytest.fixture
def web(tmp_path, monkeypatch):
    """The server, what it was asked for (path, first byte), and the folder for its files here."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(downloading, "PAUSE", 0)
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    web.daemon_threads = True
    web.files = {FILE: DATA}
    web.faults = []
    web.knows_ranges = True
    web.asked = []
    web.url = f"http://127.0.0.1:{web.server_address[1]}{FILE}"
    web.folder = tmp_path / "download"
    web.folder.mkdir()
    thread = threading.Thread(target=web.serve_forever, args=(0.01,))
    thread.start()
    yield web
    web.shutdown()
    web.server_close()
    thread.join()


def metalink(data=DATA, name="uniref50.fasta.gz", md5=None):
    return f"""<metalink xmlns="http://www.metalinker.org/"><version>2025_04</version><files>
        <file name="README"><size>5</size><hash type="md5">{'0' * 32}</hash></file>
        <file name="{name}"><size>{len(data)}</size><verification><hash type="sha1">ff</hash>
            <hash type="md5">{md5 or hashlib.md5(data).hexdigest()}</hash></verification></file>
        </files></metalink>""".encode()


@needs_curl
def test_a_dropped_connection_is_continued_at_the_byte_reached(web):
    web.faults = [100_000, 50_000]
    path = download(Source(web.url, len(DATA), MD5), web.folder)
    assert path.read_bytes() == DATA
    assert [start for _, start in web.asked] == [0, 100_000, 150_000]


@needs_curl
def test_a_later_call_continues_what_an_earlier_one_left(web, monkeypatch):
    monkeypatch.setattr(downloading, "TRIES", 2)
    web.faults = [100_000, 0]
    with pytest.raises(OSError, match="has 100,000 bytes"):
        download(Source(web.url, len(DATA), MD5), web.folder)
    web.asked.clear()
    path = download(Source(web.url, len(DATA), MD5), web.folder)
    assert path.read_bytes() == DATA
    assert [start for _, start in web.asked] == [100_000]


@needs_curl
def test_a_server_that_cannot_continue_is_asked_anew_by_the_same_command(web):
    web.knows_ranges = False
    web.faults = [100_000]
    with pytest.raises(OSError, match="cannot continue a download, so .* is removed"):
        download(Source(web.url, len(DATA), MD5), web.folder)
    assert not list(web.folder.iterdir())
    assert download(Source(web.url, len(DATA), MD5), web.folder).read_bytes() == DATA


@needs_curl
def test_a_finished_download_asks_for_nothing(web):
    web.files[LISTING] = metalink()
    first = download(look_up(web.url, web.folder), web.folder)
    web.asked.clear()
    source = look_up(web.url, web.folder)
    assert download(source, web.folder) == first
    assert source == Source(web.url, len(DATA), MD5, "2025_04")
    assert web.asked == []


@needs_curl
def test_a_wrong_md5_is_refused_and_the_data_removed(web):
    with pytest.raises(RuntimeError, match=f"found MD5 {MD5}, expected {'0' * 32}"):
        download(Source(web.url, len(DATA), "0" * 32), web.folder)
    assert list(web.folder.iterdir()) == []


@needs_curl
def test_a_page_in_place_of_gzip_is_refused(web):
    web.files[FILE] = b"<html>log in first</html>"
    with pytest.raises(RuntimeError, match="expected gzip"):
        download(Source(web.url), web.folder)
    assert list(web.folder.iterdir()) == []


@needs_curl
def test_the_words_of_curl_are_passed_on(web, capfd):
    web.files.clear()
    with pytest.raises(OSError, match="curl ended with code 22"):
        download(Source(web.url), web.folder)
    assert "404" in capfd.readouterr().err
    assert len(web.asked) == 1      # what fails at once is not tried again


@needs_curl
@pytest.mark.parametrize("text", [None, metalink(name="other.gz"), metalink(md5="none"), b"<html>"])
def test_without_a_list_of_checksums_nothing_is_known_and_a_line_says_so(web, capfd, text):
    web.files[LISTING] = text
    assert look_up(web.url, web.folder) == Source(web.url)
    assert "MD5 and release are not known" in capfd.readouterr().err


def test_a_missing_curl_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="found no program curl"):
        look_up("http://127.0.0.1/x.gz", tmp_path)


@needs_curl
def test_a_file_is_on_the_disk_before_it_has_its_name(web, disk_calls):
    path = download(Source(web.url), web.folder)
    renamed = disk_calls.index(("rename", path))
    assert ("fsync", DATA) in disk_calls[:renamed]


def test_other_addresses_are_downloaded_to_other_files(tmp_path):
    urls = ["http://a/u/x.gz", "http://b/u/x.gz", "http://a/x.gz", "https://a/u/x.gz"]
    paths = {downloaded_path(url, tmp_path) for url in urls}
    assert len(paths) == len(urls)
    assert all(path.parent == tmp_path for path in paths)


def prepared(web, folder, *options):
    """meta.json of a folder made from the url. Raises what prepare_uniref50 would raise."""
    assert prepare_uniref50.main([str(folder), "--url", f"{web.url}?key=hidden",
                                  "--val_fraction", "0", *options]) == 0
    return json.loads((folder / "meta.json").read_text())


@pytest.fixture
def proteins(web):
    text = "".join(f">{n}\nMKV{n * 'A'}\n" for n in range(50))
    data = gzip.compress(text.encode(), mtime=0)
    web.files = {FILE: data, LISTING: metalink(data)}


@needs_curl
def test_a_url_is_prepared_with_its_release(web, proteins, tmp_path):
    web.faults = [100]
    meta = prepared(web, tmp_path / "out")
    assert (meta["release"], meta["source"]) == ("2025_04", [web.url])      # without the secret
    assert meta["report"]["n_proteins"] == 50
    assert not (tmp_path / "out.partial").exists()


@needs_curl
def test_a_download_is_kept_when_the_passes_are_interrupted(web, proteins, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(prepare_uniref50, "collect", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(web, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    web.asked.clear()
    assert prepared(web, tmp_path / "out")["report"]["n_proteins"] == 50
    assert web.asked == []


@needs_curl
def test_of_a_few_records_the_beginning_is_read_and_nothing_kept(web, proteins, tmp_path):
    meta = prepared(web, tmp_path / "few", "--max_sequences", "2")
    assert meta["report"]["n_proteins"] == 2
    assert [path.name for path in tmp_path.iterdir()].count("few.partial") == 0


@needs_curl
def test_a_lost_beginning_is_an_error(web, proteins, tmp_path, capfd):
    web.faults = [100]
    code = prepare_uniref50.main([str(tmp_path / "out"), "--url", web.url, "--max_sequences", "40"])
    said = capfd.readouterr().err
    assert code == 2
    assert "curl: (18)" in said
    assert "curl ended with code 18" in said

"""jobs/download_uniref50.sh: what servers and networks do, played by an HTTP server of our own."""
import functools
import gzip
import hashlib
import http.server
import os
import random
import shutil
import subprocess
import threading

import pytest

from launchers import ROOT

NAME = "uniref50.fasta.gz"
DATA = gzip.compress(random.Random(0).randbytes(300_000), mtime=0)
MD5 = hashlib.md5(DATA).hexdigest()
pytestmark = pytest.mark.skipif(not (shutil.which("curl") and shutil.which("md5sum")),
                                reason="there is no curl, or no md5sum")


def metalink(md5, name=NAME):
    """UniProt's list of the files of a release."""
    return f"""<metalink xmlns="http://www.metalinker.org/"><version>2025_04</version><files>
        <file name="README"><size>5</size><verification>
            <hash type="md5">{'0' * 32}</hash></verification></file>
        <file name="{name}"><size>{len(DATA)}</size>
            <verification><hash type="md5">{md5}</hash></verification></file>
        <file name="uniref50.xml.gz"><size>5</size><verification>
            <hash type="md5">{'1' * 32}</hash></verification></file></files></metalink>"""


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers from web.list and web.data; knows ranges. web.drops has a number for each request of
    the data that is cut off after so many bytes."""

    def do_GET(self):
        web = self.server
        if self.path == "/RELEASE.metalink":
            self.answer(200 if web.list else 404, web.list.encode())
            return
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        web.starts.append(start)
        if self.path != f"/{NAME}" or start >= len(web.data):
            self.send_error(404 if start == 0 else 416)
            return
        n_bytes = web.drops.pop(0) if web.drops else len(web.data)
        self.answer(206 if start else 200, web.data[start:], start, n_bytes)

    def answer(self, status, data, start=0, n_bytes=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/"
                                              f"{start + len(data)}")
        self.end_headers()
        self.wfile.write(data[:n_bytes])

    def log_message(self, *_):
        pass


@pytest.fixture
def web():
    """The server, with web.starts: the first byte of each request of the data."""
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    web.daemon_threads = True
    web.data = DATA
    web.list = metalink(MD5)
    web.drops = []
    web.starts = []
    thread = threading.Thread(target=web.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield web
    finally:
        web.shutdown()
        web.server_close()
        thread.join()


@pytest.fixture
def download(web, tmp_path):
    """Runs the script on the server, into tmp_path/data: its exit code and words."""
    return functools.partial(
        subprocess.run,
        ["bash", ROOT / "jobs" / "download_uniref50.sh", "data",
         f"http://127.0.0.1:{web.server_address[1]}"],
        cwd=tmp_path, env={**os.environ, "no_proxy": "*"}, capture_output=True,
        text=True, timeout=120)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_with_the_md5_of_the_release_is_downloaded(download, tmp_path):
    done = download()
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "data") == [NAME]
    assert (tmp_path / "data" / NAME).read_bytes() == DATA


def test_a_file_with_another_md5_is_an_error_and_is_removed(web, download, tmp_path):
    web.data = DATA[::-1]
    done = download()
    assert done.returncode == 1
    assert MD5 in done.stderr
    assert names(tmp_path / "data") == []


def test_after_a_lost_connection_the_same_command_goes_on_at_the_byte_that_was_reached(
        web, download, tmp_path):
    web.drops = [100_000]
    assert download().returncode == 18      # curl's, for a file that ends too early
    assert names(tmp_path / "data") == [f"{NAME}.part"]
    assert download().returncode == 0
    assert (tmp_path / "data" / NAME).read_bytes() == DATA
    assert web.starts == [0, 100_000]


def test_a_file_that_was_whole_when_the_command_was_interrupted_is_not_asked_for_again(
        web, download, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f"{NAME}.part").write_bytes(DATA)
    assert download().returncode == 0
    assert names(tmp_path / "data") == [NAME]
    assert web.starts == []


def test_a_file_that_is_there_is_left_alone(download, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / NAME).write_text("mine")
    assert download().returncode == 0
    assert (tmp_path / "data" / NAME).read_text() == "mine"


@pytest.mark.parametrize("text", ["<html>log in first</html>", metalink(MD5, "other.gz"),
                                  metalink("none")])
def test_an_address_without_an_md5_of_the_file_is_refused_before_the_download(
        web, download, text):
    web.list = text
    done = download()
    assert done.returncode == 1
    assert NAME in done.stderr
    assert web.starts == []


def test_an_option_is_no_folder(tmp_path):
    done = subprocess.run(["bash", ROOT / "jobs" / "download_uniref50.sh", "--hlep"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 2 and "--hlep" in done.stderr
    assert names(tmp_path) == []


def test_the_words_of_curl_are_passed_on(web, download):
    web.list = ""
    done = download()
    assert done.returncode == 22
    assert "404" in done.stderr

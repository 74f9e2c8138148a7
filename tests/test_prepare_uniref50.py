"""prepare_uniref50: what the folder holds, whatever interrupts its making, and what is refused."""

import errno
import gzip
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import prepare_uniref50
from sequence_data import (AMINO_ACIDS, Proteins, decode, order_words, read_sequences,
                           split_by_hash)

ROOT = Path(__file__).resolve().parents[1]


def prepare(out, *files, **options):
    """Exit code of prepare_uniref50.py OUT --fasta FILES, without validation unless asked for.

    Few proteins would leave the set for validation empty.
    """
    options = {"val_fraction": 0, **options}
    argv = [str(out), *(["--fasta", *map(str, files)] if files else [])]
    return prepare_uniref50.main(argv + [word for name, value in options.items()
                                         for word in (f"--{name}", str(value))])


def refusal(capsys, out, *files, **options):
    assert prepare(out, *files, **options) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: ")
    return message


def random_proteins(n, seed=0, longest=300):
    rng = np.random.default_rng(seed)
    return [decode(rng.integers(0, 20, size)) for size in rng.integers(20, longest, n)]


def write_fasta(path, sequences):
    records = [f">{i} some protein\n{sequence}\n" for i, sequence in enumerate(sequences)]
    text = "".join(records).encode()
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
    return path


def contents(folder):
    """{name of a file: its bytes} of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def meta_of(folder):
    return json.loads((folder / "meta.json").read_text())


def load(folder, name="train"):
    """A set of a prepared folder -> (Proteins without keys, keys), by the documented layout."""
    tokens, lengths, keys = (np.fromfile(folder / name / f"{part}.bin", kind) for part, kind in
                             (("tokens", "u1"), ("lengths", "<u4"), ("keys", "<u8")))
    lengths = lengths.astype(np.int64)
    assert lengths.sum() == len(tokens) and len(keys) == len(lengths)
    return Proteins(tokens, np.cumsum(lengths) - lengths, lengths), keys


def texts(proteins):
    return [decode(proteins[i]) for i in range(len(proteins))]


def sorted_texts(folder, name="train"):
    return sorted(texts(load(folder, name)[0]))


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def file(tmp_path):
    return write_fasta(tmp_path / "in.fasta", random_proteins(50))


def set_sizes(monkeypatch, *sizes):
    for name, size in zip(("FLUSH_BYTES", "BUCKET_BYTES"), sizes):
        monkeypatch.setattr(prepare_uniref50, name, size)


# ---- what the folder holds ----

@pytest.mark.parametrize("sizes", [(), (20_000, 12_000)])
def test_the_folder_holds_what_read_sequences_reads(tmp_path, out, shared, monkeypatch, sizes):
    set_sizes(monkeypatch, *sizes)
    file = shared / "data" / "proteins.fasta.gz"
    assert prepare(out, file, val_fraction=0.05) == 0
    proteins, report = read_sequences(file)
    meta = meta_of(out)
    train, val = split_by_hash(proteins, 0.05)
    for name, indices in (("train", train), ("val", val)):
        found, keys = load(out, name)
        expected = proteins.subset(indices)
        assert texts(found) == texts(expected)                  # in the same order, too
        assert (keys == expected.keys).all() and (keys == found.keys).all()
        entry = meta["sets"][name]
        assert (entry["proteins"], entry["residues"]) == (len(expected), expected.lengths.sum())
        assert entry["letter_counts"] == expected.letter_counts().tolist()
        histogram = np.stack(np.unique(expected.lengths, return_counts=True), axis=1)
        assert entry["length_histogram"] == histogram.tolist()
        for part, about in entry["files"].items():
            data = (out / name / part).read_bytes()
            checksum = hashlib.blake2b(data, digest_size=16).hexdigest()
            assert about == {"bytes": len(data), "blake2b": checksum}
        digest = hashlib.blake2b(keys.tobytes(), digest_size=8).hexdigest()
        assert entry["keys_hash"] == digest
    assert meta["report"] == vars(report)
    expected = {"format": "prepared proteins", "version": 1, "letters": AMINO_ACIDS + "X",
                "seed": 0, "val_fraction": 0.05, "min_length": 1,
                "source": ["proteins.fasta.gz"], "release": None}
    assert {key: meta[key] for key in expected} == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]  # nothing is left beside it


def test_the_order_of_records_files_and_pieces_does_not_matter(tmp_path, monkeypatch):
    sequences = random_proteins(600)
    whole = write_fasta(tmp_path / "whole.fasta", sequences)
    random.Random(0).shuffle(sequences)
    again = sequences[:100] + sequences                 # 100 duplicates, across files and pieces
    parts = [write_fasta(tmp_path / "a.fa.gz", again[:300]),
             write_fasta(tmp_path / "b.fasta", again[300:])]
    prepare(tmp_path / "one", whole, val_fraction=0.1)
    for size in (5_000, 40_000):
        set_sizes(monkeypatch, size, size)
        for files in (parts, parts[::-1]):
            out = tmp_path / f"out{size}{files[0].name}"
            prepare(out, *files, val_fraction=0.1)
            one, other = contents(tmp_path / "one"), contents(out)
            metas = [json.loads(files.pop("meta.json")) for files in (one, other)]
            assert one == other and metas[0]["sets"] == metas[1]["sets"]
            assert [meta["report"].pop("n_duplicates") for meta in metas] == [0, 100]
            assert metas[0]["report"] == metas[1]["report"]
            assert metas[1]["source"] == ["a.fa.gz", "b.fasta"]


def test_the_seed_changes_the_order_and_not_the_sides(tmp_path):
    file = write_fasta(tmp_path / "in.fasta", random_proteins(300))
    folders = {seed: tmp_path / str(seed) for seed in (0, 1)}
    for seed, folder in folders.items():
        prepare(folder, file, seed=seed, val_fraction=0.2)
        assert (np.diff(order_words(load(folder)[1], seed).astype(float)) > 0).all()
    for name in ("train", "val"):
        first, second = (texts(load(folder, name)[0]) for folder in folders.values())
        assert first != second and sorted(first) == sorted(second)


def test_cleaning_is_that_of_the_reader_and_a_set_may_be_empty(tmp_path, capsys):
    out = tmp_path / "my data"
    (tmp_path / "in.fasta").write_text(">a\nmkv u*\n>b\nXX\n>c\n\n>d\nMK\n>e\nMKVX\n>f\nACDEFGH*\n")
    assert prepare(out, tmp_path / "in.fasta", min_length=3) == 0
    assert sorted_texts(out) == ["ACDEFGH", "MKVX"]
    assert {path.read_bytes() for path in (out / "val").iterdir()} == {b""}
    screen = capsys.readouterr().out
    _, report = read_sequences(tmp_path / "in.fasta", 3)
    assert str(report) in " ".join(screen.split())
    assert max(map(len, screen.splitlines()[:5])) <= 80
    assert "data.val_fraction=0.0 data.min_length=3" in screen
    words = shlex.split(screen.split("Next:")[1])
    assert "configs/sedd_cpu.yaml" == words[words.index("--config") + 1]
    assert os.path.abspath(words[words.index("--data") + 1]) == str(out)


def test_text_and_pt_files_are_taken_together_with_fasta(tmp_path, out):
    sequences = random_proteins(60)
    write_fasta(tmp_path / "a.fasta", sequences[:20])
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\r\n".join(sequences[20:40]).encode()))
    torch.save([{"protein_seq": sequence} for sequence in sequences[40:]], tmp_path / "C.PT")
    prepare(out, *(tmp_path / name for name in ("a.fasta", "b.txt.gz", "C.PT")))
    assert sorted_texts(out) == sorted(sequences)


@pytest.mark.parametrize("wanted", [1, 7, 40, 41, 59, 60, 1000])
def test_max_sequences_takes_the_first_records_of_all_files(tmp_path, out, wanted):
    sequences = random_proteins(60)
    sequences[3] = ""                                           # an empty record counts as one
    files = [write_fasta(tmp_path / "a.fasta", sequences[:40]),
             write_fasta(tmp_path / "b.fasta.gz", sequences[40:])]
    assert prepare(out, *files, max_sequences=wanted) == 0
    expected = [sequence for sequence in sequences[:wanted] if sequence]
    assert sorted_texts(out) == sorted(expected) and meta_of(out)["max_sequences"] == wanted


def test_what_stands_behind_the_records_wanted_is_not_read(tmp_path, file):
    file.write_text(file.read_text() + ">bad\nM-K\n")
    assert prepare(tmp_path / "out", file, max_sequences=50) == 0
    assert prepare(tmp_path / "other", file, max_sequences=51) == 2


def test_many_copies_of_few_proteins_fit(tmp_path, out, monkeypatch):
    set_sizes(monkeypatch, 20_000, 12_000)          # copies of one protein cannot be dealt apart
    few = random_proteins(3)
    assert prepare(out, *[write_fasta(tmp_path / "in.fasta", few * 100)] * 40) == 0
    assert sorted_texts(out) == sorted(few)
    assert meta_of(out)["report"]["n_duplicates"] == 11997


# ---- a source on the net, by a stand-in for the download ----

URL = "https://example.org/net.fasta.gz"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """What the download part does, from a file; .opened and .downloaded are counted."""
    file = write_fasta(tmp_path / "net.fasta.gz", random_proteins(500))
    log = SimpleNamespace(opened=0, downloaded=0, file=file)

    def download(source, path):
        log.downloaded += 1
        shutil.copy(log.file, path)

    def open_stream(source):
        log.opened += 1
        return open(log.file, "rb")

    def look_up(url):
        return SimpleNamespace(size=log.file.stat().st_size, release="2026_01")
    for work in (download, open_stream):
        monkeypatch.setattr(prepare_uniref50, work.__name__, work)
    monkeypatch.setattr(prepare_uniref50, "look_up", look_up)
    return log


def raises(error):
    def fail(*_):
        raise error
    return fail


def test_a_url_is_downloaded_once_and_its_release_is_written_down(
        tmp_path, out, server, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(prepare_uniref50, "collect", raises(RuntimeError("interrupted here")))
        assert "interrupted here" in refusal(capsys, out, url=URL)
    assert server.downloaded == 1 and not out.exists()
    server.downloaded = 0
    assert (tmp_path / "out.partial" / "download" / "net.fasta.gz").exists()
    assert prepare(out, url=URL) == 0
    meta = meta_of(out)
    assert meta["release"] == "2026_01" and meta["source"] == [URL]
    assert meta["report"]["n_proteins"] == 500 and not (tmp_path / "out.partial").exists()
    assert prepare(out, url=URL) == 0 and "finished already" in capsys.readouterr().out


def test_only_the_head_of_a_url_is_read_for_some_sequences(out, server):
    assert prepare(out, url=URL, max_sequences=50) == 0
    assert server.downloaded == 0 and server.opened >= 1
    assert sorted_texts(out) == sorted(random_proteins(500)[:50])


# ---- refusals ----

@pytest.mark.parametrize("content, name, says", [
    (">a\nMKV\n>b\nMK-V\n", "in.fasta", "line 4, column 3"), ("", "in.fasta", "is empty (0 bytes)"),
    (">a\nXX\n", "in.fasta", "no protein is left of 1 records"), ("<html>", "in.gz", "is not gzip"),
    ("junk", "in.pt", "cannot be loaded"), (None, "none.fasta", "does not exist")])
def test_a_bad_file_is_refused_by_name_and_leaves_no_folder(
        tmp_path, out, file, capsys, content, name, says):
    path = tmp_path / "bad" / name
    path.parent.mkdir()
    if content is not None:
        path.write_text(content)
    message = refusal(capsys, out, *([path] if "left" in says else [file, path]))
    assert says in message and name in message
    assert not out.exists() and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("key, value", [
    ("val_fraction", 1), ("val_fraction", -0.1), ("val_fraction", "nan"), ("min_length", 0),
    ("max_sequences", 0)])
def test_impossible_settings_are_refused(tmp_path, out, file, capsys, key, value):
    message = refusal(capsys, out, file, **{key: value})
    assert key in message and "expected" in message and not (tmp_path / "out.partial").exists()


def test_a_set_without_training_proteins_is_refused(out, file, capsys):
    message = refusal(capsys, out, file, val_fraction=0.9999999)
    assert "puts 0 proteins in training and 50 in validation" in message
    assert list(out.parent.iterdir()) == [file]     # no work that no call could go on from


def test_too_little_free_disk_is_refused_with_numbers_beforehand(
        tmp_path, out, capsys, monkeypatch, server):
    file = write_fasta(tmp_path / "in.fasta.gz", random_proteins(20_000))
    result = sum(len(sequence) + 12 for sequence in random_proteins(20_000))
    work = 2 * prepare_uniref50.BUCKET_BYTES
    space = SimpleNamespace(free=work + result)         # without the padding of proteins to words
    monkeypatch.setattr(shutil, "disk_usage", lambda path: space)
    message = refusal(capsys, out, file)
    need = float(re.search(r"expected about ([\d.]+) GB", message)[1]) * 1e9
    assert work + result - 1e6 < need < work + 1.3 * result + 1e7 and "GB free" in message
    partial = tmp_path / "out.partial"
    assert not partial.exists() or os.listdir(partial) == []
    space.free = 1.02 * need
    assert prepare(out, file) == 0
    space.free = 50_000
    message = refusal(capsys, tmp_path / "net", url=URL)
    assert "to download" in message and server.downloaded == 0


def test_a_disk_that_is_full_later_is_named_with_what_to_do(out, file, capsys, monkeypatch):
    for owner, name, number in ((prepare_uniref50.SetWriter, "write", errno.ENOSPC),
                                (prepare_uniref50, "append", errno.EDQUOT)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raises(OSError(number, os.strerror(number), "tokens.bin")))
            message = refusal(capsys, out, file)
        assert "quota is full. Make room and run the same command again" in message
        assert "tokens.bin" in message
    assert prepare(out, file) == 0


def test_ctrl_c_ends_with_130_and_one_line(out, file, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(prepare_uniref50, "collect", raises(KeyboardInterrupt()))
        assert prepare(out, file) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("interrupted; the same command")
    assert not out.exists() and prepare(out, file) == 0


def test_a_finished_folder_is_left_alone_and_one_of_other_settings_refused(
        tmp_path, out, file, capsys):
    assert prepare(out, file) == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert prepare(out, file) == 0 and "finished already" in capsys.readouterr().out
    for options, says in [(dict(seed=1), "seed is 0 there and 1 here"),
                          (dict(val_fraction=0.5), "val_fraction is 0.0 there and 0.5 here"),
                          (dict(max_sequences=9), "max_sequences is None there and 9 here"),
                          (dict(min_length=2), "min_length is 1 there and 2 here")]:
        assert says in refusal(capsys, out, file, **options)
    other = write_fasta(tmp_path / "other.fasta", random_proteins(50))
    assert "source is ['in.fasta'] there and ['other.fasta'] here" in refusal(capsys, out, other)
    text = file.read_text()
    file.write_text(text + ">more\nMKV\n")
    assert "source_bytes is" in refusal(capsys, out, file)
    file.write_text(text[:-2] + ("A" if text[-2] != "A" else "C") + "\n")       # of the same size
    assert "source_digest is" in refusal(capsys, out, file)
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.fasta", "other.fasta", "out"]
    file.write_text(text)
    (out / "train" / "keys.bin").unlink()
    assert "train/keys.bin is missing" in refusal(capsys, out, file)


def test_anything_else_of_the_name_of_the_folder_is_refused_and_untouched(tmp_path, file, capsys):
    (tmp_path / "text").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "meta.json").write_text("[]")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("text", "folder", "json", "link"):
        message = refusal(capsys, tmp_path / name, file)
        assert f"{name} exists, and is no prepared folder" in message
    assert (tmp_path / "text").read_text() == "mine" and not any((tmp_path / "folder").iterdir())


def test_two_at_once_on_one_folder_are_refused_and_the_first_goes_on(
        out, file, capsys, monkeypatch):
    collect, messages = prepare_uniref50.collect, []

    def with_another(*arguments):
        messages.append(refusal(capsys, out, file))
        return collect(*arguments)
    monkeypatch.setattr(prepare_uniref50, "collect", with_another)
    assert prepare(out, file) == 0
    assert "another process is making" in messages[0] and len(load(out)[0]) == 50


def test_a_disk_without_locks_is_named_and_used(out, file, capsys, monkeypatch):
    no_locks = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))       # Lustre mounted without flock
    monkeypatch.setattr(prepare_uniref50.fcntl, "flock", raises(no_locks))
    assert prepare(out, file) == 0 and len(load(out)[0]) == 50
    assert f"{out.parent}: this disk has no locks" in capsys.readouterr().err


# ---- kills ----

def killed_at(moment, *arguments, **options):
    """prepare() in a forked process that is killed at its moment-th step -> (exit code, steps).

    A step is opening, making, renaming or removing a file.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        lock, count = threading.Lock(), 0

        def step(event, arguments):
            nonlocal count
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fcntl.flock"):
                with lock:
                    count += 1
                    if count == moment:
                        os.kill(os.getpid(), signal.SIGKILL)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        sys.addaudithook(step)
        code = prepare(*arguments, **options)
        os.write(writer, str(count).encode())
        os._exit(code)
    os.close(writer)
    status = os.waitpid(pid, 0)[1]
    with open(reader, "rb") as file:
        return os.waitstatus_to_exitcode(status), int(file.read() or 0)


def test_a_kill_at_any_step_leaves_no_folder_or_a_whole_one(tmp_path, out):
    file = write_fasta(tmp_path / "in.fasta", random_proteins(10))
    killed_at(None, tmp_path / "whole", file)
    code, n_kills, n_whole = None, 0, 0
    while code != 0:                                            # on what the kill before has left
        code, _ = killed_at(n_kills + 1, out, file)
        assert code in (0, -signal.SIGKILL)
        n_kills += code == -signal.SIGKILL
        if out.exists():
            assert contents(out) == contents(tmp_path / "whole")
            n_whole += 1
            if code:
                shutil.rmtree(out)
    assert 30 < n_kills < 200 and n_whole > 1


# ---- memory, help ----

def test_memory_is_bounded_whatever_the_size_of_the_source(tmp_path):
    rng, peaks = np.random.default_rng(0), []
    letters = np.frombuffer(AMINO_ACIDS.encode(), np.uint8)
    path = tmp_path / "in.fasta"
    for n in (60_000, 120_000):                                 # 18 and 36 MB
        rows = np.full((n, 302), ord("\n"), np.uint8)
        rows[:, 0] = ord(">")
        rows[:, 2:301] = letters[rng.integers(0, 20, (n, 299), np.uint8)]
        path.write_bytes(rows.tobytes())
        script = ("import resource, sys, prepare_uniref50 as p; "
                  "p.FLUSH_BYTES, p.BUCKET_BYTES = 8 << 20, 6 << 20; "
                  "code = p.main(sys.argv[1:]); "
                  "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)")
        # By way of a shell that forks: a child of this process would begin with our own peak.
        command = ["sh", "-c", '"$@"; exit $?', "-", sys.executable, "-c", script]
        done = subprocess.run([*command, tmp_path / str(n), "--fasta", path], cwd=ROOT,
                              capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.splitlines()[-1]) * 1024)
    assert max(peaks) < 450 << 20 and abs(peaks[1] - peaks[0]) < 15 << 20, peaks


def test_progress_lines_fit_into_80_columns_and_say_sequences_and_rate(tmp_path, out, capfd):
    assert prepare(out, write_fasta(tmp_path / "in.fasta.gz", random_proteins(5000))) == 0
    lines = [line for line in re.split("[\r\n]", capfd.readouterr().err) if line.strip()]
    assert all(len(line) <= 80 for line in lines)
    assert any(re.match(r"1/2 reading: 5.00k sequences .* sequences/s", line) for line in lines)
    assert re.match(r"2/2 sorting: 100%.* sequences/s", lines[-1])

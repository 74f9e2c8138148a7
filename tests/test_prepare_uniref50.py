"""prepare_uniref50: what the folder holds, whatever interrupts its making, and what is refused."""

import errno
import gzip
import hashlib
import json
import os
import random
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
    for name, size in zip(("FLUSH_BYTES", "BUCKET_BYTES", "LARGEST_BUCKET"), sizes):
        monkeypatch.setattr(prepare_uniref50, name, size)


def raises(error):
    def fail(*_):
        raise error
    return fail


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


def test_text_and_pt_files_are_taken_together_with_fasta(tmp_path, out):
    sequences = random_proteins(60)
    write_fasta(tmp_path / "a.fasta", sequences[:20])
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\r\n".join(sequences[20:40]).encode()))
    torch.save([{"protein_seq": sequence} for sequence in sequences[40:]], tmp_path / "C.PT")
    prepare(out, *(tmp_path / name for name in ("a.fasta", "b.txt.gz", "C.PT")))
    assert sorted_texts(out) == sorted(sequences)


@pytest.mark.parametrize("wanted", [7, 40, 41, 1000])
def test_max_sequences_takes_the_first_records_of_all_files(tmp_path, out, wanted):
    sequences = random_proteins(60)
    sequences[3] = ""                                           # an empty record counts as one
    files = [write_fasta(tmp_path / "a.fasta", sequences[:40]),
             write_fasta(tmp_path / "b.fasta.gz", sequences[40:])]
    assert prepare(out, *files, max_sequences=wanted) == 0
    expected = [sequence for sequence in sequences[:wanted] if sequence]
    assert sorted_texts(out) == sorted(expected) and meta_of(out)["max_sequences"] == wanted


# ---- refusals ----

@pytest.mark.parametrize("content, name, says", [
    (">a\nMKV\n>b\nMK-V\n", "in.fasta", "line 4, column 3"), ("", "in.fasta", "is empty (0 bytes)"),
    (">a\nXX\n", "in.fasta", "no protein is left of 1 records"),
    (None, "none.fasta", "does not exist")])
def test_a_bad_file_is_refused_by_name_and_leaves_no_folder(
        tmp_path, out, file, capsys, content, name, says):
    path = tmp_path / "bad" / name
    path.parent.mkdir()
    if content is not None:
        path.write_text(content)
    message = refusal(capsys, out, *([path] if "left" in says else [file, path]))
    assert says in message and name in message
    assert not out.exists() and not (tmp_path / "out.partial").exists()


def test_settings_that_cannot_be_or_leave_a_set_empty_are_refused(out, file, capsys):
    for key, value, says in (
            ("val_fraction", "nan", "expected"), ("max_sequences", 0, "expected"),
            ("val_fraction", 0.9999999, "puts 0 proteins in training and 50 in validation")):
        message = refusal(capsys, out, file, **{key: value})
        assert key in message and says in message
    assert list(out.parent.iterdir()) == [file]     # no work that no call could go on from


def test_too_little_free_disk_is_refused_with_numbers_beforehand(
        tmp_path, out, capsys, monkeypatch):
    sequences = random_proteins(20_000)
    file = write_fasta(tmp_path / "in.fasta.gz", sequences)
    # without the padding of proteins to words
    need = 2 * prepare_uniref50.BUCKET_BYTES + sum(len(sequence) + 12 for sequence in sequences)
    space = SimpleNamespace(free=need)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: space)
    assert f"{need / 1e9:,.3f} GB free; expected about 0." in refusal(capsys, out, file)
    space.free = 1.05 * need
    assert prepare(out, file) == 0


def test_a_finished_folder_is_left_alone_and_one_of_other_settings_refused(
        tmp_path, out, file, capsys):
    assert prepare(out, file) == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert prepare(out, file) == 0 and "finished already" in capsys.readouterr().out
    assert "seed is 0 there and 1 here" in refusal(capsys, out, file, seed=1)
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
    (tmp_path / "folder" / "meta.json").write_text("[]")
    for name in ("text", "folder"):
        message = refusal(capsys, tmp_path / name, file)
        assert f"{name} exists, and is no prepared folder" in message
    assert (tmp_path / "text").read_text() == "mine"
    assert (tmp_path / "folder" / "meta.json").read_text() == "[]"


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

def killed_at(moment, *arguments):
    """Exit code of prepare() in a forked process that is killed at its moment-th step.

    A step is opening, making, renaming or removing a file.
    """
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
        os._exit(prepare(*arguments))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_kill_at_any_step_leaves_no_folder_or_a_whole_one(tmp_path, out):
    file = write_fasta(tmp_path / "in.fasta", random_proteins(10))
    killed_at(None, tmp_path / "whole", file)
    code, n_kills, n_whole = None, 0, 0
    while code != 0:                                            # on what the kill before has left
        code = killed_at(n_kills + 1, out, file)
        assert code in (0, -signal.SIGKILL)
        n_kills += code == -signal.SIGKILL
        if out.exists():
            assert contents(out) == contents(tmp_path / "whole")
            n_whole += 1
            if code:
                shutil.rmtree(out)
    assert 30 < n_kills < 200 and n_whole > 1


# ---- memory ----

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

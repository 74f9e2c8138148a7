"""prepare_uniref50: what the folder holds, whatever interrupts its making, and what is refused."""

import errno
import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import prepare_uniref50
from launchers import ROOT, Printed
from proteins.letters import AMINO_ACIDS, decode
from proteins.sequences import order_words, read_sequences, split_by_hash


def prepare(out, *files, **options):
    """Exit code of prepare_uniref50.py OUT --fasta FILES, without validation unless asked for."""
    options = [f"--{name}={value}" for name, value in {"val_fraction": 0, **options}.items()]
    return prepare_uniref50.main([str(out), *options, "--fasta", *map(str, files)])


def refusal(capsys, out, *files, **options):
    assert prepare(out, *files, **options) == 2
    message = Printed(capsys.readouterr().err)
    assert "\nerror: " in f"\n{message}"
    return message


def random_proteins(n):
    rng = np.random.default_rng(0)
    return [decode(rng.integers(0, 20, size)) for size in rng.integers(20, 300, n)]


def write_fasta(path, proteins):
    text = "".join(f">some protein\n{protein}\n" for protein in proteins).encode()
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
    return path


def contents(folder):
    """{name of a file: its bytes} of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}


def sequences(folder, name="train"):
    """The proteins of a set of a prepared folder, in their order, by the documented layout."""
    tokens, lengths = (np.fromfile(folder / name / f"{part}.bin", kind)
                       for part, kind in (("tokens", "u1"), ("lengths", "<u4")))
    return [decode(row) for row in np.split(tokens, np.cumsum(lengths)[:-1])]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def file(tmp_path):
    return write_fasta(tmp_path / "in.fasta", random_proteins(50))


def test_the_folder_holds_what_read_sequences_reads(tmp_path, out, shared):
    file = shared / "data" / "proteins.fasta.gz"
    assert prepare(out, file, val_fraction=0.05) == 0
    proteins, report = read_sequences(file)
    meta = json.loads((out / "meta.json").read_text())
    for name, indices in zip(("train", "val"), split_by_hash(proteins, 0.05)):
        expected = proteins.subset(indices)
        entry = meta["sets"][name]
        files = contents(out / name)
        assert sequences(out, name) == [decode(expected[i]) for i in range(len(expected))]
        assert files["keys.bin"] == expected.keys.astype("<u8").tobytes()
        assert (entry["proteins"], entry["residues"]) == (len(expected), expected.lengths.sum())
        assert entry["files"] == {part: {"bytes": len(data), "blake2b": hashlib.blake2b(
            data, digest_size=16).hexdigest()} for part, data in files.items()}
    assert meta["report"] == vars(report) and meta["letters"] == AMINO_ACIDS + "X"
    assert meta["source"] == ["proteins.fasta.gz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]  # nothing is left beside it


def test_the_order_is_that_of_the_seed_whatever_the_records_files_and_pieces(
        tmp_path, monkeypatch, capsys):
    proteins = random_proteins(600)
    folders = []
    whole = write_fasta(tmp_path / "whole.fasta", proteins)
    parts = [write_fasta(tmp_path / "a.fa.gz", proteins[200:]),      # 100 duplicates
             write_fasta(tmp_path / "b.fasta", proteins[299::-1])]
    for files in ([whole], parts, parts[::-1]):
        out = tmp_path / str(len(folders))
        prepare(out, *files, val_fraction=0.1)
        for name in ("FLUSH_BYTES", "BUCKET_BYTES"):     # small ones for the next
            monkeypatch.setattr(prepare_uniref50, name, 9_000)
        folders.append(contents(out))
        # in a line of a job's log, also where proteins come twice
        assert re.search(r"^\r?2/2 sorting: 100%.*\n", capsys.readouterr().err, re.M)
    metas = [json.loads(files.pop("meta.json")) for files in folders]
    assert folders[0] == folders[1] == folders[2] and metas[1] == metas[2]
    assert metas[1].pop("source") == ["a.fa.gz", "b.fasta"]
    assert [meta["report"].pop("n_duplicates") for meta in metas[:2]] == [0, 100]
    assert all(metas[0][name] == metas[1][name] for name in ("sets", "report"))
    prepare(tmp_path / "seeded", whole, seed=1, val_fraction=0.1)
    for name in ("train", "val"):       # the sides are not those of the seed
        first, second = (sequences(tmp_path / folder, name) for folder in ("0", "seeded"))
        assert first != second and sorted(first) == sorted(second)
        keys = np.fromfile(tmp_path / "seeded" / name / "keys.bin", "<u8")
        assert (np.diff(order_words(keys, 1).astype(float)) > 0).all()


@pytest.mark.parametrize("n, fraction", [(50, 0.05), (2300, 0.05), (12_000, 0.01)])
def test_of_fewer_proteins_a_larger_share_is_held_out_by_default(
        out, tmp_path, capsys, n, fraction):
    rng = np.random.default_rng(0)
    file = write_fasta(tmp_path / "p.fasta", [decode(rng.integers(0, 20, 30)) for _ in range(n)])
    assert prepare_uniref50.main([str(out), "--fasta", str(file)]) == 0
    meta = json.loads((out / "meta.json").read_text())
    assert meta["val_fraction"] == fraction
    assert meta["sets"]["val"]["proteins"] > 0.7 * n * fraction
    assert f"data.val_fraction={fraction}" in capsys.readouterr().out
    assert prepare_uniref50.main([str(out), "--fasta", str(file)]) == 0   # finished already


def test_uniref50_keeps_its_thousandth_for_validation():
    assert prepare_uniref50.choose_val_fraction(60_000_000) == 0.001


def test_a_few_proteins_for_validation_come_with_a_warning_and_a_better_share(
        out, tmp_path, capsys):
    file = write_fasta(tmp_path / "p.fasta", random_proteins(2300))
    assert prepare(out, file, val_fraction=0.001) == 0
    warning = capsys.readouterr().err
    n_val = json.loads((out / "meta.json").read_text())["sets"]["val"]["proteins"]
    assert f"ATTENTION: only {n_val} of 2,300 proteins" in warning
    assert "--val_fraction 0.05" in warning


@pytest.mark.parametrize("wanted", [7, 40, 41, 51, 1000])
def test_max_sequences_takes_the_first_records_of_all_files(tmp_path, out, wanted):
    proteins = random_proteins(60)
    proteins[3] = ""                                           # an empty record counts as one
    files = [tmp_path / name for name in ("a.fasta", "b.txt.gz", "C.PT")]
    write_fasta(files[0], proteins[:40])
    files[1].write_bytes(gzip.compress("\r\n".join(proteins[40:50]).encode()))
    torch.save([{"protein_seq": protein} for protein in proteins[50:]], files[2])
    for _ in ("made", "finished already"):
        assert prepare(out, *files, max_sequences=wanted) == 0
    assert sorted(sequences(out)) == sorted(filter(None, proteins[:wanted]))


@pytest.mark.parametrize("content, name, says", [
    (">a\nMKV\n>b\nMK-V\n", "in.fasta", "line 4, column 3"), (None, "none.fasta", "does not exist"),
    (">a\nXX\n", "in.fasta", "no protein is left of 1 records")])
def test_a_bad_file_is_refused_by_name_and_leaves_no_folder(
        tmp_path, out, capsys, content, name, says):
    if content is not None:
        (tmp_path / name).write_text(content)
    message = refusal(capsys, out, tmp_path / name)
    assert says in message and name in message
    assert not out.exists() and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("words", [
    [], ["out", "--seed", "x"], ["out", "--fasta"]])
def test_a_wrong_command_line_is_one_sentence_and_code_2(words, capsys):
    try:
        code = prepare_uniref50.main(words)
    except SystemExit as exit:
        code = exit.code
    assert code == 2 and "error: " in capsys.readouterr().err


def test_without_a_file_the_script_that_downloads_one_is_named(out, capsys):
    assert prepare_uniref50.main([str(out)]) == 2
    message = Printed(capsys.readouterr().err)
    assert message.startswith("error: found no file of proteins; expected --fasta FILE")
    assert "bash jobs/download_uniref50.sh" in message
    assert not out.parent.joinpath("out.partial").exists()


def test_a_file_of_somebody_else_in_the_working_folder_stays(tmp_path, out, file):
    (tmp_path / "out.partial").mkdir()
    thesis = tmp_path / "out.partial" / "thesis.txt"
    thesis.write_text("three years")
    assert prepare(out, file) == 0
    assert os.listdir(thesis.parent) == ["thesis.txt"] and thesis.read_text() == "three years"


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path, out, file, capsys):
    other = tmp_path / "other"
    other.write_text("kept")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "lock").symlink_to(other)
    assert "cannot work in" in refusal(capsys, out, file)
    assert other.read_text() == "kept"


def test_a_file_in_place_of_the_working_folder_is_named(tmp_path, out, file, capsys):
    (tmp_path / "out.partial").write_text("kept")
    assert "cannot work in" in refusal(capsys, out, file)
    assert (tmp_path / "out.partial").read_text() == "kept"


def test_settings_that_cannot_be_or_leave_a_set_empty_are_refused(out, file, capsys):
    for name, value, says in (
            ("val_fraction", "nan", "expected"), ("max_sequences", 0, "expected"),
            ("val_fraction", 0.9999999, "puts 0 proteins in training and 50 in validation")):
        message = refusal(capsys, out, file, **{name: value})
        assert name in message and says in message
    assert list(out.parent.iterdir()) == [file]     # no work that no call could go on from


def test_too_little_free_disk_is_refused_with_numbers_beforehand(
        tmp_path, out, capsys, monkeypatch):
    proteins = random_proteins(20_000)
    file = write_fasta(tmp_path / "in.fasta.gz", proteins)
    # without the padding of proteins to words
    need = 2 * prepare_uniref50.BUCKET_BYTES + sum(len(protein) + 12 for protein in proteins)
    space = SimpleNamespace(free=need)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: space)
    assert f"{need / 1e9:,.3f} GB free; expected about 0." in refusal(capsys, out, file)
    space.free = 1.05 * need
    assert prepare(out, file) == 0


def test_a_finished_folder_is_left_alone_and_one_of_other_settings_or_contents_refused(
        tmp_path, out, file, capsys):
    assert prepare(out, file) == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert prepare(out, file) == 0 and "finished already" in capsys.readouterr().out
    other = write_fasta(tmp_path / "other.fasta", ["MKV"])
    message = refusal(capsys, out, other, seed=1)
    for words in ("seed is 0 there and 1 here", "source_bytes is", "source_digest is",
                  "source is ['in.fasta'] there and ['other.fasta'] here"):
        assert words in message
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert {*tmp_path.iterdir()} == {file, other, out}
    (out / "train" / "keys.bin").unlink()
    assert "train/keys.bin is missing" in refusal(capsys, out, file)
    (out / "meta.json").write_text("[]")
    (tmp_path / "text").write_text("mine")
    before = contents(tmp_path)
    for name in ("out", "text"):
        assert f"{name} exists, and is no prepared fold" in refusal(capsys, tmp_path / name, file)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("place", [0, -1])
def test_another_beginning_or_end_of_a_long_file_gives_another_digest(tmp_path, place):
    file = tmp_path / "long.fasta"
    text = bytearray(b"A" * 3_000_000)
    file.write_bytes(text)
    before = prepare_uniref50.digest_of_ends(file)
    text[place] = ord("C")
    file.write_bytes(text)
    assert prepare_uniref50.digest_of_ends(file) != before


def test_two_at_once_on_one_folder_are_refused_and_a_disk_without_locks_is_named_and_used(
        tmp_path, out, file, capsys, monkeypatch):
    collect = prepare_uniref50.collect

    def with_another(*arguments):
        assert "another process is making" in refusal(capsys, out, file)
        return collect(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_uniref50, "collect", with_another)
        assert prepare(out, file) == 0 and len(sequences(out)) == 50
    no_locks = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))       # Lustre mounted without flock
    monkeypatch.setattr(prepare_uniref50.fcntl, "flock", mock.Mock(side_effect=no_locks))
    assert prepare(tmp_path / "new", file) == 0 and len(sequences(tmp_path / "new")) == 50
    assert f"{tmp_path}: this disk has no locks" in capsys.readouterr().err


def killed_at(moment, *arguments):
    """Exit code of prepare() in a forked process that is killed at its moment-th step: opening,
    making, renaming or removing a file."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def step(event, arguments):
            nonlocal count
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fcntl.flock"):
                count += 1
                if count == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(step)
        try:
            code = prepare(*arguments)
            sys.stderr.flush()      # why it was refused
            os._exit(code)
        finally:
            os._exit(1)     # after an exception, which must not go on into pytest
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_no_folder_or_a_whole_one(tmp_path, out):
    file = write_fasta(tmp_path / "in.fasta", random_proteins(10))
    killed_at(None, tmp_path / "whole", file)
    code = None
    n_kills = 0
    n_whole = 0
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


@pytest.mark.slow
def test_memory_is_bounded_whatever_the_size_of_the_source(tmp_path):
    grown = []
    script = ("import resource, sys, prepare_uniref50 as p; "
              "p.FLUSH_BYTES, p.BUCKET_BYTES = 8 << 20, 6 << 20; "
              "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; before = peak(); "
              "code = p.main(sys.argv[1:]); print(peak() - before); sys.exit(code)")
    # By way of a shell that forks: a child of this process would begin with our own peak.
    command = ["sh", "-c", '"$@"; exit $?', "-", sys.executable, "-c", script]
    for n in (100_000, 200_000):                                # 17 and 35 MB
        path = write_fasta(tmp_path / "in.fasta", random_proteins(n))
        done = subprocess.run([*command, tmp_path / str(n), "--fasta", path], cwd=ROOT,
                              capture_output=True, text=True, check=True)
        grown.append(int(done.stdout.splitlines()[-1]) * 1024)
    assert max(grown) < 60 << 20 and abs(grown[1] - grown[0]) < 15 << 20, grown

"""Are checkpoints of ddp_setup whole at any moment, told from damaged ones, and found again?"""
import errno
import os
import shutil
import signal
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import ddp_setup
from ddp_setup import CannotSave, Ddp, load_checkpoint, newest_checkpoint, save_checkpoint
from launchers import ROOT, ForkedRanks, fork_ranks


# ---------------------------------------------------------------- saving
def test_a_checkpoint_holds_what_was_given_with_entries_of_any_name(tmp_path):
    """As world_size and versions, which were once overwritten."""
    path = tmp_path / "a" / "b.pt"
    state = {"epoch": 4, "names": ["x", None], "rate": 0.5, "world_size": 64,
             "versions": {"mine": 3}}
    save_checkpoint(path, Ddp(), model={"w": torch.ones(3)}, **state)
    found = torch.load(path, weights_only=True)
    assert found.pop("model")["w"].tolist() == [1.0] * 3 and found == state
    assert os.listdir(tmp_path / "a") == ["b.pt"]


def test_a_checkpoint_of_the_former_version_loads():
    """former.pt was written by it, with these values."""
    state = load_checkpoint(Path(__file__).with_name("former.pt"), Ddp())
    assert state["model"]["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (state["step"], state["world_size"]) == (3, 1)


@pytest.fixture
def full_disk(tmp_path, monkeypatch):
    """Path of a checkpoint of step 1, whose next save finds no room."""
    path = tmp_path / "b.pt"
    save_checkpoint(path, Ddp(), step=1)

    def open_without_room(file, mode):
        os.symlink("/dev/full", file)
        return open(file, mode)
    monkeypatch.setattr(ddp_setup, "open", open_without_room, raising=False)
    return path


def test_a_save_to_a_full_disk_leaves_the_checkpoint_of_before_and_nothing_else(full_disk):
    before = full_disk.read_bytes()
    with pytest.raises(CannotSave):
        save_checkpoint(full_disk, Ddp(), keep_last=3, model={"w": torch.zeros(1_000_000)})
    assert full_disk.read_bytes() == before and os.listdir(full_disk.parent) == ["b.pt"]


def test_a_full_disk_is_told_in_one_sentence(full_disk):
    with pytest.raises(CannotSave) as caught:
        save_checkpoint(full_disk, Ddp(), model={"w": torch.zeros(1_000_000)})
    assert str(caught.value) == (f"cannot write {full_disk}: OSError: [Errno 28] No space left on "
                                 "device. The former checkpoint is untouched.")


@pytest.mark.parametrize("thing", [object(), np.float64(1.0), len, lambda: None],
                         ids=["object", "numpy", "function", "lambda"])
def test_a_value_that_torch_would_not_load_again_is_not_saved(thing, tmp_path):
    with pytest.raises(RuntimeError, match="cannot write .*(it holds builtins|numpy|lambda)"):
        save_checkpoint(tmp_path / "b.pt", Ddp(), deep=[{"thing": thing}])
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- two that write one path
WRITES = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch
from ddp_setup import Ddp, load_checkpoint, save_checkpoint, whole_file
"""


def test_of_two_processes_that_write_one_file_the_last_one_has_it_whole(tmp_path):
    (tmp_path / "script.py").write_text(WRITES + """
def content():
    with open("file", "rb") as file:
        return file.read()

with whole_file("file") as file:
    file.write(b"A" * 100_000)
    child = os.fork()
    if child == 0:    # begins later and ends earlier
        with whole_file("file") as other:
            other.write(b"B" * 10_000)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and content() == b"B" * 10_000
    file.write(b"A" * 100_000)
assert content() == b"A" * 200_000
assert sorted(os.listdir()) == ["file", "script.py"]
""")
    done = fork_ranks(1, ["script.py"], tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.text


def test_of_two_processes_that_save_one_checkpoint_at_once_one_has_it_whole(tmp_path):
    """As four times `rank 0 of 1`, where a launcher is not known."""
    (tmp_path / "script.py").write_text(WRITES + """
me = int(os.environ["WRITER"])
open(f"ready{me}", "w").close()
while not os.path.exists(f"ready{1 - me}"):
    time.sleep(0.001)
for _ in range(30):
    save_checkpoint("last.pt", Ddp(), who=me, weight=torch.full((10_000 * (1 + me),), float(me)))
    load_checkpoint("last.pt")
""")
    here = {rank: {"DDP_GUARD": 0, "WRITER": rank} for rank in range(2)}
    with ForkedRanks(["script.py"], tmp_path, here) as writers:
        assert writers.codes() == [0, 0], writers.err()
    state = load_checkpoint(tmp_path / "last.pt")
    size = 10_000 * (1 + state["who"])
    assert torch.equal(state["weight"], torch.full((size,), float(state["who"])))
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "ready0", "ready1", "script.py"]


@pytest.mark.parametrize("hours, stays", [(2.0, False), (0.1, True)])
def test_what_a_killed_save_has_left_is_removed_and_what_may_be_written_now_is_not(
        hours, stays, tmp_path):
    """Of a kill in each job of a chain, files of the size of a checkpoint would fill the disk."""
    left = tmp_path / ".last.pt.12345.tmp"
    others = tmp_path / ".best.pt.12345.tmp"
    for path in (left, others):
        path.touch()
        os.utime(path, (time.time() - 3600 * hours,) * 2)
    save_checkpoint(tmp_path / "last.pt", Ddp(), step=1)
    assert (left.exists(), others.exists()) == (stays, True)


# ---------------------------------------------------------------- former ones
def steps_in(folder):
    """{name: step} of the checkpoints in a folder."""
    return {path.name: load_checkpoint(path)["step"] for path in folder.glob("last*.pt")}


@pytest.mark.parametrize("keep_last, kept", [
    (1, {"last.pt": 4}), (2, {"last.pt": 4, "last-1.pt": 3}),
    (10**12, {"last.pt": 4, "last-1.pt": 3, "last-2.pt": 2, "last-3.pt": 1})])
def test_so_many_checkpoints_are_kept_as_asked_for(keep_last, kept, tmp_path):
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path / "last.pt", Ddp(), keep_last=keep_last, step=step)
    assert steps_in(tmp_path) == kept


def test_fewer_to_keep_than_before_leave_the_older_ones_alone(tmp_path):
    for keep_last, step in ((3, 1), (3, 2), (3, 3), (2, 4)):
        save_checkpoint(tmp_path / "last.pt", Ddp(), keep_last=keep_last, step=step)
    assert steps_in(tmp_path) == {"last.pt": 4, "last-1.pt": 3, "last-2.pt": 1}


KILLED = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from ddp_setup import Ddp, save_checkpoint
for step in (1, 2, 3):
    save_checkpoint("last.pt", Ddp(), keep_last=3, step=step)
rename = os.replace
left = int(sys.argv[1])
def replace(old, new):
    global left
    if left == 0:
        os.kill(os.getpid(), 9)
    left -= 1
    rename(old, new)
os.replace = replace
save_checkpoint("last.pt", Ddp(), keep_last=3, step=4)
"""


@pytest.mark.parametrize("renames, newest", [(0, 3), (1, 3), (2, 3), (3, 4)])
def test_a_kill_between_two_renames_of_a_save_loses_no_checkpoint_but_the_oldest(
        renames, newest, tmp_path):
    """last-1.pt -> last-2.pt, last.pt -> last-1.pt, the new one -> last.pt"""
    (tmp_path / "script.py").write_text(KILLED)
    done = fork_ranks(1, ["script.py", renames], tmp_path)
    assert done.returncode == (-signal.SIGKILL if renames < 3 else 0), done.text
    ddp = Ddp()
    assert load_checkpoint(tmp_path / "last.pt", ddp)["step"] == newest
    assert {2, 3} <= set(steps_in(tmp_path).values())
    save_checkpoint(tmp_path / "last.pt", ddp, keep_last=3, step=5)    # it fills the gap
    assert steps_in(tmp_path) == {"last.pt": 5, "last-1.pt": newest, "last-2.pt": newest - 1}


# ---------------------------------------------------------------- damage
def flip_a_bit(path):
    """Flip one bit in the middle of the largest record of the zip file that torch writes."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as z:
        record = max(z.infolist(), key=lambda record: record.file_size)
    data[record.header_offset + record.file_size // 2] ^= 16    # headers are short
    path.write_bytes(data)


def two_checkpoints_of_which_the_newer_is_damaged(folder):
    """(the newer, the former). A bit is flipped, so that torch loads it without a word."""
    path = folder / "last.pt"
    for step in (1, 2):
        save_checkpoint(path, Ddp(), keep_last=2, step=step, weight=torch.zeros(9000))
    flip_a_bit(path)
    assert torch.load(path, weights_only=True)["weight"].count_nonzero() == 1
    return path, folder / "last-1.pt"


def test_a_flipped_bit_is_told_and_the_former_checkpoint_is_used(tmp_path, capsys):
    path, former = two_checkpoints_of_which_the_newer_is_damaged(tmp_path)
    assert load_checkpoint(path, Ddp())["step"] == 1
    said = capsys.readouterr().out
    assert "last.pt: it is damaged" in said and f"Going back to {former}" in said


def test_the_newest_checkpoint_is_the_newest_that_is_whole(tmp_path):
    path, former = two_checkpoints_of_which_the_newer_is_damaged(tmp_path)
    assert newest_checkpoint(path, Ddp()) == str(former)
    save_checkpoint(path, Ddp(), step=3)
    assert newest_checkpoint(path, Ddp()) == str(path)


def test_a_damaged_checkpoint_is_kept_by_another_name(tmp_path):
    path, _ = two_checkpoints_of_which_the_newer_is_damaged(tmp_path)
    before = path.read_bytes()
    load_checkpoint(path, Ddp())
    assert (tmp_path / "last.pt.damaged").read_bytes() == before and not path.exists()


def test_a_save_after_a_damaged_checkpoint_does_not_replace_the_good_former_one(tmp_path):
    path, _ = two_checkpoints_of_which_the_newer_is_damaged(tmp_path)
    load_checkpoint(path, Ddp())
    save_checkpoint(path, Ddp(), keep_last=2, step=3)
    assert steps_in(tmp_path) == {"last.pt": 3, "last-1.pt": 1}


def test_a_checkpoint_that_the_system_does_not_let_read_keeps_its_name(tmp_path, monkeypatch):
    """It may be whole: an error of a network's file system passes."""
    path = tmp_path / "last.pt"
    for step in (1, 2):
        save_checkpoint(path, Ddp(), keep_last=2, step=step)
    read = zipfile.ZipFile.testzip

    def fail_for_the_newest(file):
        if file.filename == str(path):
            raise OSError(errno.EIO, "Input/output error")
        return read(file)
    monkeypatch.setattr(zipfile.ZipFile, "testzip", fail_for_the_newest)
    assert newest_checkpoint(path, Ddp()) == str(tmp_path / "last-1.pt")
    assert sorted(os.listdir(tmp_path)) == ["last-1.pt", "last.pt"]


def test_a_new_checkpoint_that_has_replaced_a_damaged_one_keeps_its_name(tmp_path, monkeypatch):
    path, former = two_checkpoints_of_which_the_newer_is_damaged(tmp_path)
    read = zipfile.ZipFile.testzip

    def read_while_another_process_saves(file):
        found = read(file)
        if file.filename == str(path):
            shutil.copy(former, tmp_path / "new")
            os.replace(tmp_path / "new", path)
        return found
    monkeypatch.setattr(zipfile.ZipFile, "testzip", read_while_another_process_saves)
    load_checkpoint(path, Ddp())
    assert sorted(os.listdir(tmp_path)) == ["last-1.pt", "last.pt"]


def test_where_no_checkpoint_is_whole_each_is_named_with_what_is_wrong(tmp_path):
    path, former = two_checkpoints_of_which_the_newer_is_damaged(tmp_path)
    former.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="(?s)last.pt: it is damaged, the checksum of its record "
                                         ".*data/0.*cannot read the checkpoint .*last-1.pt"):
        load_checkpoint(path, Ddp())
    assert sorted(os.listdir(tmp_path)) == ["last-1.pt", "last.pt"]


def test_a_checkpoint_that_is_cut_off_is_refused_with_its_name(tmp_path):
    path = tmp_path / "last.pt"
    save_checkpoint(path, Ddp(), weight=torch.arange(100.0))
    data = path.read_bytes()
    for length in range(0, len(data), 61):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=f"cannot read the checkpoint {path}"):
            load_checkpoint(path)


def test_a_checkpoint_is_not_passed_over_for_want_of_memory(tmp_path, monkeypatch):
    def no_memory(*_, **options):
        raise MemoryError

    path = tmp_path / "last.pt"
    for step in (1, 2):
        save_checkpoint(path, Ddp(), keep_last=2, step=step)
    monkeypatch.setattr(torch, "load", no_memory)
    with pytest.raises(MemoryError):
        load_checkpoint(path, Ddp())


def test_a_file_with_code_is_refused_without_torchs_advice_to_load_it_all_the_same(tmp_path):
    torch.save(print, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="Weights only load failed. Expected a file written by"):
        load_checkpoint(tmp_path / "last.pt")


@pytest.mark.parametrize("name, reason", [
    ("none.pt", "No such file or directory"), ("", "Is a directory")])
def test_what_is_no_file_is_refused_with_its_name(name, reason, tmp_path):
    with pytest.raises(ValueError, match=f"cannot read .* {tmp_path / name}: .*{reason}"):
        load_checkpoint(tmp_path / name)

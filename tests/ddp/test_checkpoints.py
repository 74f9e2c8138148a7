"""Are checkpoints of ddp_setup whole at any moment, told from damaged ones, and found again?"""
import os
import time
import signal
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_setup import Ddp, load_checkpoint, save_checkpoint
from launchers import ROOT, fork_ranks


# ---------------------------------------------------------------- saving
def test_a_checkpoint_holds_what_was_given_and_of_what_it_was_made(tmp_path):
    path = tmp_path / "a" / "b.pt"
    save_checkpoint(path, Ddp(), model={"w": torch.ones(3)}, epoch=4, names=["x", None], rate=0.5)
    state = torch.load(path, weights_only=True)
    assert state["model"]["w"].tolist() == [1.0] * 3 and state["names"] == ["x", None]
    assert (state["epoch"], state["rate"], state["world_size"]) == (4, 0.5, 1)
    assert state["versions"]["torch"] == str(torch.__version__)
    assert os.listdir(tmp_path / "a") == ["b.pt"]


def test_a_checkpoint_of_the_former_version_loads():
    """former.pt was written by it, with these values."""
    state = load_checkpoint(Path(__file__).with_name("former.pt"), Ddp())
    assert state["model"]["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (state["step"], state["world_size"]) == (3, 1)


@pytest.fixture
def full_disk(tmp_path, monkeypatch):
    """Path of a checkpoint of step 1, whose next save finds no room, also at its second try."""
    path = tmp_path / "b.pt"
    save_checkpoint(path, Ddp(), step=1)

    def fill(*_):
        (tmp_path / ".b.pt.tmp").symlink_to("/dev/full")

    fill()
    monkeypatch.setattr(time, "sleep", fill)
    return path


def test_a_disk_that_is_full_for_seconds_takes_the_checkpoint_after_them(full_disk, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    save_checkpoint(full_disk, Ddp(), step=2)
    assert load_checkpoint(full_disk)["step"] == 2


def test_a_save_to_a_full_disk_leaves_the_checkpoint_of_before_and_nothing_else(full_disk):
    before = full_disk.read_bytes()
    with pytest.raises(RuntimeError):
        save_checkpoint(full_disk, Ddp(), keep_last=3, model={"w": torch.zeros(1_000_000)})
    assert full_disk.read_bytes() == before and os.listdir(full_disk.parent) == ["b.pt"]


def test_a_full_disk_is_told_in_one_sentence_and_is_no_bug(full_disk):
    with pytest.raises(RuntimeError) as caught:
        save_checkpoint(full_disk, Ddp(), model={"w": torch.zeros(1_000_000)})
    assert str(caught.value) == (f"cannot write {full_disk}: OSError: [Errno 28] No space left on "
                                 "device. The former checkpoint is untouched.")
    assert caught.value.expected


def test_the_checkpoint_before_a_save_that_failed_is_still_told_as_the_last(full_disk):
    ddp = Ddp()
    save_checkpoint(full_disk.with_name("last.pt"), ddp, step=1)
    with pytest.raises(RuntimeError):
        save_checkpoint(full_disk, ddp, step=2)
    assert (ddp.state.checkpoint, ddp.state.step) == (str(full_disk.with_name("last.pt")), 1)


@pytest.mark.parametrize("resumes", [True, False])
def test_only_a_checkpoint_that_a_start_continues_from_is_told_as_the_last(resumes, tmp_path):
    ddp = Ddp()
    save_checkpoint(str(tmp_path / "b.pt"), ddp, resumes=resumes, step=3)
    assert ddp.state.checkpoint == (str(tmp_path / "b.pt") if resumes else "")


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, disk_calls):
    path = tmp_path / "b.pt"
    save_checkpoint(path, Ddp(), step=3)
    assert disk_calls[:2] == [("fsync", path.read_bytes()), ("rename", path)]


def test_a_checkpoint_has_its_name_on_the_disk_when_the_call_returns(tmp_path, disk_calls):
    save_checkpoint(tmp_path / "b.pt", Ddp(), step=3)
    assert disk_calls[-1] == ("fsync", tmp_path)


@pytest.mark.parametrize("thing", [object(), np.float64(1.0), len, lambda: None],
                         ids=["object", "numpy", "function", "lambda"])
def test_a_value_that_torch_would_not_load_again_is_not_saved(thing, tmp_path):
    with pytest.raises(RuntimeError, match="cannot write .*(it holds builtins|numpy|lambda)"):
        save_checkpoint(tmp_path / "b.pt", Ddp(), deep=[{"thing": thing}])
    assert os.listdir(tmp_path) == []


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
    """(a function that saves a step, the newer, the former). A bit is flipped, so that torch loads
    it without a word."""
    path = folder / "last.pt"

    def save(step, ddp):
        save_checkpoint(path, ddp, keep_last=2, step=step, weight=torch.zeros(9000))
    save(1, Ddp())
    save(2, Ddp())
    flip_a_bit(path)
    assert torch.load(path, weights_only=True)["weight"].count_nonzero() == 1
    return save, path, folder / "last-1.pt"


def test_a_flipped_bit_is_told_and_the_former_checkpoint_is_used(tmp_path, capsys):
    _, path, former = two_checkpoints_of_which_the_newer_is_damaged(tmp_path)
    ddp = Ddp()
    assert load_checkpoint(path, ddp)["step"] == 1 and ddp.state.checkpoint == str(former)
    said = capsys.readouterr().out
    assert "last.pt: it is damaged" in said and f"Going back to {former}" in said


def test_the_next_save_replaces_a_damaged_checkpoint_and_no_other(tmp_path):
    save, path, former = two_checkpoints_of_which_the_newer_is_damaged(tmp_path)
    ddp = Ddp()
    load_checkpoint(path, ddp)
    save_checkpoint(tmp_path / "best.pt", ddp, step=2)
    save(3, ddp)
    assert [load_checkpoint(file)["step"] for file in (former, path)] == [1, 3]


def test_where_no_checkpoint_is_whole_each_is_named_with_what_is_wrong(tmp_path):
    _, path, former = two_checkpoints_of_which_the_newer_is_damaged(tmp_path)
    former.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="(?s)last.pt: it is damaged, the checksum of its record "
                                         ".*data/0.*cannot read the checkpoint .*last-1.pt"):
        load_checkpoint(path, Ddp())


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

"""A file is on the disk before it has its name: a power cut leaves the old file or the new one."""
import pytest

import ddp_guard
import prepare_uniref50
from ddp_setup import Ddp, save_checkpoint
from ddp_watch import watch_run
from training.files import write_text_atomic


def write_text(folder):
    write_text_atomic(folder / "file", "new")


def write_checkpoint(folder):
    save_checkpoint(folder / "file", Ddp(), step=3)


def write_status(folder):
    with watch_run(Ddp(), folder, minutes=0):
        pass


def write_status_of_a_guard(folder):
    known = ddp_guard.Known()
    known.run_dir = str(folder)
    ddp_guard.write_status(known, 70, "no progress")


def prepare_proteins(folder):
    (folder / "in.fasta").write_text(">a\nMKV\n>b\nACDEF\n")
    out = str(folder / "out")
    assert prepare_uniref50.main([out, "--val_fraction", "0", "--fasta", f"{folder}/in.fasta"]) == 0


@pytest.mark.parametrize("write, names_last", [
    (write_text, True), (write_checkpoint, True), (prepare_proteins, True),
    (write_status, False), (write_status_of_a_guard, False)])
def test_what_is_renamed_is_on_the_disk_before(write, names_last, tmp_path, disk_calls):
    """names_last: the folder, with the new name, is on the disk when the call returns."""
    write(tmp_path)
    on_the_disk = []
    renamed = []
    for call, what in disk_calls:
        if call == "rename":
            renamed.append((what, list(on_the_disk)))
        else:
            on_the_disk.append(what)
    last, before = renamed[-1]
    files = [last] if last.is_file() else [path for path in last.rglob("*") if path.is_file()]
    assert files and {path.read_bytes() for path in files} <= {
        content for content in before if isinstance(content, bytes)}
    assert (disk_calls[-1] == ("fsync", tmp_path)) == names_last


def test_a_checkpoint_is_on_the_disk_before_a_former_one_is_renamed(tmp_path, disk_calls):
    path = tmp_path / "b.pt"
    for step in (1, 2):
        disk_calls.clear()
        save_checkpoint(path, Ddp(), keep_last=2, step=step)
    assert disk_calls[0] == ("fsync", path.read_bytes())
    renamed = [name for call, name in disk_calls if call == "rename"]
    assert renamed == [tmp_path / "b-1.pt", path]

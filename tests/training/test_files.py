"""Files are written whole or not at all."""

import errno
import os
import zipfile
from unittest import mock

import pytest
import torch

from training.files import (CannotWrite, check_zip, is_no_file, read_text, write_text_atomic,
                            write_whole, writing)


def test_text_replaces_a_file_whole_or_not_at_all_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "samples" / "step_10.fasta"
    write_text_atomic(target, "older")
    write_text_atomic(target, "old\n")
    for error in OSError(28, "No space left on device"), KeyboardInterrupt("by a person"):
        with pytest.raises(type(error), match="step_10.fasta: no space is left|a person"):
            write_whole(target, mock.Mock(side_effect=error))
    assert target.read_bytes() == b"old\n" and list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("leads_to", ["file", "nothing"])
def test_a_link_is_replaced_by_a_file(leads_to, tmp_path):
    (tmp_path / "file").write_text("of another run")
    (tmp_path / "link").symlink_to(leads_to)
    write_text_atomic(tmp_path / "link", "new")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_text() == "new"
    assert (tmp_path / "file").read_text() == "of another run"
    assert not (tmp_path / "nothing").exists()


def test_a_folder_may_be_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    write_text_atomic(tmp_path / "link" / "file", "new")
    assert (tmp_path / "folder" / "file").read_text() == "new"


def test_another_name_of_an_open_file_is_no_file(tmp_path):
    with open(tmp_path / "open", "w") as file:
        assert is_no_file(f"/dev/fd/{file.fileno()}")
        assert not is_no_file(tmp_path / "open")


@pytest.mark.parametrize("number, said", [
    (errno.ENOSPC, "no space is left .* MB are free there. Make room in"),
    (errno.EDQUOT, "the quota is used up .* Make room in"),
    (errno.EROFS, "the file system is read-only .* Mend that, or give another"),
    (errno.EACCES, "this user may not write there .* Mend that, or give another")])
def test_want_of_room_or_permission_is_told_with_what_to_do(number, said, tmp_path):
    with pytest.raises(CannotWrite, match=f"cannot write .*file: {said}") as caught:
        with writing(tmp_path / "file"):
            raise OSError(number, os.strerror(number))
    assert caught.value.retry is False


def test_torch_on_a_full_disk_is_understood(tmp_path):
    """It tells of an "unexpected pos", as the system's error ends its own work."""
    with open("/dev/full", "wb", buffering=0) as full:
        with pytest.raises(CannotWrite, match="no space is left"), writing(tmp_path / "file"):
            torch.save({"w": torch.zeros(100_000)}, full)


def test_another_error_is_left_as_it_is(tmp_path):
    with pytest.raises(OSError, match="Input/output error") as caught:
        with writing(tmp_path / "file"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert not isinstance(caught.value, CannotWrite)


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match="is no file"):
            write_text_atomic(tmp_path / name, "new")
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, disk_calls):
    write_text_atomic(tmp_path / "file", "new")
    assert disk_calls[:2] == [("fsync", b"new"), ("rename", tmp_path / "file")]


def test_a_file_has_its_name_on_the_disk_at_the_end(tmp_path, disk_calls):
    write_text_atomic(tmp_path / "file", "new")
    assert disk_calls[-1] == ("fsync", tmp_path)


@pytest.mark.parametrize("make, message", [
    (lambda path: path.symlink_to("/dev/zero"), "is no file"), (os.mkfifo, "is no file"),
    (os.mkdir, "is no file"), (lambda path: path.write_bytes(b"x" * 11), "more than 10 bytes"),
    (lambda path: path.write_bytes(b"a\xe9"), "is no text in UTF-8")])
def test_what_is_no_short_text_is_not_read_as_one(make, message, tmp_path):
    make(tmp_path / "lock.json")
    with pytest.raises(ValueError, match=message):
        read_text(tmp_path / "lock.json", most=10)


def test_a_file_of_tensors_with_a_wrong_byte_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "best.pt", "w") as archive:
        archive.writestr("data/0", b"numbers")
    content = (tmp_path / "best.pt").read_bytes()
    (tmp_path / "best.pt").write_bytes(content.replace(b"numbers", b"nombres", 1))
    with pytest.raises(ValueError, match="is damaged .data/0"):
        check_zip(tmp_path / "best.pt")


def test_a_file_of_tensors_that_unpacks_to_more_than_its_bytes_is_refused(packed):
    with pytest.raises(ValueError, match="bytes and unpacks to 10,000"):
        check_zip(packed)


def test_an_error_that_names_no_file_gets_the_name_of_the_one_that_was_written(tmp_path):
    with pytest.raises(OSError, match="Input/output error: '.*step_10.fasta'"):
        write_whole(tmp_path / "step_10.fasta",
                    mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))

"""Files are written whole or not at all."""

import errno
import os
import zipfile
from unittest import mock

import pytest

from training.files import (
    check_output,
    check_saved,
    check_writable,
    read_text,
    write_text_atomic,
    write_whole,
)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"),
                                   KeyboardInterrupt("by a person")])
def test_text_replaces_a_file_whole_or_not_at_all_and_leaves_nothing_else(error, tmp_path):
    target = tmp_path / "samples" / "step_10.fasta"
    write_text_atomic(target, "older")
    write_text_atomic(target, "old\n")
    with pytest.raises(type(error)):
        write_whole(target, mock.Mock(side_effect=error))
    assert target.read_bytes() == b"old\n" and list(target.parent.iterdir()) == [target]


def test_an_error_names_the_file_that_was_written(tmp_path):
    with open("/dev/full", "wb", buffering=0) as full:
        with pytest.raises(OSError, match="No space left on device: '.*step_10.fasta'"):
            write_whole(tmp_path / "step_10.fasta", lambda file: full.write(b"text"))


def test_a_link_is_replaced_by_a_file(tmp_path):
    (tmp_path / "file").write_text("of another run")
    (tmp_path / "link").symlink_to("file")
    write_text_atomic(tmp_path / "link", "new")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_text() == "new"
    assert (tmp_path / "file").read_text() == "of another run"


def test_a_folder_may_be_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    write_text_atomic(tmp_path / "link" / "file", "new")
    assert (tmp_path / "folder" / "file").read_text() == "new"


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match="is no file"):
            write_text_atomic(tmp_path / name, "new")
    assert (tmp_path / "pipe").is_fifo()


def test_where_nothing_can_be_written_is_told_before_the_work():
    with pytest.raises(OSError, match="/proc/"):
        check_writable("/proc/new/folder/file")


def test_a_look_whether_a_file_can_be_written_leaves_nothing(tmp_path):
    check_writable(tmp_path / "new" / "folder" / "file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make, message", [
    (lambda path: path.symlink_to("/dev/zero"), "is no file"), (os.mkfifo, "is no file"),
    (os.mkdir, "is no file"), (lambda path: path.write_bytes(b"x" * 11), "more than 10 bytes"),
    (lambda path: path.write_bytes(b"a\xe9"), "is no text in UTF-8"),
    (lambda path: path.write_text("a: 1", "utf-16"), "it begins as UTF-16 does")])
def test_what_is_no_short_text_is_not_read_as_one(make, message, tmp_path):
    make(tmp_path / "config.yaml")
    with pytest.raises(ValueError, match=message):
        read_text(tmp_path / "config.yaml", most=10)


def test_a_file_of_tensors_with_a_wrong_byte_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "best.pt", "w") as archive:
        archive.writestr("data/0", b"numbers")
    content = (tmp_path / "best.pt").read_bytes()
    (tmp_path / "best.pt").write_bytes(content.replace(b"numbers", b"nombres", 1))
    with pytest.raises(ValueError, match="is damaged .data/0"):
        check_saved(tmp_path / "best.pt")


@pytest.mark.parametrize("content, message", [
    (b"", "is empty .0 bytes."),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    (b"\n<!DOCTYPE html><html>404", "a page of HTML"), (b"<HTML>", "a page of HTML")])
def test_what_a_failed_download_leaves_is_named(content, message, tmp_path):
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        check_saved(tmp_path / "w.pt")


def test_an_output_that_is_an_input_is_refused_by_whatever_name(tmp_path):
    (tmp_path / "in").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for name in ("in", "link"):
        with pytest.raises(ValueError, match="would overwrite .*in"):
            check_output(tmp_path / name, [tmp_path / "other", tmp_path / "in"])
    check_output(tmp_path / "new", [tmp_path / "in"])

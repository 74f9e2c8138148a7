"""Files are written whole or not at all."""

import os
from unittest import mock

import pytest

from training.files import write_text_atomic, write_whole


def test_text_replaces_a_file_whole_or_not_at_all_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "samples" / "step_10.fasta"
    write_text_atomic(target, "older")
    write_text_atomic(target, "old\n")
    for error in OSError(28, "No space left on device"), KeyboardInterrupt("by a person"):
        with pytest.raises(type(error), match="No space left on device: .*step_10.fasta|a person"):
            write_whole(target, mock.Mock(side_effect=error))
    assert target.read_bytes() == b"old\n" and list(target.parent.iterdir()) == [target]


def test_a_link_stays_and_the_file_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "link").symlink_to("file")
    write_text_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"


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

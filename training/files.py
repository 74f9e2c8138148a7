"""Writing a file whole: a kill at any moment leaves the old file, none, or the new one. Reading a
text no further than it can be one."""
import codecs
import contextlib
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ddp_setup import whole_file

# How the files of spreadsheets begin; of those in a zip with a part that they have.
WORKBOOKS = ((b"PK\x03\x04", b"[Content_Types].xml", "an Excel workbook"),
             (b"PK\x03\x04", b"vnd.oasis.opendocument.spreadsheet", "an OpenDocument workbook"),
             (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", b"", "an Excel workbook"))
MOST_TEXT_BYTES = 64 << 20   # of a status, a config; these have some KB
MOST_OF_A_BEGINNING = 200    # bytes
# What stands where weights were to be downloaded, by how it begins.
NOT_SAVED = {b"version https://git-lfs": "a pointer of Git LFS, which `git lfs pull` replaces by "
                                         "the file",
             b"<!doctype html": "a page of HTML, in place of the file that it links to",
             b"<html": "a page of HTML, in place of the file that it links to"}


def read_text(path, most=MOST_TEXT_BYTES) -> str:
    """The text of a file in UTF-8, without a byte order mark.

    Raises: ValueError for a device, pipe or folder, for more than `most` bytes, for a spreadsheet's
    own format or another encoding; OSError."""
    check_is_file(path)   # reading it may never end
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} has more than {most:,} bytes; expected a smaller file of text.")
    for beginning, part, name in WORKBOOKS:
        if data.startswith(beginning) and part in data:
            raise ValueError(f"{path} is {name}; expected text. Save it as CSV (in UTF-8).")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"{error.reason} at byte {error.start}"
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            reason = "it begins as UTF-16 does"
        raise ValueError(f"{path} is no text in UTF-8 ({reason}); expected UTF-8. Save it in this "
                         "encoding.") from None


def write_text_atomic(path, text) -> None:
    """Write a text file, see write_whole."""
    write_whole(path, lambda file: file.write(text.encode()))


def write_whole(path, write) -> None:
    """Call write(binary file) so that a kill at any moment leaves the old file, none, or the new:
    see whole_file.

    Makes the folder if it is missing. A link of this name is replaced, and what it leads to stays
    as it is.
    Raises: ValueError for a device, pipe or folder; OSError, which names the file."""
    check_is_file(path)   # the rename would replace it: in a container, /dev/null for all
    with naming(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            write(file)


def check_writable(path) -> None:
    """Raise an OSError if nothing can be written at this path: before the work, not after it.

    path: of a file, or of a folder. It need not exist, and is not changed."""
    folder = Path(path).absolute()
    while not folder.is_dir():
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:      # which names the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from None


def check_output(path, inputs) -> None:
    """ValueError for a path to be written that is no file, in no folder, or one of the inputs."""
    path = Path(path)
    # A device, such as /dev/null, would be replaced by a file.
    no_file = path.exists() and not path.is_file()
    if no_file or not path.absolute().parent.is_dir():
        raise ValueError(f"{path} is a folder or a device, or in a folder that is missing; "
                         "expected the name of a file in a folder that exists.")
    for other in inputs:
        if path.exists() and os.path.exists(other) and path.samefile(other):
            raise ValueError(f"the result would overwrite {other}; expected another name.")


@contextlib.contextmanager
def naming(path) -> Iterator[None]:
    """In this block, which writes, an OSError names the file: that of a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def check_is_file(path) -> None:
    """Raises: ValueError for a device, pipe or folder."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is no file; expected the name of a file.")


def check_saved(path) -> None:
    """Refuse a file in place of one of torch.save: an empty one, what a download leaves there, or a
    zip of which a part has another checksum than is noted, at which torch.load does not look.

    Any other file passes. Raises: ValueError."""
    with open(path, "rb") as file:
        beginning = file.read(MOST_OF_A_BEGINNING)
    if not beginning:
        raise ValueError(f"{path} is empty (0 bytes); expected a file of torch.save. Was its disk "
                         "full? Copy or write it again.")
    for words, kind in NOT_SAVED.items():
        if beginning.lstrip().lower().startswith(words):
            raise ValueError(f"{path} is {kind}; expected a file of torch.save.")
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        damaged = str(error)
    if damaged:
        raise ValueError(f"{path} is damaged ({damaged:.100}); expected a file of torch.save. "
                         "Copy or write it again.")

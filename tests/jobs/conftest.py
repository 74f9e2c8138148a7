"""Fixtures for tests of job scripts: see tests/job_site.py."""
import shutil

import pytest

from job_site import CONFIG, DRIVER, Site
from launchers import ROOT, copy_code


@pytest.fixture
def project(request, tmp_path):
    """A copy of the project's files, with a config and script of few steps; a name with a space.
    The code is there for slow tests alone: the others start no rank."""
    folder = tmp_path / "a copy"
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    shutil.copytree(ROOT / "configs", folder / "configs")
    if request.node.get_closest_marker("slow"):
        copy_code(folder)
    else:
        (folder / "train_sedd_ddp.py").touch()
    (folder / "driver.py").write_text(DRIVER)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "slow").touch()
    return folder


@pytest.fixture
def site(tmp_path, project):
    return Site(tmp_path / "site", project, ("hostA", "hostB"))

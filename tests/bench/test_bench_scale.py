"""bench/scale.py and bench/scale_report.py: what they write, and the formulas."""

import importlib.util
import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench import scale as bench_scale
from bench.scale import count_messages, measure_noise
from bench.scale_report import (Link, expected_maximum, fit_link, merge, noise_scale, predict_step,
                                print_all_reduces)
from ddp_setup import Ddp
from launchers import ROOT, fork_ranks

TINY = ["model.hidden_size=16", "model.n_blocks=1", "model.n_heads=1", "model.cond_dim=8",
        "training.tokens_per_batch=256", "data.max_length=64", "data.demo_proteins=300"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(folder, contents of its scale.json) after two launches, of two ranks and of one."""
    folder = tmp_path_factory.mktemp("scale")
    words = ["-m", "bench", "scale", "--steps=2", "--repeats=1", "--predict=2,8",
             "--json=scale.json", "--device=cpu", *TINY]
    for done in (fork_ranks(2, [*words, "--ranks=1,2", "--variants"], folder),
                 fork_ranks(1, [*words, "--ranks=1"], folder, {"PYTHONPATH": ROOT})):
        assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 100, done.text
    assert [path.name for path in folder.iterdir()] == ["scale.json"]
    return folder, json.loads((folder / "scale.json").read_text())


def test_launches_add_up_to_a_table(measured):
    _, found = measured
    assert [launch["ranks"] for launch in found["launches"]] == [2, 1]
    rows = {(row["scaling"], row["variant"], row["ranks"]): row for row in found["table"]}
    assert {("weak", name, 2) for name in ("alone", "bucket 1 MB", "static graph", "bfloat16")} | {
        ("strong", "", 2)} < rows.keys()
    weak = rows["weak", "", 2]
    first = rows["weak", "", 1]
    assert weak["batch"] == 2 * first["batch"] == pytest.approx(512, rel=0.1)
    assert first["speed_up"] == 1
    assert weak["speed_up"] == pytest.approx(2 * first["seconds"] / weak["seconds"])
    assert weak["efficiency"] == pytest.approx(weak["speed_up"] / 2)
    for row in rows.values():
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"])


def test_launches_predict_other_numbers_of_ranks_and_check_themselves(measured):
    _, found = measured
    weak, = [row["batch"] for row in found["table"]
             if (row["scaling"], row["variant"], row["ranks"]) == ("weak", "", 2)]
    assert [row["batch"] for row in found["predicted"]] == [weak, 4 * weak]
    assert found["errors"].keys() == {"weak 2", "strong 2"}


def test_launches_of_another_backend_are_not_merged(measured):
    _, found = measured
    two, one = found["launches"]
    assert merge([{**two, "backend": "nccl"}, two, one])[2]["launches"] == 1


def test_a_report_of_the_file_alone_draws_its_table(measured, extras, tmp_path, monkeypatch):
    if not importlib.util.find_spec("matplotlib"):
        pytest.skip("needs matplotlib, which jobs/test.sh installs")
    folder, found = measured
    shutil.copy(folder / "scale.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    bench_scale.main(["--json=scale.json", "--plot=scale.png"])
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "scale.json").read_text())["table"] == found["table"]


@pytest.mark.parametrize("text", ["[", "[]", '{"loss": 2.8}'])
def test_a_file_of_something_else_is_refused_and_left(text, tmp_path, capsys):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        bench_scale.main(["--json", str(tmp_path / "other.json"), "--ranks=1"])
    assert ended.value.code == 2 and "other.json is no file that" in capsys.readouterr().err
    assert (tmp_path / "other.json").read_text() == text


def test_all_reduces_are_timed_in_every_size(measured):
    _, found = measured
    two, one = found["launches"]
    assert one["all_reduces"] == []
    assert [size for size, _ in two["all_reduces"]] == bench_scale.ALL_REDUCE_BYTES
    assert all(seconds > 0 for _, seconds in two["all_reduces"])


def test_the_bus_bandwidth_is_what_a_ring_sends_over_each_link(capsys):
    """Of 4 ranks each sends 2 x 3/4 of the bytes: of 32 MiB, 50,331,648 bytes; here in 0.1 s."""
    size = 2**25
    repeats = [[size, 0.1], [size, 3.0], [size, 0.05]]
    print_all_reduces({"ranks": 4, "backend": "gloo", "all_reduces": repeats})
    assert capsys.readouterr().out.splitlines()[-1].split() == ["32,768", "100,000", "0.5033"]


def test_a_step_is_predicted_as_a_ring_passes_it_on_and_the_slowest_rank_ends_it():
    """Every rank passes a part of size / N to the next, N - 1 times to sum and as often to share;
    a step lasts as long as the slowest rank's own work."""
    random = np.random.default_rng(0)
    size = 1e6
    latency = 2e-4
    bandwidth = 1e8
    for ranks in (2, 6):
        clock = 2 * (ranks - 1) * (latency + size / ranks / bandwidth)
        link = Link(latency, bandwidth, ring=True)
        assert link.seconds(ranks, size) == pytest.approx(clock)
        slowest = random.normal(1.0, 0.1, (100_000, ranks)).max(1).mean()
        alone = {"seconds": 1.0, "sigma": 0.1, "parts": {"compute": 0.9}}
        for overlap in (0.0, 0.25):
            expected = slowest + (1 - overlap) * clock
            assert predict_step(alone, ranks, clock, overlap) == pytest.approx(expected, rel=5e-3)
        measured = [[n, link.seconds(ranks, n)] for n in (4e3, 1e6, 2.5e7)]
        assert fit_link(ranks, measured, True) == pytest.approx(link)
    hidden = predict_step({"seconds": 1.0, "sigma": 0.0, "parts": {"compute": 0.9}}, 4, 5.0, 1.0)
    assert hidden == pytest.approx(1.0 + 5.0 - 0.6)      # no more than a backward pass can hide
    assert expected_maximum(10_000) == pytest.approx(math.sqrt(2 * math.log(10_000)), rel=0.15)


def test_the_noise_scale_is_that_of_gaussian_gradients():
    """The gradient of w x is x: of a mean g, |g|^2 = 4, and a variance of 5 per coordinate. The
    global batch counts every example twice, as the unit of a batch may be another one."""
    random = torch.Generator().manual_seed(1)
    g = torch.full((50,), 2 / 50**0.5)
    sizes = (4, 10, 16)
    batches = [{"seed": 0, "count": sizes[k % 3],
                "x": g + 5**0.5 * torch.randn(sizes[k % 3], 50, generator=random)}
               for k in range(320)]
    model = torch.nn.Linear(50, 1, bias=False)
    run = SimpleNamespace(bare=model, optimizer=model, micro_batches=2,
                          global_batch=2 * 2 * 3 / sum(1 / n for n in sizes),
                          sampler=SimpleNamespace(mine=range(1), item_of=lambda step, _: step))
    found = measure_noise(run, batches, lambda model, batch: (
        model(batch["x"]).sum(), torch.zeros(1)),
        SimpleNamespace(what="dpo", steps=40, train=0), Ddp())
    trace, square = noise_scale(**found)
    assert trace == pytest.approx(2 * 5 * 50, rel=0.1) and square == pytest.approx(4, rel=0.1)


def test_messages_are_the_counts_and_ddps_buckets():
    MiB = 2**20
    assert [count_messages(size * MiB, None) for size in (0.5, 10, 26, 27)] == [2, 3, 3, 4]
    assert [count_messages(size * MiB, 4) for size in (0.5, 4, 10)] == [2, 2, 4]

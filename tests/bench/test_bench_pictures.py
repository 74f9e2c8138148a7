"""python -m bench pictures: from small runs, structures, tables and weights to PNGs."""
import json

import numpy as np
import pytest
import torch

from bench.pictures import main, shrink
from mpnn.model import random_proteinmpnn, to_checkpoint
from mpnn_cases import Atoms

SIZES = {"hidden_size": 16, "n_encoder": 1, "n_decoder": 1, "num_edges": 4}


@pytest.fixture
def folder(tmp_path, monkeypatch, extras):
    """Here: a run, a structure, a table of it, and random weights, two of a published name."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    rows = [{"step": k, "loss": 3 - k / 9, "val/exact": 2.1, "lr": 0.1} for k in range(1, 9)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n"
                                                            for row in rows))
    rng = np.random.default_rng(0)
    atoms = Atoms()
    for row in range(9):
        atoms.add("A", row + 1, "ALA", xyz=rng.normal(size=(4, 3)) + [3.8 * row, 0, 0])
    (tmp_path / "x.pdb").write_text(atoms.pdb())
    lines = [f"x.pdb,A,A{row}{letter},{rng.normal():.3f}" for row in (3, 7) for letter in "CDEFG"]
    (tmp_path / "t.csv").write_text("\n".join(["pdb_file,chain,mutation,ddg", *lines, ""]))
    (tmp_path / "vanilla_model_weights").mkdir()
    for seed, name in enumerate(("vanilla_model_weights/v_48_020.pt", "tuned.pt")):
        torch.save(to_checkpoint(random_proteinmpnn(seed, **SIZES)), tmp_path / name)
    return tmp_path


def test_all_pictures_are_drawn(folder, capsys):
    main("--out p --demo run --structure x.pdb --table t.csv --weights tuned.pt".split())
    names = sorted(path.name for path in (folder / "p").iterdir())
    assert names == ["demo_curves.png", "scan_heatmap.png", "stability_before_after.png"]
    said = capsys.readouterr().out
    assert all(name in said for name in names)
    for name in names:
        content = (folder / "p" / name).read_bytes()
        assert content.startswith(b"\x89PNG") and 5_000 < len(content) < 60_000, name


def test_a_smaller_picture_keeps_rare_colours(tmp_path, extras):
    """Of a map in reds with some blue cells, as those of scans are."""
    image_of_pillow = pytest.importorskip("PIL.Image")
    ramp = np.linspace(0, 1, 300)
    reds = np.stack([255 - 100 * ramp, 250 * (1 - ramp), 240 * (1 - ramp)], axis=-1)
    pixels = np.repeat(reds[None], 300, axis=0).astype(np.uint8)
    for k in range(8):
        pixels[20 * k:20 * k + 6, :6] = (240 - 22 * k, 245 - 12 * k, 250 - 6 * k)
    image_of_pillow.fromarray(pixels).save(tmp_path / "p.png")
    shrink(tmp_path / "p.png")
    found = np.asarray(image_of_pillow.open(tmp_path / "p.png").convert("RGB")).astype(int)
    assert np.abs(found - pixels).max() < 20


@pytest.mark.parametrize("words, said", [
    ("--out p", "--demo"), ("--out p --table t.csv", "--weights"),
    ("--out p --demo nowhere", "nowhere"), ("--demo run", "--out")])
def test_what_cannot_be_drawn_is_refused(words, said, folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert not list(folder.glob("p/*"))

"""Every option that --help names, of all commands but those of training: once, with its effect.

Each command is run with the option and without; a table says what then differs. An option without
a row fails."""
import json
import re
import shutil
from typing import NamedTuple

import pytest
import torch

import plot_run
import sample_proteinmpnn
import sample_sedd
import score_mutations
import test_aurora_ddp
import test_dtype
from ddp_setup import Ddp
from mpnn.demo import PHI_PSI, build_backbone
from mpnn.model import random_proteinmpnn, to_checkpoint
from mpnn.weights import load_proteinmpnn
from mpnn_cases import Atoms
from proteins.letters import LETTERS
from proteins.structures import NAMES
from sedd_cases import write_checkpoint
from tool_runs import run_tool
from training import launch
from training.resume import hash_of

NATIVE = "MKTAYIAKQRQ"           # numbered from 10


class Row(NamedTuple):
    """An option with its value, and the words that it is added to."""
    option: str
    others: str
    effect: object      # a regular expression that the text of a run has with the option alone, or
    #                     a function (run without it, run with it) that asserts


# ---------------------------------------------------------------- effects
def differs(without, ran):
    assert ran.out != without.out


def takes_more_passes(without, ran):
    """The result is the same, in smaller batches."""
    assert ran.out == without.out
    assert ran.calls > without.calls


def takes_more_steps(without, ran):
    assert ran.calls > without.calls


def has_fewer_lines(without, ran):
    assert 1 < ran.out.count("\n") < without.out.count("\n")


def numbers_of(ran):
    return [float(text) for text in re.findall(r"-?\d+\.\d+", ran.out)]


def is_rounded(without, ran):
    """In bfloat16 numbers have three digits; here they are sums of dozens."""
    assert ran.out != without.out
    assert numbers_of(ran) == pytest.approx(numbers_of(without), rel=0.1, abs=0.2)


def drawn(ran):
    """The sequences that a run has drawn."""
    return [sequence for head, sequence in re.findall(r">(.*)\n(.*)\n", ran.out)
            if "sample" in head]


def draws_one_sequence(without, ran):
    """The likeliest letters, each time."""
    assert len(set(drawn(ran))) == 1 < len(set(drawn(without)))


def has_the_opposite_sign(without, ran):
    one, other = (float(re.search(r"Spearman (\S+)", run.err)[1]) for run in (without, ran))
    assert one == -other != 0


# ---------------------------------------------------------------- the tables
DRAW = "best.pt --length 9 --steps 2"
LETTER = 'best.pt --scaffold "MK[1]W" --number 12 --steps 3'
SCORE = "best.pt --score p.fasta"

SAMPLE_SEDD = [
    Row("--out new.fasta", DRAW, r"file new.fasta:\n>sample_1 length=9\n\w{9}\n"),
    Row("--no_ema", SCORE, differs),
    Row("--bfloat16", SCORE, is_rounded),
    Row("--tokens 9", SCORE, takes_more_passes),
    Row("--length 5", "best.pt --steps 2", r"length=5\n\w{5}\n"),
    Row("--length 12-14", "best.pt --steps 2", r"length=1[234]\n"),
    Row('--scaffold "MKT[4]W"', "best.pt --steps 2", r"\nMKT\w{4}W\n"),
    Row("--infill t.fasta", "best.pt --steps 2 --number 2",
        r">one_1 length=5\nMK\w\wW\n>one_2 length=5\nMK\w\wW\n>two_1 length=3\n\w\wA\n"),
    Row("--score p.fasta", "best.pt", r"\Aname\tlength\tnats\t.*\none\t9\t\d.*\ntwo\t7\t\d"),
    Row("--export model", "best.pt", r"file model/config.json:\n[\s\S]*file model/model.safetens"),
    Row("--seed 1", DRAW, differs),
    Row("--number 3", DRAW, r">sample_3 "),
    Row("--steps 9", "best.pt --steps 2", takes_more_steps),
    # With the absorbing graph and log-linear noise both predictors take the same steps.
    Row("--predictor euler", "uniform.pt --length 40 --steps 4", differs),
    Row("--temperature 0.001", LETTER, draws_one_sequence),
    Row("--top_p 0.001", LETTER, draws_one_sequence),
    Row("--samples 2", SCORE, differs),
    Row("--window", "best.pt --score long.fasta", r"\nlong\t56\t\d"),
    Row("--each_position", SCORE, r"\Aname\tposition\tresidue\tnats\none\t1\tM\t\d")]

DESIGN = "w.pt one.pdb"
WARM = "w.pt one.pdb --temperature 2"

SAMPLE_PROTEINMPNN = [
    Row("--pdb_path one.pdb", "w.pt", r"\A>one, .*\nMKTAYIAKQRQ\n"),
    Row("--chains B", "w.pt two.pdb", r"fixed_chains=\['A'\], designed_chains=\['B'\]"),
    Row("--fixed_chains", "w.pt two.pdb --chains A", r"fixed_chains=\[\], "),
    Row("--fixed_positions A10-A19", WARM, r"sample=1.*\nMKTAYIAKQR\w\n"),
    Row("--mutable_positions A20", WARM, r"sample=1.*\nMKTAYIAKQR\w\n"),
    Row("--num 2", DESIGN, r"sample=2"),
    Row("--temperature 0", f"{DESIGN} --num 12", draws_one_sequence),
    Row("--temperature 0.5 2", DESIGN, r"T=0.5, [\s\S]*T=2, "),
    Row("--omit ACDEFGHIKLMNPQRSTV", DESIGN, r"sample=1.*\n[WY]+\n"),
    Row("--bias W=100", DESIGN, r"sample=1.*\nW+\n"),
    Row("--tied_positions A10,A12,A14", WARM, r"sample=1.*\n(\w)\w\1\w\1"),
    Row("--homomer", "w.pt two.pdb --temperature 2", r"sample=1.*\n(\w+)/\1\n"),
    Row("--backbone_noise 1", f"{WARM} --num 9", differs),
    Row("--score_only", DESIGN, r"\A>.*\n\w+\n\n"),
    Row("--score_only given.fasta", DESIGN, r"\A>mine, score=.*\nQRQKAIYATKM\n\n"),
    Row("--orders 1", DESIGN, differs),
    Row("--batch_size 1", f"{WARM} --num 5", takes_more_passes),
    Row("--seed 1", WARM, differs),
    Row("--out new.fasta", DESIGN, r"file new.fasta:\n>one, "),
    Row("--out_folder new", DESIGN, r"file new/designs.csv:\npdb,[\s\S]*file new/seqs/one.fa:\n>")]

# {as in the published tool: as here}
PUBLISHED_NAMES = {
    "--pdb_path two.pdb": "two.pdb",
    "two.pdb --pdb_path_chains B": "two.pdb --chains B",
    "two.pdb --num_seq_per_target 2": "two.pdb --num 2",
    "two.pdb --sampling_temp 0.5": "two.pdb --temperature 0.5",
    "two.pdb --omit_AAs ACDEFGHIKLM": "two.pdb --omit ACDEFGHIKLM",
    "one.pdb --score_only 1": "one.pdb --score_only",
    "one.pdb --score_only 1 --path_to_fasta given.fasta": "one.pdb --score_only given.fasta",
    "one.pdb --path_to_fasta given.fasta --score_only 1": "one.pdb --score_only given.fasta"}

SCAN = "w.pt one.pdb --scan --mutable_positions A10-A11"
BOTH = "w.pt two.pdb --scan --mutable_positions A10-A11"
MEASURED = "w.pt one.pdb --mutations t.csv"
SEDD_LIST = "best.pt one.pdb --mutations t.csv"

SCORE_MUTATIONS = [
    Row("--mutations t.csv", "w.pt one.pdb", r"\none.pdb,A,M10A,1,-?\d[\s\S]*,K11W,2,"),
    Row("--scan", "w.pt one.pdb", r"\Apdb_file,chain,mutation,.*\none.pdb,A,M10A,-?\d.*,w.pt\n"),
    Row("--chains B", "w.pt two.pdb --scan", r"\A.*\n(two.pdb,B,.*\n)+\n"),
    Row("--fixed_chains", "w.pt two.pdb --chains A --mutations t.csv", differs),
    Row("--mutable_positions A10", "w.pt one.pdb --scan", r"\A.*\n(one.pdb,A,M10\w,.*\n){19}\n"),
    Row("--top 2", SCAN, r"\A.*\n.*\n.*\n\n"),
    Row("--per_position 1", f"{SCAN} --top 9", r"\A.*\n.*,M10.*\n.*,K11.*\n\n|"
                                              r"\A.*\n.*,K11.*\n.*,M10.*\n\n"),
    Row("--combine 2", f"{SCAN} --top 3", r"\A.*,sum_of_singles,"),
    Row("--unmeasured t.csv", f"{SCAN} --top 99 --per_position 19", r"\A(?![\s\S]*(M10A|K11W))"),
    Row("--measured ddg", MEASURED, r"Spearman -?\d\.\d+ "),
    Row("--lower_is_better", f"{MEASURED} --measured ddg", has_the_opposite_sign),
    Row("--out s.csv", MEASURED, r"file s.csv:\npdb_file,chain,mutation,ddg,score,"),
    Row("--picture p.png", f"{MEASURED} --measured ddg", r"file p.png:\n.PNG"),
    Row("--seed 1", MEASURED, differs),
    Row("--partners A_B", BOTH, r"\A.*,score_in_complex,[\s\S]*,A_B,"),
    Row("--interface 5", "w.pt two.pdb --scan --partners A_B", has_fewer_lines),
    Row("--copies", BOTH, r'\A.*\ntwo.pdb,,"A:M10A,B:M10A",'),
    Row("--copies A B", BOTH, r'\A.*\ntwo.pdb,,"A:M10A,B:M10A",'),
    Row("--also other.pt", MEASURED, r",w.pt; other.pt\n"),
    Row("--correct_unfolded", MEASURED, r",w.pt - w.pt\n"),
    Row("--correction_weights other.pt", MEASURED, r",w.pt - other.pt\n"),
    Row("--no_correction", MEASURED.replace("w.pt", "tuned.pt"), r",tuned.pt\n"),
    Row("--orders 1", MEASURED, differs),
    Row("--batch_size 1", MEASURED, takes_more_passes),
    Row("--no_ema", SEDD_LIST, differs),
    Row("--bfloat16", SEDD_LIST, is_rounded),
    Row("--tokens 11", SEDD_LIST, takes_more_passes)]

PLOT_RUN = [Row("--out new.png", "run", r"file new.png:\n.PNG")]

TABLES = {
    "sample_sedd": (sample_sedd.cli, SAMPLE_SEDD),
    "sample_proteinmpnn": (sample_proteinmpnn.main, SAMPLE_PROTEINMPNN),
    "score_mutations": (score_mutations.main, SCORE_MUTATIONS),
    "plot_run": (plot_run.main, PLOT_RUN),
    "test_dtype": (test_dtype.cli, [])}

# Options of all commands that run on ranks: those that start them here, with what is asked of
# launch.run_ranks then, and what a single process refuses.
NODE_1 = "--nproc_per_node 1 --nnodes 4 --node_rank 1 --master_addr n0"
STARTS = {
    "--nproc_per_node 3": ("", {"per_node": 3}),
    "--nnodes 4": ("--nproc_per_node 1 --node_rank 1 --master_addr n0", {"n_nodes": 4}),
    "--node_rank 2": ("--nproc_per_node 1 --nnodes 4 --master_addr n0", {"node_rank": 2}),
    "--master_addr n1": ("--nproc_per_node 1 --nnodes 4 --node_rank 1", {"master_addr": "n1"}),
    "--master_port 1234": (NODE_1, {"master_port": 1234}),
    "--init_timeout 7": (NODE_1, {"init_timeout": 7.0})}
REFUSES = {"--device cuda": "cuda", "--backend nccl": "nccl", "--ranks 2": "2"}

# Options of test_aurora_ddp.py, which is copied without our parser, and what setup_ddp is given.
AURORA = {
    "--device cpu": ("device", "cpu"), "--backend gloo": ("backend", "gloo"),
    "--timeout 7": ("timeout", 7.0), "--init_timeout 8": ("init_timeout", 8.0)}


# ---------------------------------------------------------------- what commands read
@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder of weights, structures, sequences, a table and a run."""
    folder = tmp_path_factory.mktemp("inputs")
    write_checkpoint(folder / "best.pt")
    write_checkpoint(folder / "uniform.pt", "uniform")
    model = random_proteinmpnn(3, hidden_size=16, n_encoder=1, n_decoder=2, num_edges=6)
    torch.save(to_checkpoint(model), folder / "w.pt")
    torch.save(to_checkpoint(random_proteinmpnn(4, hidden_size=16, num_edges=6)),
               folder / "other.pt")
    base = load_proteinmpnn(folder / "other.pt")
    record = {"base": "other.pt", "base_file": "other.pt", "unit": "table",
              "base_hash": hash_of(base.state_dict()), "reference": "unfolded"}
    torch.save(to_checkpoint(model, training_record=record), folder / "tuned.pt")
    for name, chains in (("one.pdb", "A"), ("two.pdb", "AB")):
        atoms = Atoms()
        for number, chain in enumerate(chains):
            X = build_backbone(*zip(*[PHI_PSI["helix"]] * len(NATIVE))) + [0, 9 * number, 0]
            for row, letter in enumerate(NATIVE):
                atoms.add(chain, 10 + row, NAMES[LETTERS.index(letter)], xyz=X[row])
        (folder / name).write_text(atoms.pdb())
    texts = {
        "p.fasta": ">one\nMKTAYIAKQ\n>two\nACDXEFG\n", "long.fasta": f">long\n{'MKTAYIAK' * 7}\n",
        "t.fasta": ">one\nMK__W\n>two\n__A\n", "given.fasta": f">mine\n{NATIVE[::-1]}\n",
        "t.csv": "mutation,ddg\nM10A,1\nK11W,2\nT12G,-1\nM10C:K11G,3\nK11D:A13C,0.5\n"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "run").mkdir()
    rows = [{"step": step, "loss": 1.0 / step, "lr": 0.1} for step in range(1, 9)]
    (folder / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture
def folder(inputs, tmp_path):
    return shutil.copytree(inputs, tmp_path / "inputs")


# ---------------------------------------------------------------- the tests
ALL_ROWS = [pytest.param(script, row, id=f"{script} {row.option}")
            for script, (_, rows) in TABLES.items() for row in rows]


@pytest.mark.parametrize("script, row", ALL_ROWS)
def test_an_option_has_its_effect(script, row, folder, extras):
    if "--export" in row.option:
        pytest.importorskip("safetensors")
    if ".png" in row.option:
        pytest.importorskip("matplotlib")
    main, _ = TABLES[script]
    without = run_tool(main, row.others, folder)
    ran = run_tool(main, f"{row.others} {row.option}", folder)
    assert ran.code == 0, ran.text
    if isinstance(row.effect, str):
        assert re.search(row.effect, ran.text), ran.text
        assert not re.search(row.effect, without.text), without.text
    else:
        assert without.code == 0, without.text
        row.effect(without, ran)


@pytest.mark.parametrize("published, ours", PUBLISHED_NAMES.items())
def test_an_option_of_the_published_tool_is_ours(published, ours, folder):
    main = sample_proteinmpnn.main
    result = run_tool(main, f"w.pt {published}", folder)
    assert result == run_tool(main, f"w.pt {ours}", folder)
    assert result.code == 0 and result.out.startswith(">")


@pytest.mark.parametrize("option", STARTS)
def test_an_option_that_starts_ranks_is_passed_on(option, folder, monkeypatch):
    asked = {}

    def run_ranks(command, *values):
        names = ("per_node", "n_nodes", "node_rank", "master_addr", "master_port", "init_timeout")
        asked.update(zip(names, values))
        return 0

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    others, expected = STARTS[option]
    run_tool(sample_sedd.cli, f"best.pt {others} {option}", folder)
    assert asked | expected == asked


@pytest.mark.parametrize("option", REFUSES)
def test_an_option_of_the_machine_is_checked(option, folder):
    ran = run_tool(sample_sedd.cli, f"{DRAW} {option}", folder)
    assert ran.code != 0 and ran.out == "" and REFUSES[option] in ran.err


def options_of(texts):
    return {word for text in texts for word in re.findall(r"(?<![\w-])--\w+", text)}


@pytest.mark.parametrize("script", TABLES)
def test_every_option_has_a_row(script, tmp_path):
    main, rows = TABLES[script]
    tested = options_of([row.option for row in rows]) | {"--help"}
    if main is sample_proteinmpnn.main:
        tested |= options_of(PUBLISHED_NAMES)
    if main is not plot_run.main:
        tested |= options_of([*STARTS, *REFUSES])
    assert options_of([run_tool(main, "--help", tmp_path).out]) == tested


# ---------------------------------------------------------------- test_aurora_ddp.py
@pytest.mark.parametrize("option", AURORA)
def test_an_option_of_the_check_of_a_machine_is_passed_on(option, tmp_path, monkeypatch):
    asked = {}

    def setup_ddp(device, backend, **others):
        asked.update(device=device, backend=backend, **others)
        raise RuntimeError("no ranks")

    monkeypatch.setattr(test_aurora_ddp, "setup_ddp", setup_ddp)
    ran = run_tool(test_aurora_ddp.main, option, tmp_path)
    name, value = AURORA[option]
    assert ran.code == test_aurora_ddp.FAILED and asked[name] == value


@pytest.mark.parametrize("ipex, outcome", [
    ("on", test_aurora_ddp.Wrong), ("off", test_aurora_ddp.NothingToCheck),
    ("auto", test_aurora_ddp.NothingToCheck)])
def test_ipex_is_a_claim_where_it_is_asked_for(ipex, outcome):
    """It is not installed here; by itself the check asks for it on an Intel GPU alone."""
    with pytest.raises(outcome):
        test_aurora_ddp.ipex(Ddp(), test_aurora_ddp.read_arguments(["--ipex", ipex]))


def test_every_option_of_the_check_of_a_machine_is_tested(tmp_path):
    found = options_of([run_tool(test_aurora_ddp.main, "--help", tmp_path).out])
    assert found == options_of(AURORA) | {"--help", "--ipex"}

"""What several benchmarks share: their data, clock, command line and words on the progress."""
import contextlib
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import train_dpo_ddp as dpo
import train_sedd_ddp as sedd
from ddp_setup import BAD_INPUT, barrier, broadcast
from sedd.data import names_no_data
from sedd.prepared import FORMAT, PARTS, SETS, VERSION
from proteins.letters import LETTERS, N_TOKENS, X_ID
from proteins.sequences import sequence_keys
from training.command_line import add_launch_arguments, started_ranks
from training.parser import Parser
from training.precision import choose_dtype
from dpo.reference import make_tables

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SCRIPTS = {"sedd": (sedd, "sedd_cpu.yaml"), "dpo": (dpo, "dpo_demo.yaml")}
LONGEST = 45_000            # residues in a random protein, at most
DEMO_PROTEINS = 20_000      # for a config that names no data
PROTEINS_AT_ONCE = 250_000  # that are made in memory before they are written


# ---- command line ----

class CommandParser(Parser):
    """A Parser whose errors are printed and end the process, for one that is not yet a rank."""

    def error(self, message):
        self.exit(BAD_INPUT, f"{self.prog}: error: {self.message(message)}\n")


def read_options(parser, argv):
    """Options of a benchmark whose ranks a launcher may start, or --nproc_per_node. Numbers below
    1 are refused."""
    add_launch_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    for name, value in vars(args).items():
        if name != "node_rank" and type(value) is int and value < 1:
            parser.error(f"--{name} is {value}; expected at least 1")
    return args


def add_folder(parser):
    """Add the option --folder."""
    parser.add_argument("--folder", type=Path, default=Path("."),
                        help="folder for temporary checkpoints and data")


def check_folder(parser, folder):
    if not folder.is_dir():
        parser.error(f"--folder {folder} is no folder; expected one that exists")


def run_on_ranks(name, bench, args, argv):
    """Run bench(args, ddp) on the ranks that the options ask for; name: of the command."""
    with started_ranks(args, [name, *argv]) as ddp:
        return bench(args, ddp)


def run_on_one_rank(name, bench, args, argv):
    """Run bench(args, ddp), which compares steps on one device: the CPU unless --device says
    otherwise. Several ranks are refused."""
    def run(args, ddp):
        if ddp.world_size > 1:
            raise ValueError(f"found {ddp.world_size} ranks; expected one process: {name} "
                             "compares steps, on one device. Start it by python alone.")
        bench(args, ddp)

    measure_the_cpu_by_default(args)
    run_on_ranks(name, run, args, argv)


def measure_the_cpu_by_default(args):
    if args.device == "auto":
        args.device = "cpu"


def use_demo_proteins(config):
    """Let a config of SEDD that names no data have demo proteins."""
    if names_no_data(config.data):
        config.data.demo_proteins = DEMO_PROTEINS


# ---- measuring ----

def now(ddp):
    """CPU seconds of this process; for a device, wall seconds after it has finished its work."""
    if ddp.device.type == "cpu":
        return time.process_time()
    getattr(torch, ddp.device.type).synchronize()
    return time.perf_counter()


def say(text):
    """Print a line on the progress."""
    print(text, file=sys.stderr, flush=True)


def computes_in_bfloat16(device):
    """Whether a device has bfloat16. A CPU without emulates it, a hundred times slower."""
    dtype, _ = choose_dtype(True, device)
    return dtype == torch.bfloat16


@contextlib.contextmanager
def shared_folder(parent, ddp):
    """Path, on every rank, of a temporary folder in `parent`, which all hosts must share."""
    with contextlib.ExitStack() as stack:
        name = None
        if ddp.is_main:
            folder = tempfile.TemporaryDirectory(prefix="bench-", dir=parent)
            name = stack.enter_context(folder)
        yield Path(broadcast(name, ddp))
        barrier(ddp)     # wait until all ranks have left


def training_of(run, what, ddp):
    """(data set of micro-batches, loss function), as the script's `train` makes them.

    Args: run: from the script's `prepare`; what: "sedd" or "dpo".
    """
    config = run.config
    seed = config.training.seed
    if what == "sedd":
        dataset = sedd.MicroBatchDataset(run.graph, run.noise, config.data.max_length,
                                         run.micro_batches, seed, config.loss.reduction)
    else:
        make_tables(run, ddp)
        dataset = dpo.MicroBatchDataset(run.make_batch, seed)

    def loss_of(model, batch):
        if what == "sedd":
            return sedd.micro_batch_loss(model, batch, run.graph, config, ddp, run.dtype)
        return dpo.micro_batch_loss(model, batch, run.reference, config, ddp, run.dtype)

    return dataset, loss_of


# ---- random proteins ----

def made_lengths(n, random):
    """(n,) int64 lengths as in UniRef50: log-normal, mean 287. random: a numpy generator."""
    return np.exp(random.normal(np.log(200), 0.85, n)).clip(11, LONGEST).astype(np.int64)


def write_made_fasta(path, lengths, random):
    """Write a FASTA file of random proteins of these lengths."""
    letters = np.array(list(LETTERS[:X_ID]))
    with open(path, "w") as file:
        for i, length in enumerate(lengths):
            file.write(f">made{i}\n{''.join(random.choice(letters, length))}\n")


def write_prepared(folder, n):
    """Write a prepared folder of n random proteins with the lengths of UniRef50. folder: Path."""
    random = np.random.default_rng(0)
    histogram = np.zeros(LONGEST + 1, np.int64)
    letters = np.zeros(N_TOKENS, np.int64)
    hashes = {name: hashlib.blake2b(digest_size=8) for name in SETS}   # of the keys
    for name in SETS:
        (folder / name).mkdir(parents=True)
        for part in PARTS:
            (folder / name / part).touch()
    for first in range(0, n, PROTEINS_AT_ONCE):
        lengths = made_lengths(min(PROTEINS_AT_ONCE, n - first), random)
        tokens = random.integers(0, X_ID, lengths.sum(), np.uint8)
        keys = sequence_keys(tokens, np.cumsum(lengths) - lengths, lengths)
        for (part, dtype), values in zip(PARTS.items(), (tokens, lengths, keys)):
            with open(folder / "train" / part, "ab") as file:
                values.astype(dtype).tofile(file)
        letters += np.bincount(tokens, minlength=N_TOKENS)
        hashes["train"].update(keys.astype("<u8").tobytes())
        histogram += np.bincount(lengths, minlength=len(histogram))
    sets = {}
    for name in SETS:
        files = {part: {"bytes": (folder / name / part).stat().st_size} for part in PARTS}
        sets[name] = {"proteins": 0, "residues": 0, "length_histogram": [],
                      "letter_counts": [0] * N_TOKENS, "keys_hash": hashes[name].hexdigest(),
                      "files": files}
    lengths = np.flatnonzero(histogram)
    sets["train"].update(
        proteins=n, residues=int((histogram[lengths] * lengths).sum()),
        length_histogram=np.stack([lengths, histogram[lengths]], 1).tolist(),
        letter_counts=letters.tolist())
    (folder / "meta.json").write_text(json.dumps({
        "format": FORMAT, "version": VERSION, "letters": LETTERS, "release": "made", "source": [],
        "val_fraction": 0.0, "min_length": 1, "sets": sets}))

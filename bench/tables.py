"""Tables of measured stabilities, made from the files that their authors published.

    git clone --depth 1 https://github.com/3BioCompBio/EvoStability
    git clone --depth 1 https://github.com/PeptoneLtd/proteinmpnn_ddg
    python -m bench tables evostability EvoStability --out megascale.csv
    python -m bench tables s2648 proteinmpnn_ddg --out s2648.csv
    python -m bench tables zenodo FOLDER --out all_megascale.csv

The first two tables are those of docs/stability.md. `evostability`: 95 domains of Megascale, as
selected there (Hermans et al. 2024). `zenodo`: all domains of Megascale (Tsuboyama et al. 2023)
that have a model; FOLDER holds what Processed_K50_dG_datasets.zip and AlphaFold_model_PDBs.zip of
zenodo.org/records/7992926 unpack to. `s2648`: 2,648 mutations (Dehouck et al. 2009).

A table has the columns pdb_file,chain,mutation,ddg: one single mutation a row, in kcal/mol,
positive = destabilising. Its structures (N, CA, C and O of the one chain, of the first model) are
written beside it, into the folder of its name without .csv. train_dpo_ddp.py reads it as it is.
"""
import csv
import gzip
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ddp_setup import BAD_INPUT
from training.files import check_output, write_text_atomic, write_whole
from training.parser import Parser
from training.problems import in_columns

# Domains of EvoStability that docs/stability.md trains on and tests with. Further ones were kept
# for other tests: relatives of a public test set (S669), and a random part.
DOMAINS = """
    1aoy_A_7-75 1csq_A_1-67_F49A 1f0m_A_10-75 1gjs_A_18-62 1gl5_A_180-237 1gyz_A_59-117
    1h92_A_6-62 1ify_A_161-204 1k1v_A_24-64 1lp1_A_4-58 1mhn_A_91-147 1mjc_A_3-70_L45S
    1qkh_A_9-76 1qly_A_1-58 1r69_A_1-61 1s1n_A_153-211_V181A 1srm_A_9-63 1tg0_A_3-66
    1tuc_A_101-16 1tud_A_49-47 1ubq_A_1-72_L67S 1ufm_A_293-364 1v1c_A_2-66 1wcl_A_351-419
    1yg0_A_1-66 1zlm_A_14-69 2ami_A_3-74 2b88_A_3-56 2btt_A_1122-1182 2hdz_A_11-60 2j6k_con_af
    2jn4_A_1-66 2jro_A_1-64 2jrr_A_4-60 2jvd_A_1-39 2jws_A_7-54 2jwt_A_5-54 2jy8_A_5-49
    2k1b_A_4-52 2k28_A_7-56 2k2a_A_92-154 2k5h_A_35-96_G57A 2k5n_A_1-67 2kcm_A_1-68 2kfv_A_24-92
    2kgt_A_9-71 2kr3_A_5-69 2krs_A_1-63_W42A 2kru_A_3-54 2kt8_A_1-67_G54S 2kvt_A_8-59
    2kvv_A_8-68_K50S 2kwh_A_393-444 2l3x_A_2-67_mut1 2l6q_A_2-56 2l7m_P_6-57 2l8d_A_3-62
    2l9r_A_8-68 2ldm_A_85-135 2lgw_A_3-67 2lo1_A_6-70 2lss_A_2-70_G7S 2lt1_A_4-75
    2lxk_A_1-66_G4A 2lyr_A_1-62 2m0c_A_15-62 2m2j_A_21-91 2m5a_A_1-56 2m8e_A_12-49 2m8j_A_1-43
    2m8u_A_9-75 2ma4_A_22-91 2mi6_A_8-62 2mky_A_19-73 2mwa_A_428-464_af 2myx_A_61-112
    2n88_A_53-100 2o2w_A_818-884 2och_A_5-66 2op7_A_1-39 2rrt_A_5-71 2ru9_A_2-69 2wxc_A_127-170
    2ysb_A_7-49 2ysc_A_8-39 2ysf_A_7-40 3v1a_A_1-44 4c26_A_-2-59 4g3o_A_452-498 4hck_A_80-138
    5gu9_A_80-149_V139D 5vnt_A_21-82 5z2s_A_5-51 6acv_A_29-94 6nmw_A_64-122
""".split()
ZENODO = "Tsuboyama2023_Dataset2_Dataset3_20230416.csv"
S2648 = "s2648_ddg_experimental.csv"
BACKBONE = ("N", "CA", "C", "O")
HEADER = "pdb_file,chain,mutation,ddg"
MUTATION = re.compile("[A-Z]-?[0-9]+[A-Za-z]?[A-Z]")


class Row(NamedTuple):
    """A measured mutation."""
    structure: Path     # PDB file
    name: str           # of the protein
    chain: str
    mutation: str       # number as in the file
    ddg: str            # kcal/mol, positive = destabilising


# ---------------------------------------------------------------- the published files
def rows_of_evostability(folder: Path) -> Iterator[Row]:
    """The rows of a clone of EvoStability: datasets/NAME.csv, pdb/NAME.pdb."""
    for name in DOMAINS:
        for cells in read_cells(folder / "datasets" / f"{name}.csv", ("mutation_pdb", "DDG")):
            text = cells["mutation_pdb"]        # wild type, chain, number, mutant: QA1C
            yield Row(folder / "pdb" / f"{name}.pdb", name, text[1], text[0] + text[2:],
                      f"{float(cells['DDG']):.3f}")


def rows_of_zenodo(folder: Path) -> Iterator[Row]:
    """The rows of Megascale as published. ddG there is positive for stabilising; "-" is a value
    that its authors do not trust."""
    path = find(folder, ZENODO)
    models = find(folder, "AlphaFold_model_PDBs")
    residues = {}       # of each domain; None: there is no model
    for cells in read_cells(path, ("WT_name", "mut_type", "ddG_ML")):
        name = cells["WT_name"].removesuffix(".pdb").replace("|", ":")
        mutation = cells["mut_type"]            # wt, A12V, A12V:G45D, insA12, delA12
        is_single = mutation[:1].isupper() and ":" not in mutation
        if not is_single or cells["ddG_ML"] in ("", "-"):
            continue
        model = models / f"{name}.pdb"
        if name not in residues:
            residues[name] = residues_of(model) if model.is_file() else None
        if residues[name] is None:
            continue
        chain, numbers = residues[name]
        place = int(mutation[1:-1])         # counted from the first residue
        if not 1 <= place <= len(numbers):
            raise ValueError(f"{model} has {len(numbers)} residues, and {path} {mutation} of it; "
                             "expected the model of this domain.")
        yield Row(model, name.replace(":", "_"), chain,
                  mutation[0] + numbers[place - 1] + mutation[-1],
                  f"{-float(cells['ddG_ML']):.3f}")


def rows_of_s2648(folder: Path) -> Iterator[Row]:
    """The rows of S2648 as the clone of proteinmpnn_ddg holds it; structures are in pdb/ beside."""
    path = find(folder, S2648)
    columns = ("pdb_id", "chain", "pre", "pos", "post", "ddG_experimental", "relative_path")
    for cells in read_cells(path, columns):
        chain = cells["chain"]
        yield Row(path.parent / "pdb" / cells["relative_path"],
                  f"{cells['pdb_id'].lower()}_{chain}", chain,
                  cells["pre"] + cells["pos"] + cells["post"], cells["ddG_experimental"])


SOURCES = {"evostability": rows_of_evostability, "zenodo": rows_of_zenodo, "s2648": rows_of_s2648}


def find(folder, name):
    """Path of the one file or folder of this name in a folder, not among what macOS adds to an
    archive. Raises ValueError."""
    found = sorted(path for path in folder.rglob(name)
                   if "__MACOSX" not in path.relative_to(folder).parts)
    if not found:
        raise ValueError(f"there is no {name} in {folder}; expected it there, unpacked.")
    return found[0]


def read_cells(path, columns):
    """Yield {column: text} of the rows of a CSV file. Raises ValueError or OSError."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; expected the file as "
                             f"published, with {', '.join(columns)}.")
        for cells in reader:
            if None in cells.values():
                raise ValueError(f"{path}, line {reader.line_num}: expected a value for each of "
                                 f"{', '.join(reader.fieldnames)}.")
            yield cells


# ---------------------------------------------------------------- structures
def backbone_lines(path, chain=None):
    """The lines of backbone atoms in the first model of a PDB file; chain: of this one alone."""
    lines = []
    with open(path, encoding="latin-1") as file:
        for line in file:
            if line.startswith("ENDMDL"):
                break
            is_backbone = line.startswith("ATOM") and line[12:16].strip() in BACKBONE
            if is_backbone and chain in (None, line[21]):
                lines.append(line)
    return lines


def residues_of(path):
    """(chain, numbers of its residues, with insertion codes) of the first chain of a PDB file.
    Raises ValueError or OSError."""
    lines = [line for line in backbone_lines(path) if line[12:16].strip() == "CA"]
    if not lines:
        raise ValueError(f"{path} has no CA atom; expected the model of a domain.")
    chain = lines[0][21]
    return chain, [line[22:27].strip() for line in lines if line[21] == chain]


def write_structure(path, row):
    """Write the chain of a Row as gzipped PDB. Raises ValueError or OSError."""
    lines = backbone_lines(row.structure, row.chain)
    if not lines:
        raise ValueError(f"{row.structure} has no backbone of chain {row.chain}; expected it there "
                         "for the mutations of the table.")
    content = gzip.compress("".join([*lines, "END\n"]).encode("latin-1"), mtime=0)
    write_whole(path, lambda file: file.write(content))


# ---------------------------------------------------------------- command
def write_table(rows: Iterator[Row], out: Path) -> str:
    """Write a table and its structures. Returns what was written, in words."""
    names = set()
    lines = [HEADER]
    rows = list(rows)           # all are read and checked before anything is written
    for row in rows:
        check_row(row)
    for row in rows:
        file = f"{out.stem}/{row.name}.pdb.gz"
        if row.name not in names:
            write_structure(out.parent / file, row)
            names.add(row.name)
        lines.append(f"{file},{row.chain},{row.mutation},{row.ddg}")
    if not names:
        raise ValueError("found no single mutation with a value and a structure; expected the "
                         "files as published.")
    write_text_atomic(out, "\n".join([*lines, ""]))
    return (f"{out}: {len(lines) - 1:,} mutations of {len(names):,} proteins; structures in "
            f"{out.with_suffix('')}")


def check_row(row):
    """Raises ValueError for a mutation, a value or a name that no table may have."""
    if not MUTATION.fullmatch(row.mutation):
        raise ValueError(f"{row.name}: found the mutation {row.mutation!r}; expected such as A23V.")
    try:
        is_number = math.isfinite(float(row.ddg))
    except ValueError:
        is_number = False
    if not is_number:
        raise ValueError(f"{row.name} {row.mutation}: found the value {row.ddg!r}; expected a "
                         f"number of kcal/mol.")
    if "/" in row.name:
        raise ValueError(f"found the protein {row.name!r}; expected a name without '/'.")


def main(argv):
    parser = Parser(prog="python -m bench tables", description=__doc__, allow_abbrev=False)
    parser.add_argument("source", choices=SOURCES, help="which table, from where")
    parser.add_argument("folder", type=Path, help="what was downloaded")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.csv",
                        help="the table; its structures are written into a folder of its name")
    try:
        args = parser.parse_args(argv)
        if args.out.suffix != ".csv":
            raise ValueError(f"found --out {args.out}; expected a name that ends in .csv.")
        check_output(args.out, [])
        print(write_table(SOURCES[args.source](args.folder), args.out), flush=True)
    except (ValueError, OSError) as error:
        print(in_columns(f"python -m bench tables: error: {error}"), file=sys.stderr)
        sys.exit(BAD_INPUT)

"""Split tables of measured mutations into one to train on and one of unrelated proteins.

    python split_mutations.py megascale.csv s2648.csv --out_folder split
    python split_mutations.py my.csv --hold_out 0.1 --identity 0.25 --out_folder split

Reads tables of mutations (CSV; docs/data.md has the columns). Writes split/rest.csv, such as for
train_dpo_ddp.py with loss.unit=table, and split/held_out.csv, with which score_mutations.py
--mutations measures what was learned. Both have all columns of all tables, and paths of structures
relative to the new folder. Values are copied as they are: before joining tables, give columns of
one name the same unit and sign. Of several tables, each has its own two as well, such as
split/megascale_rest.csv and split/megascale_held_out.csv.

Proteins whose mutated chains are related, by an identity of --identity or more (equal letters per
column of an alignment, see proteins/identity.py), are on the same side, as are relatives of
relatives. With --identity 1 only equal sequences, and parts of them, stay together. A hash of the
sequences of such a family decides its side: a family is held out with probability --hold_out,
whatever other proteins the tables have, in any order. So of few proteins, or with a large family,
other fractions than --hold_out may be held out.

Variants that do not fit their structure are named and left out; if most do not, nothing is written.
Prints the families, and the proteins and variants on both sides. Wrong input ends with one message
and exit code 2; then nothing is written.
"""
import sys
from pathlib import Path

from proteins.identity import RELATED, hold_out_families
from proteins.mutations import (columns_of, describe_skipped, place_named, read_mutations,
                                variants_text)
from proteins.structures import describe_modified
from training.files import check_output, write_text_atomic
from training.parser import Parser


def read_tables(paths, ca_only):
    """List of the Proteins of each table; files that they name. Prints which variants do not fit.

    Raises: ValueError."""
    tables = [read_mutations(path) for path in paths]
    proteins = []
    structures = []
    for table in tables:
        if table.has_sequences != tables[0].has_sequences:
            raise ValueError(f"{table.path} and {tables[0].path}: one has sequences, the other "
                             "structures; expected all tables with a column pdb_file, or all with "
                             "a column sequence.")
        of_table, skipped = place_named(table, ca_only)
        if skipped.variants:
            print(describe_skipped(table, skipped), file=sys.stderr)
        proteins.append(of_table)
        structures += table.structures
    modified = describe_modified(protein.structure for of_table in proteins for protein in of_table)
    if modified:
        print(modified, file=sys.stderr)
    return proteins, structures


def files_of(tables, proteins, split, folder):
    """{path: its Proteins}: of all tables, and of each."""
    files = {folder / "rest.csv": split.rest, folder / "held_out.csv": split.held_out}
    if len(tables) == 1:
        return files
    held_out = {id(protein) for protein in split.held_out}
    stems = [path.stem for path in tables]
    for number, (stem, of_table) in enumerate(zip(stems, proteins), 1):
        if len(set(stems)) < len(stems):        # all are numbered: a_1 may be a name too
            stem = f"{stem}_{number}"
        sides = {"rest": [], "held_out": []}
        for protein in of_table:
            sides["held_out" if id(protein) in held_out else "rest"].append(protein)
        for side, of_side in sides.items():
            files[folder / f"{stem}_{side}.csv"] = of_side
    return files


def describe_side(path, proteins):
    """A line on what was written."""
    n_variants = sum(len(protein.variants) for protein in proteins)
    sequences = {protein.sequence for protein in proteins}
    return f"{path}: {n_variants:,} variants of {len(sequences):,} protein(s)"


def check_options(args):
    """ValueError for numbers that make no sense."""
    if not 0 < args.hold_out < 1:
        raise ValueError(f"found --hold_out {args.hold_out}; expected a fraction between 0 and 1, "
                         "such as 0.2.")
    if not 0 < args.identity <= 1:
        raise ValueError(f"found --identity {args.identity}; expected a share of equal letters, "
                         "above 0 and at most 1, such as 0.3.")


def make_parser():
    parser = Parser(description=__doc__, allow_abbrev=False,
                    epilog="See the top of this file for examples, and docs/data.md for tables.")
    add = parser.add_argument
    add("tables", nargs="+", type=Path, metavar="table", help="CSV files of mutations")
    add("--hold_out", type=float, default=0.2, metavar="FRACTION",
        help="of the families that are held out (default 0.2)")
    add("--identity", type=float, default=RELATED, metavar="SHARE",
        help=f"of equal letters from which proteins stay together (default {RELATED})")
    add("--ca_only", action="store_true", help="read CA atoms alone, for a CA-only model")
    add("--out_folder", type=Path, required=True, metavar="FOLDER",
        help="for rest.csv and held_out.csv")
    return parser


def split_tables(args):
    """Do what the options say. Raises: ValueError or OSError."""
    check_options(args)
    of_tables, structures = read_tables(args.tables, args.ca_only)
    proteins = [protein for of_table in of_tables for protein in of_table]
    split = hold_out_families(proteins, args.hold_out, args.identity)
    files = files_of(args.tables, of_tables, split, args.out_folder)
    if args.out_folder.is_dir():        # a folder that is missing has nothing to overwrite
        for path in files:
            check_output(path, [*args.tables, *structures])
    columns = columns_of(proteins)
    for path, of_side in files.items():
        write_text_atomic(path, variants_text(of_side, columns, args.out_folder))
    print(f"{split.n_families:,} families of proteins with an identity of {args.identity:g} or "
          f"more; the nearest on different sides: {split.nearest:.3f}")
    for path, of_side in files.items():
        print(describe_side(path, of_side))


def main(argv):
    try:
        split_tables(make_parser().parse_args(argv))
        return 0
    except (ValueError, OSError) as error:
        print(f"split_mutations.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

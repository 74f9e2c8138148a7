"""Names of residues as programs write them: their letters, protons, ends of chains and caps.

    plain_name("NHIE")          # "HIS": of Amber, the first residue of a chain
    token_of(plain_name("SEP")) # that of S, the parent of a modified residue

No work at import beyond tables. Reads and writes nothing.
"""
import functools

import gemmi

from proteins.letters import X_ID, encode

NAMES = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split()
# Names that programs of molecular dynamics give to residues by their protons and bonds.
PROTONATED = {"HID": "HIS", "HIE": "HIS", "HIP": "HIS", "HSD": "HIS", "HSE": "HIS", "HSP": "HIS",
              "CYX": "CYS", "CYM": "CYS", "CYN": "CYS", "ASH": "ASP", "GLH": "GLU", "LYN": "LYS",
              "LYP": "LYS", "LSN": "LYS", "ARN": "ARG", "TYM": "TYR"}
# The same in four letters, of GROMACS and CHARMM.
PROTONATED_OF_FOUR = {
    "HISA": "HIS", "HISB": "HIS", "HISD": "HIS", "HISE": "HIS", "HISH": "HIS", "HISP": "HIS",
    "HIS1": "HIS", "HIS2": "HIS", "CYSH": "CYS", "CYSX": "CYS", "CYS1": "CYS", "CYS2": "CYS",
    "ASPH": "ASP", "ASPP": "ASP", "GLUH": "GLU", "GLUP": "GLU", "LYSH": "LYS", "LYSN": "LYS",
    "ARGN": "ARG", "ASN1": "ASN"}
# Groups that close the ends of a chain, without a backbone of their own.
CAPS = frozenset("ACE FOR BOC NME NMA NAC NHE NH2".split())


def plain_name(name: str) -> str:
    """A residue's name in upper case, without what it says of protons and of the ends of a chain:
    HIS for HIE, GLY for NGLY and CGLY."""
    name = name.strip().upper()
    if name in PROTONATED:
        return PROTONATED[name]
    return _name_of_four(name) or name


def is_name_of_four(name: str) -> bool:
    """Whether these are four letters for one of the 20 amino acids, such as NGLY or HISE."""
    return _name_of_four(name.strip().upper()) is not None


@functools.cache
def is_amino_acid(name: str) -> bool:
    """Whether the name of a residue is that of an amino acid, perhaps a modified one."""
    return gemmi.find_tabulated_residue(plain_name(name)).is_amino_acid()


@functools.cache
def is_nucleotide(name: str) -> bool:
    """Whether the name of a residue is that of a nucleotide of DNA or RNA."""
    return gemmi.find_tabulated_residue(name.strip().upper()).is_nucleic_acid()


@functools.cache
def token_of(name: str) -> int:
    """The letter of a residue by its name, of a modified one that of its parent, as a token."""
    if not is_amino_acid(name):
        return X_ID
    letter = gemmi.find_tabulated_residue(plain_name(name)).one_letter_code.upper()
    return int(encode(letter.replace(" ", "X"))[0])     # gemmi knows no parent of a few


def _name_of_four(name):
    """The amino acid of a name in capitals of four letters; None of any other name."""
    if name in PROTONATED_OF_FOUR:
        return PROTONATED_OF_FOUR[name]
    inner = PROTONATED.get(name[1:], name[1:])
    if len(name) == 4 and name[0] in "NC" and inner in NAMES:
        return inner
    return None

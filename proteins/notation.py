"""How people write a variant of a protein: the one reader of such texts.

    reading = read_variant("p.(Gly1Ala)")       # .mutations: G1A
    reading = read_variant("GA1A,WB2F;")        # A:G1A and B:W2F, in two chains
    reading = read_variant("G1*")               # .left_out: STOP

A text is one variant of one or several mutations. What is no substitution, as a mutational scan has
among its rows, is told by its kind and is no error. docs/tables.md has a table of all forms, which
a test reads. No model here. Writes nothing.
"""
from __future__ import annotations

import re
from typing import NamedTuple

from proteins.csv_files import MINUS, is_no_value
from proteins.letters import AMINO_ACIDS, RARE
from proteins.residue_names import NAMES

# What a text is that has no substitution of its own.
WILD_TYPE = "wild type"
STOP = "stop"
DELETION = "deletion"
INSERTION = "insertion"
FRAMESHIFT = "frameshift"
UNKNOWN = "variant with an unknown letter"
UNCHANGED = "variant that changes nothing"
EMPTY = "row without a mutation"

# In the order in which they are told.
PLURALS = {WILD_TYPE: "wild types", STOP: "stops", DELETION: "deletions",
           INSERTION: "insertions", FRAMESHIFT: "frameshifts",
           UNKNOWN: "variants with an unknown letter",
           UNCHANGED: "variants that change nothing", EMPTY: "rows without a mutation"}

EXPECTED = ("a mutation such as A12V: the wild type's letter, the residue's number in the file, "
            "the mutant's letter (docs/tables.md has other forms)")
WILD_TYPE_WORDS = {"wt", "_wt", "wild type", "wild-type", "wild_type", "wildtype", "native", "=",
                   "p.=", "p.(=)"}
UNKNOWN_WORDS = {"p.?", "p.(?)", "p.0", "p.0?"}
UNCHANGED_WORDS = {"_sy"}       # as MaveDB writes a synonymous variant
CHANGES = {"delins": DELETION, "del": DELETION, "delta": DELETION, "Δ": DELETION,
           "ins": INSERTION, "dup": INSERTION, "fs": FRAMESHIFT, "ext": FRAMESHIFT}

# Signs in place of a letter; for a stop and an unknown residue there are letters, too.
SILENT_SIGN = "="
STOP_SIGN = "*"
GAP = "-"
UNKNOWN_SIGN = "?"
SIGNS = (SILENT_SIGN, STOP_SIGN, GAP, UNKNOWN_SIGN)
# What papers print in place of the keyboard's hyphen.
HYPHENS = str.maketrans(dict.fromkeys(
    (MINUS, "\N{HYPHEN}", "\N{NON-BREAKING HYPHEN}", "\N{EN DASH}"), "-"))


class Mutation(NamedTuple):
    """One residue and its new letter."""
    wild_type: str      # letter
    number: str         # in the file, with insertion code
    mutant: str         # letter
    chain: str = ""     # that the text names

    def __str__(self):
        place = f"{self.chain}:" if self.chain else ""
        return f"{place}{self.wild_type}{self.number}{self.mutant}"


class Reading(NamedTuple):
    """What a text says."""
    mutations: tuple[Mutation, ...] = ()    # substitutions, each of another residue
    silent: tuple[Mutation, ...] = ()       # parts that change nothing, beside others
    left_out: str = ""                      # kind of what is no substitution; then there is none
    n_repeated: int = 0                     # parts that are equal to one before


class UnreadableVariant(ValueError):
    """A text in none of the forms. The message leaves out what was expected: EXPECTED."""


def read_variant(text: str, is_line: bool = False) -> Reading:
    """Read a variant.

    Args:
        is_line: it is a line of a list, on which several may be meant as variants of their own.
    Raises: UnreadableVariant; ValueError for a text that is read but not clear.
    """
    original = text
    text = text.translate(HYPHENS)
    plain = SUBSTITUTION.fullmatch(text)
    if plain and plain[1] != plain[3]:      # nearly all texts
        return Reading((Mutation(*plain.groups()),))
    kind = kind_of_word(text)
    if kind:
        return Reading(left_out=kind)
    body, is_bracketed = without_reference(text.strip())
    parts = [read_part(word, original) for word in split_parts(body)]
    if not parts:
        raise unreadable(original)
    if is_line and not is_bracketed:
        refuse_several(body, parts)
    return reading_of(parts, original)


def is_letter(text: str) -> bool:
    """Whether a text stands for a residue, or for what may be in its place: A, Ala, Ter, -."""
    return text in MEANING or text in SIGNS


# ---- how a text is taken apart ----

def spellings(name):
    return name.title(), name.upper(), name.lower()


def meanings():
    """{text: letter or sign} of all texts of letters that stand for a residue or a stop."""
    meaning = {letter: letter for letter in AMINO_ACIDS}
    for letter, name in zip(AMINO_ACIDS, NAMES):
        meaning |= dict.fromkeys(spellings(name), letter)
    for name in ("Ter", "Stop"):
        meaning |= dict.fromkeys(spellings(name), STOP_SIGN)
    for name in ("Xaa", "Asx", "Glx", "Xle", "Sec", "Pyl"):
        meaning |= dict.fromkeys(spellings(name), UNKNOWN_SIGN)
    return meaning | dict.fromkeys(["X", *RARE], UNKNOWN_SIGN)


MEANING = meanings()
RESIDUE = "|".join(sorted(MEANING, key=len, reverse=True))      # Ter before T
NUMBER = "-?[0-9]+[A-Za-z]?"
PLACE = rf"(?:{RESIDUE}|\*)?[A-Za-z]?-?[0-9]+"          # G1, GA1 with the chain, 1
CHANGE = "(delins|del|delta|Δ|ins|dup|fs|ext)"
# Group 1: the chain of A.G1A, or of A@G1A, which stands for A:G1A. c.G35A is of DNA.
OPEN = r"\(?(?:(?![cgmnpr]\.)([A-Za-z0-9])[.@])?(?:p\.)?\(?"

SUBSTITUTION = re.compile(f"([{AMINO_ACIDS}])({NUMBER})([{AMINO_ACIDS}])")
# Groups: chain before a point, wild type, chain within, number, mutant.
PART = re.compile(
    rf"{OPEN}({RESIDUE}|\*)([A-Za-z])?({NUMBER})(?:->|[→>])?({RESIDUE}|\?\?\?|[=*?-])\)?")
# G1del, G1_W3del, R97Pfs*23, *110Qext*17; delF508, insG16. Group 2 or 3: the change.
NO_SUBSTITUTION = re.compile(
    rf"{OPEN}(?:{PLACE}(?:_{PLACE})?(?:{RESIDUE})?{CHANGE}(?![a-z])[\w*?()\[\]-]*|{CHANGE}_?{PLACE}\w*)")
# NP_000123.1:p.Gly1Ala; ANNOVAR writes KRAS:NM_004985:exon2:c.G35A:p.G12D, and ClinVar
# NM_000546.6(TP53):c.524G>A (p.Arg175His)
REFERENCE = re.compile(
    r"((?:[\w.()-]{3,}:|[cgmnr]\.[^\s:]+:)+)(?:c\.\S+ \()?(?=p\.)")
OF_DNA = re.compile(r"(?:.*[\s:(])?[cgmnr]\.")
BRACKETS = re.compile(r"(?:p\.)?\[([^\[\]]*)\]")        # p.[Gly1Ala;Trp2Phe]
CHAIN_AND_COLON = re.compile(r"(?<![^\s,;+/&|_:([-])([A-Za-z0-9]):")      # A:G1A


class Part(NamedTuple):
    """One mutation of a text, of any kind."""
    chain: str
    mutation: Mutation | None
    kind: str               # "": a substitution


def kind_of_word(text):
    """The kind of a text that is one of the known words; "" for another."""
    word = text.strip().lower()
    if word in WILD_TYPE_WORDS:
        return WILD_TYPE
    if word in UNKNOWN_WORDS:
        return UNKNOWN
    if word in UNCHANGED_WORDS:
        return UNCHANGED
    if is_no_value(word):
        return EMPTY
    return ""


def without_reference(text):
    """(the text without what names its sequence, and without brackets; whether there were any)."""
    reference = REFERENCE.match(text)
    if reference and not any(map(is_part, split_parts(reference[1]))):
        text = text[reference.end():]
    brackets = BRACKETS.fullmatch(text)
    if brackets:
        return brackets[1], True
    return text, False


def is_part(word):
    """Whether a word is a mutation, of any kind."""
    return bool(PART.fullmatch(word) or NO_SUBSTITUTION.fullmatch(word))


def split_parts(text):
    """The words of the mutations. An underscore and a minus may stand within one (G1_W3del, A-3V),
    too."""
    text = CHAIN_AND_COLON.sub(r"\1@", text)
    parts = []
    for word in re.split(r"[\s:,;+/&|]+", text):
        if NO_SUBSTITUTION.fullmatch(word):
            parts.append(word)
        else:
            parts += re.split(r"_|-(?=[A-Za-z*(])", word)
    return [part for part in parts if part]


def read_part(word, text):
    """The Part of a word. text: all of it, for the message. Raises: UnreadableVariant."""
    other = NO_SUBSTITUTION.fullmatch(word)
    if other:
        return Part(other[1] or "", None, CHANGES[other[2] or other[3]])
    found = PART.fullmatch(word)
    if not found:
        raise unreadable(text)
    before, wild_type, within, number, mutant = found.groups()
    if before and within and before != within:
        raise unreadable(text)
    chain = before or within or ""
    mutation = Mutation(meaning_of(wild_type), number, meaning_of(mutant), chain)
    return Part(chain, mutation, kind_of(mutation))


def meaning_of(text):
    """The letter or sign of a text that is_letter."""
    return MEANING.get(text, text)


def kind_of(mutation):
    """The kind of one that is no substitution; "" for a substitution."""
    if mutation.mutant == GAP:
        return DELETION
    if STOP_SIGN in (mutation.wild_type, mutation.mutant):
        return STOP
    if mutation.mutant in (SILENT_SIGN, mutation.wild_type):
        return UNCHANGED
    if not (mutation.wild_type in AMINO_ACIDS and mutation.mutant in AMINO_ACIDS):
        return UNKNOWN
    return ""


def refuse_several(body, parts):
    """ValueError for a line that may mean several variants: blanks, commas and semicolons
    separate both these and the mutations of one. Where each mutation names its chain, commas are
    those of one variant if FoldX closes it by a semicolon, or if there are several chains."""
    inner = body.strip(" \t,;")
    chains = {part.chain for part in parts}
    is_joined = "" not in chains and (body.endswith(";") or len(chains) > 1)
    separators = r"[\s;]" if is_joined else r"[\s,;]"
    if re.search(separators, inner):
        joined = ":".join(re.split(r"[\s,;]+", inner))
        raise ValueError(f"found {body:.40}, which may be several variants; expected one "
                         f"per line, or {joined:.40} for one with all these mutations")


def reading_of(parts, text):
    """The Reading of the parts of a text. Raises: ValueError for a residue that is named twice;
    but of variants in several chains SKEMPI has some with a mutation that comes twice."""
    kinds = {part.kind for part in parts}
    for kind in (FRAMESHIFT, INSERTION, DELETION, STOP, UNKNOWN):
        if kind in kinds:
            return Reading(left_out=kind)
    several_chains = len({part.chain for part in parts} - {""}) > 1
    different = list(dict.fromkeys(parts)) if several_chains else parts
    mutations = tuple(part.mutation for part in different if not part.kind)
    silent = tuple(part.mutation for part in different if part.kind)
    if not mutations:
        return Reading(left_out=UNCHANGED)
    if len({(part.chain, part.mutation.number) for part in different}) < len(different):
        raise ValueError(f"found {text!r:.60}; expected each mutation of another residue")
    return Reading(mutations, silent, n_repeated=len(parts) - len(different))


def unreadable(text):
    of_dna = ", which is of DNA or RNA" if OF_DNA.match(text) else ""
    return UnreadableVariant(f"found {text!r:.60}{of_dna}")

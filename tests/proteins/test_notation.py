"""proteins/notation.py: forms in which people write variants, and which of these are none."""

import re

import pytest

from launchers import ROOT
from proteins.notation import (
    DELETION,
    EMPTY,
    FRAMESHIFT,
    INSERTION,
    PLURALS,
    STOP,
    UNCHANGED,
    UNKNOWN,
    WILD_TYPE,
    UnreadableVariant,
    read_variant,
)


def texts(reading):
    """The mutations without their chains."""
    return [str(mutation._replace(chain="")) for mutation in reading.mutations]


def chains(reading):
    return [mutation.chain for mutation in reading.mutations]


def forms_of_the_page():
    """[(text, what it is read as)] of the table of forms in docs/tables.md."""
    section = (ROOT / "docs" / "tables.md").read_text().partition("| written | read as |\n")[2]
    table = section.partition("\n\n")[0]
    forms = []
    for line in table.splitlines()[1:]:
        written, meaning = re.split(r"(?<!\\)\|", line)[1:3]
        for text in re.findall("`([^`]*)`", written):
            forms.append((text.replace(r"\|", "|"), meaning.strip()))
        if "an empty cell" in written:
            forms.append(("", meaning.strip()))
    return forms


@pytest.mark.parametrize("text, meaning", forms_of_the_page())
def test_a_form_in_the_docs_is_read_as_they_say(text, meaning):
    reading = read_variant(text)
    if meaning in PLURALS:
        assert reading.left_out == meaning and not reading.mutations
        return
    assert not reading.left_out
    assert bool(reading.silent) == ("silent" in meaning)
    expected = re.findall("in chain (.)", meaning) or [""]
    assert list(dict.fromkeys(chains(reading))) == expected
    if meaning.startswith("residue"):
        (_, number, *_), = reading.mutations
        assert f"residue {number}" in meaning.split(", ")
    else:
        assert texts(reading) == ":".join(re.findall("`([^`]*)`", meaning)).split(":")


def test_the_docs_have_a_form_of_each_kind():
    assert set(PLURALS) <= {meaning for _, meaning in forms_of_the_page()}


@pytest.mark.parametrize("text, expected", [
    ("K-12R", ["K-12R"]), ("K-1AR-D5E", ["K-1AR", "D5E"]), ("Lys-12Arg", ["K-12R"]),
    ("T100aA", ["T100aA"]), ("Lys52BArg", ["K52BR"]), ("K12ASP", ["K12D"]),
    ("C3S-K4E-D5N", ["C3S", "K4E", "D5N"]), ("C3S__K4E", ["C3S", "K4E"]),
    ("C3S | K4E", ["C3S", "K4E"]), (";C3S;;K4E;", ["C3S", "K4E"]),
    ("cys3ser", ["C3S"]), ("Cys3S", ["C3S"]), ("C3Ser", ["C3S"]),
    ("p.Cys3Ser_Lys4Glu", ["C3S", "K4E"]), ("p.[(Cys3Ser;Lys4Glu)]", ["C3S", "K4E"]),
    ("p.Cys3Ser;p.Lys4Glu", ["C3S", "K4E"]), ("C3S:p.Lys4Glu", ["C3S", "K4E"]),
    ("K\u22123R", ["K-3R"]), ("C3S\u2212K4E", ["C3S", "K4E"]), ("C3S\u2013K4E", ["C3S", "K4E"]),
    ("C3\u2192S", ["C3S"]), ("C3>S", ["C3S"]), ("Cys3->Ser", ["C3S"]), ("K-3->R", ["K-3R"]),
    ("c.G35A:p.G12D", ["G12D"]), ("c.35G>A:p.G12D", ["G12D"]),
    ("KRAS:NM_004985:exon2:c.G35A:p.G12D", ["G12D"]),
    ("C3S_D5N:p.Lys4Glu", ["C3S", "D5N", "K4E"]), ("C3S:D5N:p.Lys4Glu", ["C3S", "D5N", "K4E"]),
    ("P04637:p.R175H", ["R175H"]),
    ("ENSP00000269305.4:p.(Arg175His)", ["R175H"]),
    ("NM_000546.6(TP53):c.524G>A (p.Arg175His)", ["R175H"])])
def test_variants_of_several_notations(text, expected):
    assert texts(read_variant(text)) == expected


@pytest.mark.parametrize("text, chain, expected", [
    ("CH3S", "H", ["C3S"]), ("CH-3S", "H", ["C-3S"]), ("LI38aG", "I", ["L38aG"]),
    ("Ch3S", "h", ["C3S"]), ("H:C3S,H:K4E", "HH", ["C3S", "K4E"]), ("2:C3S", "2", ["C3S"]),
    ("H.C3S_H.K4E", "HH", ["C3S", "K4E"]), ("H:C3S,L:K4E", "HL", ["C3S", "K4E"]),
    ("CH3S:KL4E", "HL", ["C3S", "K4E"]), ("CH3S,CL3S;", "HL", ["C3S", "C3S"]),
    ("H.C3S_L.K4E", "HL", ["C3S", "K4E"]), ("H:C3S:L:K4E", "HL", ["C3S", "K4E"]),
    ("A:C3S,B:K4K", "A", ["C3S"]), ("H:p.Cys3Ser", "H", ["C3S"]),
    ("CL3S:KL4K;", "L", ["C3S"]), ("c:C3S", "c", ["C3S"]), ("p:C3S", "p", ["C3S"])])
def test_each_mutation_may_name_its_chain(text, chain, expected):
    reading = read_variant(text)
    assert ("".join(chains(reading)), texts(reading)) == (chain, expected)


@pytest.mark.parametrize("text", ["H:C3S:K4E", "CH3S,K4E", "K4E,H:C3S"])
def test_a_mutation_that_names_no_chain_does_not_take_that_of_another(text):
    assert sorted(chains(read_variant(text))) == ["", "H"]


@pytest.mark.parametrize("text, kind", [
    ("Wild Type", WILD_TYPE), ("WILDTYPE", WILD_TYPE), ("p.(=)", WILD_TYPE),
    ("C3C:K4K", UNCHANGED), ("C3=", UNCHANGED), ("CH3C", UNCHANGED),
    ("C3S:K4*", STOP), ("*90Q", STOP), ("p.Ter90Gln", STOP), ("C3stop", STOP),
    ("C3S:K4del", DELETION), ("C3_K5del", DELETION), ("delF508", DELETION), ("ΔF508", DELETION),
    ("p.(Cys3_Lys5delinsTrp)", DELETION), ("C3S:D5-", DELETION), ("CH3del", DELETION),
    ("ins_A30", INSERTION), ("C3_K4insGG", INSERTION), ("p.Cys3_Lys5dup", INSERTION),
    ("C3fs", FRAMESHIFT), ("C3Sfs*12", FRAMESHIFT), ("p.Ter90GlnextTer17", FRAMESHIFT),
    ("X3S", UNKNOWN), ("C3U", UNKNOWN), ("C3?", UNKNOWN), ("p.0", UNKNOWN), ("C3S:K4X", UNKNOWN),
    ("N/A", EMPTY), ("NaN", EMPTY), ("n.d.", EMPTY)])
def test_what_is_no_substitution_has_a_kind(text, kind):
    reading = read_variant(text)
    assert reading.left_out == kind and not reading.mutations


@pytest.mark.parametrize("text", [
    "C3", "3S", "S", "c3s", "ch3s", "C3S4", "C3-S", "C 3 S", "C(3)S", "C3S:K4", "C3:K4E",
    "C3_0S", "1_0", "C\u0663S", "C\uff13S", "C\u00b3S", "=3S", "-3S", "?3S", "J3", "mutation",
    "C3S (het)", "wild types", "WT:C3S", "Abc3Ser", "C3extra", "C3S:K4Delta5", "c.524G>A",
    "p.[Cys3Ser];[Lys4Glu]", "p.[Cys3Ser(;)Lys4Glu]", "C3S:C3S", "C3S:C3A", "C3S:C3C", "0.5",
    "A:C3S,A:C3D", "CA3S,CA3C", "A:CB3S"])
def test_what_is_in_no_form_is_refused_with_its_text(text):
    with pytest.raises(ValueError) as caught:
        read_variant(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["c.G35A", "c.35G>A", "NM_1.1:c.G35A", "g.G35A", "m.G35A",
                                  "n.G35A", "r.(10g>a)"])
def test_a_change_of_dna_or_rna_is_told_from_a_mutation_in_a_chain(text):
    with pytest.raises(UnreadableVariant, match="DNA or RNA"):
        read_variant(text)


def test_a_refusal_shows_the_signs_of_the_text():
    with pytest.raises(UnreadableVariant, match="found 'C\u2192S'"):
        read_variant("C\u2192S")


@pytest.mark.parametrize("line", ["C3S, K4E", "C3S K4E", "C3S;K4E", "C3S,K4E;", "CA3S;KA4E;",
                                  "CA3S KA4E;", "CA3S,KA4E", "WA3S:W, K4E"])
def test_a_line_of_a_list_that_may_be_several_variants_is_refused(line):
    with pytest.raises(ValueError):
        read_variant(line, is_line=True)


@pytest.mark.parametrize("line", ["C3S:K4E", "C3S_K4E,", "C3S-K4E", "p.[Cys3Ser;Lys4Glu]",
                                  "CA3S,KA4E;", "NP_1.6:p.[Cys3Ser;Lys4Glu]"])
def test_a_line_of_a_list_that_can_only_be_one_variant_is_read(line):
    assert texts(read_variant(line, is_line=True)) == ["C3S", "K4E"]

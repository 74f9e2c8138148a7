"""README.md and docs/: links lead somewhere, the index is whole, the first page stays short."""

import re

import pytest

from launchers import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def without_code(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_to_files_and_headings_that_are_there(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page))
             if "://" not in link]
    dead = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_configs_that_are_there(page):
    named = set(re.findall(r"\b((?:sedd|dpo|mpnn)\w*\.yaml)", page.read_text()))
    assert named <= {path.name for path in (ROOT / "configs").glob("*.yaml")}


def test_the_pages_that_files_name_are_there():
    named = {page for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("configs/*"),
                               *ROOT.glob("jobs/**/*.*sh"), *ROOT.glob("jobs/*.pbs")]
             if ".venv" not in path.parts for page in re.findall(r"docs/\w+\.md", path.read_text())}
    assert len(named) > 5 and [page for page in named if not (ROOT / page).exists()] == []


def test_the_index_has_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    assert [page.name for page in PAGES[1:] if page.name != "index.md"
            and f"({page.name})" not in index] == []


def test_the_first_page_fits_200_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_the_pictures_weigh_less_than_150_kilobytes_together():
    pictures = list((ROOT / "docs" / "pictures").iterdir())
    assert pictures and sum(path.stat().st_size for path in pictures) < 150_000

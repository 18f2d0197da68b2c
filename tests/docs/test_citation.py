"""CITATION.cff is of this version and names the paper; README's links lead somewhere."""

import re
from pathlib import Path

import yaml

import letkd

ROOT = Path(__file__).parents[2]


def test_the_citation_is_of_this_version_and_names_the_paper():
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cff["cff-version"] == "1.2.0"
    assert cff["version"] == letkd.__version__
    assert {"message", "title", "authors"} <= cff.keys()
    paper = cff["preferred-citation"]
    assert paper["title"] in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert [author["family-names"] for author in paper["authors"]] == ["Görgün", "Gürbüz", "Alatan"]
    assert "Görgün, Gürbüz, Alatan" in letkd.methods.LetKD.paper


def test_the_changelog_begins_with_this_version():
    assert re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[1] == letkd.__version__


def test_links_lead_somewhere():
    pages = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    found = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))]
    assert found
    assert not [(page, link) for page, link in found if not (ROOT / link).exists()]

"""docs/models.md is what the zoo is."""

from pathlib import Path

import pytest

from letkd.report.model_cards import as_markdown

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_page_is_current():
    page = (ROOT / "docs" / "models.md").read_text()
    assert page == as_markdown(), "run: python -m letkd.report.model_cards > docs/models.md"

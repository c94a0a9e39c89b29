"""docs/configuration.md agrees with the schema."""

from running import ROOT

from lm.config.reference import page


def test_the_configuration_page_is_current():
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == page(), "run: python -m lm.config.reference > docs/configuration.md"

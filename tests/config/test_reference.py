"""docs/configuration.md agrees with the schema."""

import re

from running import ROOT

from lm.config import schema
from lm.config.reference import GROUPS, page


def test_the_configuration_page_is_current():
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == page(), "run: python -m lm.config.reference > docs/configuration.md"


def test_every_row_of_a_table_has_three_cells_and_no_html_tags():
    """Special tokens in descriptions, such as <|endoftext|>, must not end a cell or disappear as a
    tag.
    """
    rows = [line for line in page().splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}
    assert not re.search(r"<\w+>", page())


def test_every_group_begins_with_a_key():
    assert GROUPS.keys() <= schema().keys()

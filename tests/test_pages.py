"""The tables of the results pages are what the records say. `pytest tests/test_pages.py`"""

import re

from common import ROOT

from tools import tables

PAGES = sorted((ROOT / "results").glob("*/README.md"))


def test_tables_are_written_from_the_records():
    """After a change: python -m tools.tables. Each table is on one page, and each record is named on its page."""
    text = "".join(path.read_text() for path in PAGES)
    assert tables.written(text) == text
    assert sorted(re.findall(r"<!-- table (.*?) -->", text)) == sorted(tables.TABLES)
    for path in (ROOT / "results").glob("*/*"):
        assert path.name == "README.md" or f"]({path.name})" in (path.parent / "README.md").read_text(), path

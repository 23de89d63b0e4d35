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


def test_means_by_hand(tmp_path, monkeypatch):
    """Two seeds, and a figure that one of them lacks."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "r.jsonl").write_text(
        '{"system": "base", "row": "all", "seed": 1, "bits": 2.0, "ms": 3}\n'
        '{"system": "base", "row": "all", "seed": 2, "bits": 2.5}\n'
    )
    found = tables.of_records("r.jsonl", {"bits": ("bits", 2), "ms": ("ms", 0)}, "bits")
    assert found == [["", "bits", "seeds 1, 2", "ms"], ["base: all", "2.25", "2.00 2.50", "3"]]

"""The table of docs/attention.md is what docs/attention_table.py prints."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.te

DOCS = Path(__file__).parents[2] / "docs"


def test_page_has_the_table_that_the_code_gives():
    spec = importlib.util.spec_from_file_location("attention_table", DOCS / "attention_table.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (DOCS / "attention.md").read_text(encoding="utf-8")
    _, begin, rest = page.partition("<!-- table -->\n\n")
    written, end, _ = rest.partition("\n\n<!-- end of table -->")
    assert begin
    assert end
    assert written == script.table()

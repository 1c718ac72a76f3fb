"""The page on inspection: its code runs, and prints what the page says."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "inspect.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_every_example_prints_what_the_page_says():
    assert len(EXAMPLES) == PAGE.read_text().count("```python") == 4
    names: dict = {}
    for code, expected in EXAMPLES:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "model.py", "exec"), names)
        assert printed.getvalue() == expected

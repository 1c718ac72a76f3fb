"""`tools.docs_types` makes modules of pages that mean what the page means; `make types` runs the checkers on them."""

import ast
import textwrap

from tools import docs_types

PAGE = textwrap.dedent(
    """\
    # One

    ```python
    import math
    # A comment is no heading.
    radius = 2.0
    ```

    ## Two

    ```python
    def area(radius):
        return math.pi * radius**2
    area(radius)
    ```

    ## Three

    ```python
    radius = "wide"

    def area(name):
        return name
    area(radius)
    ```
    """
)


def test_a_section_is_a_module_with_what_it_uses_of_those_before():
    one, two, three = docs_types.modules(PAGE, None, "page").values()
    assert "import" not in one.split("\n")[1] and one.split("\n")[5] == "radius = 2.0"
    assert two.split("\n")[1] == "from page_0 import math as math; from page_0 import radius as radius; "
    assert three.split("\n")[1] == ""  # It binds both anew.
    assert two.split("\n").index("area(radius)") == 13 and three.split("\n").index('radius = "wide"') == 19


def test_public_names_are_all_those_of_jamp():
    lines = docs_types.public_names().splitlines()
    assert {"jamp.cast_fn", "jamp.Policy.with_rules", "jamp.MixedPrecision.value_and_grad"} <= set(lines)


def test_all_pages_become_modules():
    found = docs_types.programs()
    assert {page for page, _ in found.values()} >= {"README.md", "docs/faq.md", "docs/moving/pytorch.md"}
    for _, code in found.values():
        ast.parse(code)

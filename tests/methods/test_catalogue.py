"""Every row of the catalogue of errors: raised at its moment, or supported by a test that exists."""

import ast
import functools
from pathlib import Path

import catalogue
import catalogue_configs  # noqa: F401  declares rows
import catalogue_layers  # noqa: F401
import pytest

HERE = Path(__file__).parent


@pytest.mark.usefixtures("references", "on_cpu")
@pytest.mark.parametrize("row", catalogue.RAISES, ids=lambda row: row.prepare.__name__)
def test_raises(row):
    act = row.prepare()  # nothing is said before the moment
    with pytest.raises(row.error, match=row.says) as caught:
        act()
    assert type(caught.value) is row.error  # the class itself: callers of ValueError do not catch its subclasses


def test_rows_are_told_apart():
    names = [row.prepare.__name__ for row in catalogue.RAISES]
    assert len(set(names)) == len(names) and {row.when for row in catalogue.RAISES} == set(catalogue.MOMENTS)
    conditions = [row.condition for row in [*catalogue.RAISES, *catalogue.SUPPORTS]]
    assert len(set(conditions)) == len(conditions)


@functools.cache
def functions(file: str) -> dict[str, str]:
    text = (HERE / file).read_text()
    return {
        n.name: ast.get_source_segment(text, n) or "" for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)
    }


@pytest.mark.parametrize("row", catalogue.SUPPORTS, ids=lambda row: row.condition)
def test_supports(row):
    """The test that a row names exists and asserts."""
    file, _, name = row.test.partition("::")
    assert name in functions(file), f"{row.condition}: no {row.test}"
    assert "assert" in functions(file)[name], row.test


def test_the_table_is_the_catalogue():
    assert catalogue.TABLE.read_text() == catalogue.text(), "write it: python tests/methods/catalogue.py"

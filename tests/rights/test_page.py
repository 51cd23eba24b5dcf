"""docs/security.md has the table of rights as it is."""

from tests.rights.page import PAGE, PART, ROLES, renewed


def test_the_page_is_fresh() -> None:
    page = PAGE.read_text()
    assert len(PART.findall(page)) == 2
    assert page == renewed(page), "python -m tests.rights.page writes it"


def test_no_right_stands_twice() -> None:
    every = [(role, right[:3]) for role, found in ROLES.items() for right in found]
    assert len(every) == len(set(every))

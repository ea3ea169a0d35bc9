"""The pool against a plain set of numbers, and its audit against damage."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samir_vllm.errors import InvariantError
from samir_vllm.page_pool import FRESH, PagePool


@settings(max_examples=100, deadline=None)
@given(
    num_pages=st.integers(0, 40),
    actions=st.integers(0, 40).flatmap(
        lambda n: st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 15)), min_size=n, max_size=n)
    ),
)
def test_pages_are_where_a_set_says(num_pages: int, actions: list[tuple[str, int]]) -> None:
    """Each action gives pages to an owner without any, or takes back those it has."""
    pool = PagePool(num_pages)
    free, owned = set(range(num_pages)), {}
    for owner, count in actions:
        assert pool.is_owner(owner) == (owner in owned)
        if owner in owned:
            pool.free(owner)
            free |= owned.pop(owner)
        elif count > len(free):
            with pytest.raises(InvariantError, match=f"{len(free)} pages free"):
                pool.allocate(owner, count)
        else:
            pages = pool.allocate(owner, count)
            assert pages.dtype == np.int32
            owned[owner] = set(pages.tolist())
            assert len(owned[owner]) == count
            assert owned[owner] <= free
            free -= owned[owner]
        assert pool.num_free == len(free)
        assert pool.num_used == num_pages - len(free)
        pool.check_integrity()


@settings(max_examples=200, deadline=None)
@given(
    num_pages=st.integers(1, 12),
    num_others=st.integers(0, 6),
    num_old=st.integers(1, 8),
    source=st.one_of(
        st.permutations([*range(5), *[FRESH] * 5]).map(lambda places: places[:6]),
        st.lists(st.integers(-2, 8), max_size=10),
    ),
)
def test_a_transfer_puts_pages_where_a_list_says(
    num_pages: int, num_others: int, num_old: int, source: list[int]
) -> None:
    """Kept ones in their places, fresh ones from what is free by then; or a refusal that changes nothing."""
    pool = PagePool(num_pages)
    if num_others + num_old > num_pages:
        return
    others = set(pool.allocate("others", num_others).tolist()) if num_others else set()
    old = pool.allocate("old", num_old).tolist()
    kept = [i for i in source if i != FRESH]
    allowed = source and sorted(set(kept)) == sorted(kept) and set(kept) <= set(range(num_old))
    if not allowed or len(source) + num_others > num_pages:
        with pytest.raises(InvariantError, match="'old'"):
            pool.transfer("old", ("new", 1), np.array(source, np.int64))
        assert pool._owned["old"].tolist() == old
        assert pool.num_used == num_old + num_others
    else:
        pages = pool.transfer("old", ("new", 1), np.array(source, np.int64))
        assert pages.dtype == np.int32
        assert len(set(pages.tolist())) == len(source)
        for page, index in zip(pages.tolist(), source, strict=True):
            assert page == old[index] if index != FRESH else page not in others
        assert not pool.is_owner("old")
        assert pool.num_used == len(source) + num_others
        pool.check_integrity()
        pool.free(("new", 1))
    pool.check_integrity()


@pytest.mark.parametrize(("owner", "new_owner"), [("nobody", "new"), ("a", "b"), ("a", "a")])
def test_a_transfer_is_from_an_owner_to_one_without_pages(owner: str, new_owner: str) -> None:
    pool = PagePool(8)
    pool.allocate("a", 3)
    pool.allocate("b", 3)
    with pytest.raises(InvariantError, match=f"'{owner}'.*'{new_owner}'"):
        pool.transfer(owner, new_owner, np.array([0]))
    assert pool.num_free == 2
    assert pool.is_owner("a")
    pool.check_integrity()


@pytest.mark.parametrize("source", [[0, -2], [0, 3], [0, 1, 0], []])
def test_a_transfer_names_pages_that_are_there_once(source: list[int]) -> None:
    pool = PagePool(8)
    pool.allocate("old", 3)
    with pytest.raises(InvariantError, match="'old'"):
        pool.transfer("old", "new", np.array(source, np.int64))
    assert pool.is_owner("old")
    assert pool.num_free == 5


def test_a_transfer_may_use_the_pages_that_it_frees_and_no_more() -> None:
    pool = PagePool(8)
    pool.allocate("others", 3)
    pool.allocate("old", 3)
    with pytest.raises(InvariantError, match="5 fresh pages, but 2 pages free and 2 given back"):
        pool.transfer("old", "new", np.array([1, *[FRESH] * 5]))
    assert pool.is_owner("old")
    assert pool.num_free == 2
    assert len(pool.transfer("old", "new", np.array([1, *[FRESH] * 4]))) == 5
    assert pool.num_free == 0
    pool.check_integrity()


def test_given_pages_stay_the_same() -> None:
    """The scheduler keeps the array; no later traffic may write to it."""
    pool = PagePool(8)
    pages = pool.allocate("a", 3)
    before = pages.copy()
    pool.allocate("b", 2)
    pool.free("b")
    pool.free("a")
    pool.allocate("c", 8)
    assert (pages == before).all()


def test_an_owner_has_pages_once() -> None:
    pool = PagePool(8)
    pool.allocate("a", 3)
    with pytest.raises(InvariantError, match=r"'a'.*already has pages"):
        pool.allocate("a", 1)
    pool.free("a")
    with pytest.raises(InvariantError, match="'a'"):
        pool.free("a")
    pool.check_integrity()
    assert pool.num_free == 8


def _lose(pool: PagePool) -> None:
    del pool._owned["a"]


def _own_twice(pool: PagePool) -> None:
    pool._owned["b"] = pool._owned["a"]


def _free_while_owned(pool: PagePool) -> None:
    pool.num_free += 1


def _free_too_many(pool: PagePool) -> None:
    del pool._owned["a"]
    pool.num_free += 4


def _outside(pool: PagePool) -> None:
    pool._owned["a"] = np.array([8], np.int32)


@pytest.mark.parametrize("damage", [_lose, _own_twice, _free_while_owned, _free_too_many, _outside])
def test_the_audit_sees_damage(damage: Callable[[PagePool], None]) -> None:
    pool = PagePool(8)
    pool.allocate("a", 3)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(InvariantError):
        pool.check_integrity()

"""The pool against a plain set of numbers, and its audit against damage."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samir_vllm.errors import InvariantError
from samir_vllm.page_pool import PagePool


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

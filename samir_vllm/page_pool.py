"""The shared pool of physical KV pages: a free list, ownership, and an audit of both.

A page is a number; what lies behind it (16 tokens of K and V of one layer) is the backend's business.
Knows no device, no layer, no sequence: an owner is a name, which may be anything hashable.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from samir_vllm.errors import InvariantError

FRESH = -1
"""In ``PagePool.transfer``: a page that was free, instead of one that changes its owner."""


class PagePool:
    """Hands out ``page_id``s ``0 ... num_pages - 1``; all pages of an owner come together and go together."""

    def __init__(self, num_pages: int) -> None:
        """An empty pool of ``num_pages`` pages (>= 0), all free."""
        self.num_pages = num_pages
        # A stack: the lower `num_free` entries are free. Filled downwards so that page 0 goes out first.
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = num_pages
        self._owned: dict[Hashable, np.ndarray] = {}

    @property
    def num_used(self) -> int:
        """Pages that have an owner."""
        return self.num_pages - self.num_free

    def allocate(self, owner: Hashable, count: int) -> np.ndarray:
        """Give ``count`` pages (>= 1) to ``owner``, in time that doesn't grow with the pool.

        Returns:
            int32 [count], the page ids. The caller must not write to the array.

        Raises:
            InvariantError: fewer pages are free, or the owner already has pages. Callers ask
                ``num_free`` first, so this is a bug and nothing a user can cause.
        """
        if count > self.num_free or owner in self._owned:
            raise InvariantError(
                f"allocate({owner!r}, {count}): {self.num_free} pages free, "
                f"owner {'already has pages' if owner in self._owned else 'has none'}"
            )
        pages = self._pop(count)
        self._owned[owner] = pages
        return pages

    def free(self, owner: Hashable) -> None:
        """Take back all pages of ``owner``.

        Raises:
            InvariantError: the owner has no pages (freed twice, or never allocated).
        """
        pages = self._owned.pop(owner, None)
        if pages is None:
            raise InvariantError(f"free({owner!r}): owns no pages")
        self._push(pages)

    def transfer(self, owner: Hashable, new_owner: Hashable, source: np.ndarray) -> np.ndarray:
        """Hand pages of ``owner`` on to ``new_owner``, in any order, free ones among them; free the rest.

        Args:
            owner: has pages, in the order in which it got them; afterwards it has none.
            new_owner: has none.
            source: for each page of the new owner, int [n]: which of the owner's it is (0 the first,
                none twice), or ``FRESH``.

        Returns:
            int32 [n], the page ids. The caller must not write to the array. The time grows with the pages
            of both, not with the pool.

        Raises:
            InvariantError: any of this doesn't hold, or too few pages are free. Nothing has changed.
        """
        old = self._owned.get(owner)
        kept = source[source != FRESH]
        num_fresh = len(source) - len(kept)
        if old is None or new_owner in self._owned or len(source) == 0:
            raise InvariantError(
                f"transfer({owner!r}, {new_owner!r}): the first has none, or the second has some"
            )
        if len(kept) and (kept.min() < 0 or kept.max() >= len(old)):
            raise InvariantError(f"transfer({owner!r}): indices outside 0 ... {len(old) - 1}: {kept}")
        leaves = np.ones(len(old), bool)
        leaves[kept] = False
        released = old[leaves]
        if len(released) + len(kept) != len(old):
            raise InvariantError(f"transfer({owner!r}): a page is to go to two places: {kept}")
        if num_fresh > self.num_free + len(released):
            raise InvariantError(
                f"transfer({owner!r}): {num_fresh} fresh pages, but {self.num_free} pages free "
                f"and {len(released)} given back"
            )
        pages = old[source]
        self._push(released)
        pages[source == FRESH] = self._pop(num_fresh)
        del self._owned[owner]
        self._owned[new_owner] = pages
        return pages

    def _pop(self, count: int) -> np.ndarray:
        """The ``count`` uppermost pages of the stack, int32 [count]."""
        pages = self._stack[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        return pages

    def _push(self, pages: np.ndarray) -> None:
        self._stack[self.num_free : self.num_free + len(pages)] = pages[::-1]
        self.num_free += len(pages)

    def is_owner(self, name: Hashable) -> bool:
        """Whether ``name`` has pages now."""
        return name in self._owned

    def check_integrity(self) -> None:
        """Audit: free + used = total, and every page has exactly one place.

        Raises:
            InvariantError: naming the first page that is lost or owned twice.
        """
        places = np.zeros(self.num_pages, np.int64)
        for pages in (self._stack[: self.num_free], *self._owned.values()):
            if len(pages) and (pages.min() < 0 or pages.max() >= self.num_pages):
                raise InvariantError(f"page ids outside 0 ... {self.num_pages - 1}: {pages}")
            np.add.at(places, pages, 1)
        wrong = np.flatnonzero(places != 1)
        if len(wrong):
            page = int(wrong[0])
            raise InvariantError(
                f"page {page} has {places[page]} places instead of 1 ({len(wrong)} such pages)"
            )
        used = sum(len(pages) for pages in self._owned.values())
        if used + self.num_free != self.num_pages:
            raise InvariantError(f"{self.num_free} free + {used} used != {self.num_pages} pages")

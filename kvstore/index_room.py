"""How much room is set aside for the index, told by its entries alone.

LMDB's file grows by single pages, as the order of keys and commits will have it. If what goes when hung on them, no model of the
store could tell what it does. So what counts is what is set aside here, as long as the file and its pages are within that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Measured: 130 to 180 bytes an entry, and some pages.
_RESERVED_ENTRY_BYTES: Final = 224
_RESERVED_BYTES: Final = 256 << 10
_RESERVED_SHARE: Final = 1 / 64  # of a small capacity
_ENTRIES_PER_LEAF: Final = 28  # measured: 35 in the middle, seldom less than 30
_LEAVES_PER_BRANCH: Final = 28
_DEPTH: Final = 4
_ENTRIES_PER_HALF_PAGE: Final = 32
_PAGES_BESIDE: Final = 4  # of the list of free pages and of the table of databases, written anew by each commit


@dataclass(frozen=True, slots=True)
class Tree:
    """Pages of a B+ tree, and how many lie above one another."""

    leaves: int
    branches: int
    depth: int

    @classmethod
    def assumed(cls, entries: int) -> Tree:
        """More pages than so many entries take, but after many were dropped."""
        leaves = -(-entries // _ENTRIES_PER_LEAF)
        return cls(leaves, -(-leaves // _LEAVES_PER_BRANCH), _DEPTH)


def reserved_bytes(entries: int, capacity_bytes: int) -> int:
    """Set aside for all files but segments. Args: entries: the most that there were."""
    return min(_RESERVED_BYTES, int(_RESERVED_SHARE * capacity_bytes)) + _RESERVED_ENTRY_BYTES * entries


def growth_pages(tree: Tree, changed: int, added: int = 0) -> int:
    """The most pages that a commit makes the file grow by which changes or drops so many entries and adds so many.

    Each entry may lie in another page. A page is never written in place, nor are those above it, and what that frees is used
    again two commits later. One that is added to may be full, and becomes two. Measured with keys in no order: hardly
    more than half of it while the index grows, and seldom anything once it has pages to use again.
    """
    leaves = min(changed + added, tree.leaves)
    branches = min(leaves * tree.depth, tree.branches)
    split = min(added, leaves) + added // _ENTRIES_PER_HALF_PAGE
    return leaves + branches + split + split // _ENTRIES_PER_HALF_PAGE + _PAGES_BESIDE

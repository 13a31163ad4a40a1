"""A radix tree over whole pages of tokens: structure only, no leases, no policy.

    namespace (by value)                      an edge is a run of pages:
      '- [t0 .. t7 | pages 4 5]                 tokens int32[num_pages * page_size]
           |- [t8 .. t11 | page 6]              pages  int32[num_pages]
           '- [u8 .. u15 | pages 10 11]       children by the bytes of their first page

A node stands for its edge and the place below it. Two children of a node differ in
their first page, so a descent looks up one key and makes one comparison an edge.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxkv.host.eviction import NOT_QUEUED
from jaxkv.host.namespace import Namespace


class Node:
    """One edge of the tree and the place below it; a namespace's root has no pages.

    Attributes:
      parent: the node above; None for a root.
      namespace: whose chain this is.
      tokens: token ids of the edge, int32[num_pages * page_size].
      pages: logical pages of the edge, int32[num_pages], owners cyclic.
      base: rotation base of the chain (owner of its page 0); -1 for a root.
      hashes: one a page where events are wanted, else empty.
      children: by the bytes of their first page's tokens.
      leases: leases on this node or below.
      created, last_used, num_uses, ticket: see `jaxkv.host.eviction.Leaf`.
    """

    __slots__ = (
        "base",
        "children",
        "created",
        "hashes",
        "last_used",
        "leases",
        "namespace",
        "num_uses",
        "pages",
        "parent",
        "ticket",
        "tokens",
    )

    def __init__(
        self,
        parent: "Node | None",
        namespace: Namespace,
        tokens: np.ndarray,
        pages: np.ndarray,
        base: int,
        created: int,
    ):
        self.parent = parent
        self.namespace = namespace
        self.tokens = tokens
        self.pages = pages
        self.base = base
        self.hashes: list[bytes] = []
        self.children: dict[bytes, Node] = {}
        self.leases = 0
        self.created = created
        self.last_used = created
        self.num_uses = 1
        self.ticket = NOT_QUEUED

    def path(self) -> Iterator["Node"]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Walk(NamedTuple):
    """Where a descent along some tokens ended."""

    node: Node | None  # the last node reached; None: the namespace has no pages
    inside: int  # pages of the node's edge that agree
    pages: np.ndarray  # int32[..] all pages that agree, from the chain's first


class RadixTree:
    """Roots by namespace, and the four changes that a tree of pages knows.

    Attributes:
      page_size: tokens a page.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._roots: dict[Namespace, Node] = {}

    def descend(self, tokens: np.ndarray, namespace: Namespace) -> Walk:
        """Follows int32 tokens of whole pages as far as the tree has them."""
        node = self._roots.get(namespace)
        inside = start = 0
        parts = [np.zeros(0, np.int32)]
        while node is not None and inside == node.pages.size and start < tokens.size:
            child = node.children.get(self._key(tokens[start:]))
            if child is None:
                break
            node = child
            inside = _common_prefix(node.tokens, tokens[start:]) // self.page_size
            start += inside * self.page_size
            parts.append(node.pages[:inside])
        return Walk(node, inside, np.concatenate(parts))

    def root(self, namespace: Namespace) -> Node:
        """A namespace's root, made if needed; `trim` removes it with its last page."""
        if namespace not in self._roots:
            empty = np.zeros(0, np.int32)
            self._roots[namespace] = Node(None, namespace, empty, empty, -1, 0)
        return self._roots[namespace]

    def attach(self, child: Node) -> None:
        """Hangs a new node below its parent, which has no child of the same key."""
        assert child.parent is not None
        child.parent.children[self._key(child.tokens)] = child

    def join(self, child: Node) -> None:
        """Undoes a split: an only child's edge takes in that of the node above it."""
        node = child.parent
        assert node is not None
        assert len(node.children) == 1
        child.parent = node.parent
        child.tokens = np.concatenate([node.tokens, child.tokens])
        child.pages = np.concatenate([node.pages, child.pages])
        child.hashes = node.hashes + child.hashes
        self.attach(child)
        node.parent, node.children = None, {}

    def split(self, node: Node, num_pages: int) -> Node:
        """Cuts an edge after some pages; returns the new node that ends there.

        The given node keeps the lower part, its children, and leases that end at it.
        """
        parent = node.parent
        assert parent is not None
        assert 0 < num_pages < node.pages.size
        num_tokens = num_pages * self.page_size
        upper = Node(
            parent,
            node.namespace,
            _view(node.tokens[:num_tokens]),
            _view(node.pages[:num_pages]),
            node.base,
            node.created,
        )
        upper.last_used = node.last_used
        upper.num_uses = node.num_uses
        upper.leases = node.leases
        upper.hashes, node.hashes = node.hashes[:num_pages], node.hashes[num_pages:]
        self.attach(upper)
        node.parent = upper
        node.tokens = _view(node.tokens[num_tokens:])
        node.pages = _view(node.pages[num_pages:])
        self.attach(node)
        return upper

    def trim(self, leaf: Node, num_pages: int) -> Node | None:
        """Takes a leaf's last pages out of the tree.

        Returns:
          The node at whose end the chain ends now: the leaf itself, the node above it
          if the leaf is gone, or None if that is the root.
        """
        assert not leaf.children
        parent = leaf.parent
        assert parent is not None
        keep = leaf.pages.size - num_pages
        if keep:
            leaf.tokens = _view(leaf.tokens[: keep * self.page_size])
            leaf.pages = _view(leaf.pages[:keep])
            del leaf.hashes[keep:]
            return leaf
        del parent.children[self._key(leaf.tokens)]
        if parent.parent is not None:
            return parent
        if not parent.children:
            del self._roots[parent.namespace]
        return None

    def _key(self, tokens: np.ndarray) -> bytes:
        return tokens[: self.page_size].tobytes()


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Leading elements in which two arrays agree."""
    size = min(left.size, right.size)
    differs = left[:size] != right[:size]
    first = int(differs.argmax())
    return first if differs[first] else size


def _view(part: np.ndarray) -> np.ndarray:
    """A part of an array, copied where a view would keep more than twice it alive."""
    whole = part.base
    if isinstance(whole, np.ndarray) and 2 * part.size < whole.size:
        return part.copy()
    return part

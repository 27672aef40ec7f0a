"""Head grouping: which axes of the operands are batch, KV heads and query heads of a group.

A grouped key reaches the product either broadcast (``repeat_kv``: expand and reshape; 5-D broadcast) or as it is, with
``enable_gqa``. Both are read from the traced axes: a broadcast axis inside the head axis is the group ``G``; head
counts come from shapes, never from a config.
"""

from __future__ import annotations

from ..graph import Atom, Dims, Size, ViewTrace, is_one, quotient, same
from ..ir import Mismatch


def refine(
    left: ViewTrace, left_atoms: list[Atom], right: ViewTrace, right_atoms: list[Atom]
) -> list[tuple[Atom, Atom]]:
    """Split the two lists of factors of one axis until they pair up; size-one factors pair with nothing and are
    dropped.

    Raises :class:`Mismatch` when the sizes cannot be aligned.
    """
    pairs: list[tuple[Atom, Atom]] = []
    a = [x for x in left_atoms if not is_one(x.size)]
    b = [x for x in right_atoms if not is_one(x.size)]
    while a and b:
        x, y = a.pop(0), b.pop(0)
        if same(x.size, y.size):
            pairs.append((x, y))
        elif (rest := quotient(x.size, y.size)) is not None:
            outer, inner = left.split(x, y.size, rest)
            a.insert(0, inner)
            pairs.append((outer, y))
        elif (rest := quotient(y.size, x.size)) is not None:
            outer, inner = right.split(y, x.size, rest)
            b.insert(0, inner)
            pairs.append((x, outer))
        else:
            raise Mismatch("batch and head axes of query and key do not line up")
    if a or b:
        raise Mismatch("batch and head axes of query and key do not line up")
    return pairs


def split_batch(query: ViewTrace, query_axis: list[Atom], key: ViewTrace, key_axis: list[Atom], batch_first: bool):
    """Roles of a merged batch axis (``bmm``): ``(query B, query H, key B, key N)`` as lists of atoms.

    With ``batch_first`` the outermost factor is the batch (also when its size is one); what follows are heads, of which
    the ones that are broadcast in the key form the group.
    """
    explicit = len(query_axis) > 1 or len(key_axis) > 1
    lead_query = bool(query_axis) and is_one(query_axis[0].size)
    lead_key = bool(key_axis) and is_one(key_axis[0].size)
    pairs = refine(query, query_axis, key, key_axis)
    batch: list[tuple[Atom, Atom]] = []
    if batch_first and pairs and not (explicit and (lead_query or lead_key)) and not _is_head(query, pairs[0][0]):
        batch = pairs[:1]
        pairs = pairs[1:]
    return (
        [q for q, _ in batch],
        [q for q, _ in pairs],
        [k for _, k in batch],
        group_heads([k for _, k in pairs]),
    )


def _is_head(query: ViewTrace, atom: Atom) -> bool:
    """Whether the outermost factor of a merged axis is a head, because the batch is of size one and was left out of it
    (``einsum`` does so).

    It is where it comes from the dim that holds the head dim too (``[.., H*D]``), or where an axis of size one stands
    before its own.
    """
    if atom.dim is None:
        return False
    inner = {a.dim for d in query.dims[-1:] for a in d if not is_one(a.size)}
    return atom.dim in inner or any(all(is_one(a.size) for a in d) for d in query.base_dims[: atom.dim])


def fold_batch(query: ViewTrace, key: ViewTrace, value: ViewTrace) -> tuple[Dims, Dims]:
    """Batch and head axes of 3-D operands ``[B*H, L, D]``: ``([query B, key B, value B], [query H, key N, value
    N])``."""
    refine(query, query.dims[0], value, value.dims[0])
    q_batch, q_heads, k_batch, k_heads = split_batch(query, query.dims[0], key, key.dims[0], batch_first=True)
    _, _, v_batch, v_heads = split_batch(query, query.dims[0], value, value.dims[0], batch_first=True)
    return [q_batch, k_batch, v_batch], [q_heads, k_heads, v_heads]


def split_rows(
    rows: list[Atom], heads: list[Atom], head_dim: list[Atom], written: Size | None
) -> tuple[list[Atom], list[Atom]]:
    """``(heads, tokens)`` among the factors of a query's row axis: grouped queries may be folded into it (``[B*N, G*L,
    D]``).

    A factor that comes from the same dim as the other heads or the head dim is a head; where no factor tells, the
    innermost are tokens. ``written``: how many tokens this call writes to a cache, if it does.
    """
    kept = [a for a in rows if not is_one(a.size)]
    if written is not None and is_one(written):
        return kept, [a for a in rows if a not in kept]
    if len(kept) < 2:
        return [], rows
    homes = {a.dim for a in (*heads, *head_dim) if not is_one(a.size)} - {None}
    folded = [a for a in kept if a.dim in homes]
    if not folded or len(folded) == len(kept):
        last = kept[-1].dim
        folded = [a for a in kept if a.dim != last]
    return folded, [a for a in rows if a not in folded]


def group_heads(axis: list[Atom]) -> list[Atom]:
    """The KV-head factors of a key's head axis: its broadcast (group) factors must be innermost. Raises
    :class:`Mismatch`."""
    heads = [a for a in axis if not is_one(a.size)]
    kept = [a for a in heads if not a.broadcast]
    if heads[: len(kept)] != kept:
        raise Mismatch("KV heads are tiled (h = g * N + n), not repeated in groups")
    return kept


def product(atoms: list[Atom]):
    """Size of an axis from its factors."""
    size = 1
    for atom in atoms:
        size = size * atom.size
    return size


def find_axis(dims: Dims, atom: Atom) -> int:
    """The dim that holds ``atom``, or -1."""
    return next((i for i, d in enumerate(dims) if atom in d), -1)

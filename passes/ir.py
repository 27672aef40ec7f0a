"""The records that passes hand to each other: what an attention site computes, freed of how the model spelled it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..kernels.index_expr import Modifier
from ..kernels.virtual import VIRTUAL_BUFFER
from .graph import Layout


class Mismatch(Exception):
    """A pattern does not hold here: why, and at which node. Caught by the matcher and reported as the nearest miss."""

    def __init__(self, reason: str, node: Node | None = None, depth: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node
        self.depth = depth


@dataclass(frozen=True)
class Operand:
    """A tensor of the graph and how its dims map to ``[B, S, N, D]`` (``layout``); ``factor`` multiplies it, ``dtype``
    rounds it."""

    node: Node
    layout: Layout
    factor: float = 1.0
    dtype: torch.dtype | None = None

    def read(self, get: Callable[[Node], Any]) -> Any:
        """The operand in ``[B, S, N, D]`` form; ``get`` gives a node's value (a tensor, or an FX proxy while
        rewriting)."""
        value = self.layout.to_roles(get(self.node))
        if self.factor != 1.0:
            value = torch.ops.aten.mul.Tensor(value, self.factor)
        if self.dtype not in (None, self.node.meta["val"].dtype):
            value = torch.ops.aten._to_copy.default(value, dtype=self.dtype)
        return value


@dataclass(frozen=True)
class Rotary:
    """``rotated = Rot(cos, sin) source`` on the first ``dim`` dims of each head, in the form named
    (``kernels.reference``)."""

    form: str
    source: Operand
    cos: Operand
    sin: Operand
    dim: int
    #: cos/sin hold one column per pair (complex spelling) rather than one per dim
    pairs: bool = False
    #: cos and sin are what copies of the graph's own rotation make of two keys (``match/carried.py``)
    carried: bool = False


@dataclass(frozen=True)
class CacheWrite:
    """A static buffer updated by this call: ``buffer[slots] = new`` and read whole by the site."""

    buffer: Node
    update: Node
    new: Node
    slots: Node
    #: slots are [L] (shared by the batch) or [B, L]
    slots_dim: int
    capacity: int
    #: how the buffer's dims map to [B, S, N, D]
    layout: Layout
    #: keys attended are ``buffer[:read]`` (a literal or a symbolic integer of the graph); None: the whole buffer
    read: Node | int | None = None
    #: ``copy_`` nodes that store the update back
    stores: tuple[Node, ...] = ()

    @property
    def virtual(self) -> bool:
        """Whether the buffer exists in the graph alone (``kernels/virtual.py``)."""
        return self.buffer.target is VIRTUAL_BUFFER

    @property
    def place(self) -> tuple[tuple[int, int], ...]:
        """Where in its graph input the buffer is: ``(dim, index)`` of each ``select``, outermost first; empty where it
        is the input itself."""
        path, node = [], self.buffer
        while node.target is torch.ops.aten.select.int:
            source, dim, index = node.args
            path.append((int(dim), int(index)))  # type: ignore[arg-type]
            node = source  # type: ignore[assignment]
        return tuple(reversed(path))

    @property
    def owner(self) -> Node:
        """The graph input that says which cache this is: the buffer, the pool that it is a part of, or a virtual
        buffer's handle."""
        node = self.buffer
        while node.target in (torch.ops.aten.select.int, VIRTUAL_BUFFER):
            node = node.args[0]  # type: ignore[assignment]
        return node


@dataclass(frozen=True)
class Projection:
    """The linear map that made the keys: ``k = norm(x) @ weight^T + bias``. Nodes are graph inputs (parameters)."""

    weight: Node
    bias: Node | None = None
    norm: Node | None = None
    #: output features (rows of ``[out, in]``) that make the keys, when the projection is fused
    rows: tuple[int, int] | None = None
    #: the weight is kept ``[in, out]`` (GPT-2's ``Conv1D``)
    transposed: bool = False
    #: the matrix product itself
    product: Node | None = None

    def read(self, weight: torch.Tensor) -> torch.Tensor:
        """The rows ``[out, in]`` of the weight's value that make the operand."""
        weight = weight.detach()
        weight = weight.T if self.transposed else weight
        return weight if self.rows is None else weight[self.rows[0] : self.rows[1]]


@dataclass(frozen=True)
class LowRankQuery:
    """A query projection to be factored (``low_rank_query.py``): the rank, the share of its outputs' variance that
    the rank keeps, and by what (``"calibration"`` or ``"weights"``).
    """

    projection: Projection
    rank: int
    retained: float
    source: str


@dataclass(frozen=True)
class AttentionSite:
    """One attention computation. ``query`` is rotated; ``key``/``value`` are the tokens of this call, or all of a call
    without cache."""

    name: str
    output: Node
    output_layout: Layout
    anchor: Node
    query: Operand
    key: Operand
    value: Operand
    scale: float
    modifier: Modifier
    modifier_tensors: tuple[Node, ...]
    modifier_integers: tuple[Node | int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    key_rotary: Rotary | None = None
    query_rotary: Rotary | None = None
    key_cache: CacheWrite | None = None
    value_cache: CacheWrite | None = None
    projection: Projection | None = None
    sink_logits: Node | None = None
    #: what a report should say of the rotation beside its form
    note: str = ""
    #: nodes of the dense computation, anchor to output, for reports
    interior: tuple[Node, ...] = ()

    @property
    def joint_width(self) -> int:
        """``E = N*D``."""
        return self.kv_heads * self.head_dim

    @property
    def key_pre(self) -> Operand:
        """The pre-rotary key (the key itself where nothing rotates it)."""
        return self.key if self.key_rotary is None else self.key_rotary.source

    @property
    def query_pre(self) -> Operand:
        """The pre-rotary query."""
        return self.query if self.query_rotary is None else self.query_rotary.source

    @property
    def rotary_form(self) -> str:
        return "none" if self.key_rotary is None else self.key_rotary.form

    @property
    def rotary_dim(self) -> int:
        return 0 if self.key_rotary is None else self.key_rotary.dim

    @property
    def batch_folded(self) -> bool:
        """Whether no batch axis was told apart from the heads (3-D operands): the heads then count as batch."""
        return self.heads == 1 and not self.query.layout.order[2]

    @property
    def cached(self) -> bool:
        return self.key_cache is not None

    @property
    def born(self) -> bool:
        """Whether the graph creates the cache itself and returns it."""
        return self.key_cache is not None and self.key_cache.owner.op != "placeholder"

    @property
    def virtual(self) -> bool:
        """Whether the cache has no dense buffers."""
        return self.key_cache is not None and self.key_cache.virtual


@dataclass(frozen=True)
class Declined:
    """A site left as it was: why, what would make it match, and the node that failed."""

    name: str
    anchor: str
    reason: str
    remedy: str = ""
    node: str = ""
    depth: int = 0


@dataclass
class SitePlan:
    """What becomes of one site: ``action`` is ``sals``, ``reconstruct``, ``exact`` or ``dense``."""

    site: AttentionSite
    action: str
    reason: str
    rank: int = 0
    score_rank: int = 0
    #: tokens attended per query
    budget: int = 0
    verified_error: float | None = None
    low_rank_query: LowRankQuery | None = None


@dataclass
class MatchResult:
    """What ``match`` found in a graph."""

    sites: list[AttentionSite] = field(default_factory=list)
    declined: list[Declined] = field(default_factory=list)


def module_path(node: Node) -> str:
    """The module that a node comes from (``model.layers.3.self_attn``), or the node's own name where none is
    recorded."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    entries: Sequence[Any] = list(stack.values())
    if not entries:
        return node.name
    path = entries[-1][0] if isinstance(entries[-1], (tuple, list)) else str(entries[-1])
    return clean_path(str(path)) or node.name


def clean_path(path: str) -> str:
    """Dynamo's spelling of a module (``L['args'][0]._modules['model'].layers['3']``) as the user knows it."""
    for prefix in ("L['self'].", "L['args'][0].", "L['fn'].", "L['self']", "L['args'][0]", "L['fn']"):
        if path.startswith(prefix):
            path = path[len(prefix) :]
            break
    for old, new in (("._modules['", "."), ("_modules['", ""), ("['", "."), ("']", ""), ("[", "."), ("]", "")):
        path = path.replace(old, new)
    return path.strip(".")

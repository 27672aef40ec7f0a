"""State: what an adopted KV cache holds besides its dense buffers, and what a model's sites have learnt (moments,
bases).

An :class:`AdoptedCache` belongs to one set of static KV buffers and is found again by their storage, so that the graphs
of prefill and decode share it, two caches of one model never mix, and it goes when the buffers go. A
:class:`SiteMemory` belongs to one attention site of one model and outlives caches.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .basis import Basis, factor_projection, pca, query_weighted, relative_rows, weights
from .config import SalsConfig
from .kernels import reference
from .passes.ir import AttentionSite, SitePlan
from .passes.rewrite import RowGroup, basis_fields

log = logging.getLogger("sals_compile")

BLOCK = reference.BLOCK

#: Distances, log-spaced up to the context, over which the query moment is averaged.
DISTANCES = 64


#: Why a cache of inference tensors stays dense.
UNWATCHED = (
    "the KV cache was created under torch.inference_mode(), whose tensors do not count writes, so writes by others "
    "could not be noticed; attention over it stays dense. Create the cache under torch.no_grad() instead."
)


def padded(capacity: int) -> int:
    """Slots of latent storage for ``capacity`` tokens: whole blocks."""
    return -(-capacity // BLOCK) * BLOCK


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's storage, as long as it lives."""
    return tensor.untyped_storage()._cdata


def buffer_key(tensor: Tensor) -> tuple[int, int]:
    """Identity of a KV buffer: its storage, and where in it (a pool holds the buffers of several layers)."""
    return storage_key(tensor), int(tensor.storage_offset())


class StorageDict:
    """A dictionary keyed by tensor storage; an entry, and what it alone refers to, goes with its storage."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, Any]] = {}

    def get(self, tensor: Tensor) -> Any:
        entry = self._entries.get(storage_key(tensor))
        if entry is None or entry[0].expired():
            return None
        return entry[1]

    def set(self, tensor: Tensor, value: Any) -> None:
        key, storage = storage_key(tensor), tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        entries = self._entries
        entries[key] = (reference, value)

        def forget() -> None:
            if key in entries and entries[key][0] is reference:
                del entries[key]

        weakref.finalize(storage, forget).atexit = False

    def values(self) -> list[Any]:
        """Entries whose storage lives."""
        return [v for ref, v in self._entries.values() if not ref.expired()]


@dataclass
class Rows:
    """Rotary rows by slot, shared by the sites of one row group (fields: ``kernels.reference``, section storage)."""

    cos: Tensor
    sin: Tensor
    block_cos: Tensor
    block_sin: Tensor
    ring_slots: Tensor

    @staticmethod
    def allocate(site: AttentionSite, batch: int, capacity: int, config: SalsConfig, device: torch.device) -> Rows:
        slots, dim = padded(capacity), site.rotary_dim
        dtype = torch.float32 if site.key_rotary is None else site.key_rotary.cos.node.meta["val"].dtype
        window = min(config.recents, capacity)

        def rows(count: int, kind: torch.dtype) -> Tensor:
            return torch.zeros((batch, count, dim), dtype=kind, device=device)

        return Rows(
            rows(slots, dtype),
            rows(slots, dtype),
            rows(slots // BLOCK, torch.float32),
            rows(slots // BLOCK, torch.float32),
            torch.full((batch, window), -1, dtype=torch.int32, device=device),
        )

    def forget(self) -> None:
        """No slot is known any more."""
        for tensor in (self.cos, self.sin, self.block_cos, self.block_sin):
            tensor.zero_()
        self.ring_slots.fill_(-1)

    def forget_from(self, slot: int) -> None:
        """Slots from ``slot`` on are not known any more."""
        if slot == 0:
            return self.forget()
        block = slot // BLOCK
        for rows in (self.cos, self.sin):
            rows[:, slot:] = 0
        if self.cos.shape[-1] and block < self.block_cos.shape[1]:
            shape = (self.cos.shape[0], -1, BLOCK, self.cos.shape[-1])
            means = reference.block_means(*(r[:, block * BLOCK :].view(shape) for r in (self.cos, self.sin)))
            self.block_cos[:, block:], self.block_sin[:, block:] = means
        self.ring_slots.masked_fill_(self.ring_slots >= slot, -1)

    def hold_last(self, count: int) -> None:
        """The ring holds the last of ``count`` tokens."""
        window = self.ring_slots.shape[1]
        recent = torch.arange(max(0, count - window), count, device=self.ring_slots.device)
        self.ring_slots.fill_(-1)
        self.ring_slots[:, recent % window] = recent.to(torch.int32)

    def spread(self, batch: int) -> None:
        """From rows shared by the batch to rows of each."""
        for name, tensor in vars(self).items():
            setattr(self, name, tensor.expand(batch, *tensor.shape[1:]).contiguous())

    def written(self) -> Tensor:
        """Slots whose rows were recorded in every position batch: ``[S]`` bool."""
        return ((self.cos != 0) | (self.sin != 0)).any(-1).all(0)


@dataclass
class Latents:
    """The compressed tokens of one site (fields: ``kernels.reference``, section storage)."""

    codes: Tensor
    scales: Tensor
    value_codes: Tensor
    value_scales: Tensor
    ring_key: Tensor
    ring_value: Tensor

    @staticmethod
    def allocate(plan: SitePlan, batch: int, capacity: int, config: SalsConfig, device: torch.device) -> Latents:
        site, slots = plan.site, padded(capacity)
        heads, dim, dtype = site.kv_heads, site.head_dim, site.dtype
        window = min(config.recents, capacity)
        exact = plan.action == "exact"
        latent_bits = 16 if exact else config.latent_bits
        value_bits = 16 if exact else config.value_bits

        def zeros(shape: Sequence[int], kind: torch.dtype) -> Tensor:
            return torch.zeros(tuple(shape), dtype=kind, device=device)

        quantized = value_bits < 16
        group = reference.value_group(dim, value_bits)
        return Latents(
            zeros((batch, slots, plan.rank), torch.int8 if latent_bits == 8 else dtype),
            zeros((batch, slots) if latent_bits == 8 else (0,), torch.float16),
            zeros(
                (batch, slots, heads, dim * value_bits // 8 if quantized else dim), torch.uint8 if quantized else dtype
            ),
            zeros((batch, slots, heads, dim // group, 2) if quantized else (0,), torch.float16),
            zeros((batch, window, heads, dim), dtype),
            zeros((batch, window, heads, dim), dtype),
        )

    def nbytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values())


@dataclass
class QueryFactors:
    """A query projection ``[O,I]`` as ``up [O,r] (down [r,I] x) + shift [O]``, and the version of the weight that it is
    of."""

    rank: int
    retained: float
    source: str
    version: int
    down: Tensor
    up: Tensor
    shift: Tensor


@dataclass(eq=False)
class SiteMemory:
    """What one site of one model has learnt: moments of its queries and keys, and the basis made from them."""

    query_moment: Tensor | None = None
    key_moment: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    basis: Basis | None = None
    ready: bool = False
    #: by the rank, or the share of energy, that was asked for
    queries: dict[int | float, QueryFactors] = field(default_factory=dict)

    def query_factors(
        self,
        rank: int | float,
        weight: Tensor,
        statistics: tuple[Tensor, Tensor] | None,
        gain: Tensor | None,
        dtype: torch.dtype,
    ) -> QueryFactors:
        """Factors of the query projection ``weight [O,I]`` as it is now: a weight that was written to is factored anew,
        at the same rank and into the same tensors. See :func:`~sals_compile.basis.factor_projection`.
        """
        known = self.queries.get(rank)
        if known is None or known.version != weight._version:
            *tensors, retained = factor_projection(weight, rank if known is None else known.rank, statistics, gain)
            if known is None:
                tensors = [t.to(dtype).contiguous() for t in tensors]
            else:
                tensors = [old.copy_(t) for old, t in zip((known.down, known.up, known.shift), tensors, strict=True)]
            source = "weights" if statistics is None else "calibration"
            made = QueryFactors(tensors[0].shape[0], retained, source, weight._version, *tensors)
            self.queries |= {rank: made, made.rank: made}
        return self.queries[rank]

    def moment(self, site: AttentionSite, kind: str, device: torch.device) -> Tensor:
        """The accumulator that ``observe`` (``kind="query_moment"``) or ``observe_keys`` adds to."""
        if getattr(self, kind) is None:
            query = kind == "query_moment"
            shape = (site.kv_heads, site.head_dim, site.head_dim) if query else (site.joint_width,) * 2
            setattr(self, kind, torch.zeros(shape, dtype=torch.float32, device=device))
        return getattr(self, kind)

    def reserve(self, plan: SitePlan, config: SalsConfig, device: torch.device) -> dict[str, Tensor]:
        """The tensors that the graph takes (``encoder``, ``decoder``, ``value_transform``; also ``decoder_codes`` and
        ``decoder_scales`` where keys are rebuilt in int8): the same ones from now on, filled by :meth:`install`.
        """
        if not self.tensors:
            site = plan.site
            dim = site.head_dim
            plain = plan.action == "exact" or config.value_transform == "none" or config.value_bits == 16
            transform = torch.eye(dim) if plain else reference.hadamard(dim)
            self.tensors = {name: blank_basis(plan, name, device) for name in basis_fields(plan, config)}
            self.tensors["value_transform"].copy_(transform)
        return self.tensors

    def install(self, basis: Basis | None, plan: SitePlan, config: SalsConfig, device: torch.device) -> None:
        """Fill the tensors that the graph takes from ``basis`` (None: full rank, for exact mode)."""
        tensors = self.reserve(plan, config, device)
        if basis is None:
            encoder = decoder = torch.eye(plan.site.joint_width)
        else:
            encoder, decoder = basis.encoder, basis.decoder
        tensors["encoder"].copy_(encoder)
        tensors["decoder"].copy_(decoder)
        if "decoder_codes" in tensors:
            site = plan.site
            found = reference.quantize_decoder(decoder, site.head_dim, site.rotary_dim, site.rotary_form)
            for name, value in zip(("decoder_codes", "decoder_scales"), found, strict=True):
                tensors[name].copy_(value)
        self.basis, self.ready = basis, True


def blank_basis(plan: SitePlan, name: str, device: torch.device) -> Tensor:
    """A tensor for one of :func:`~sals_compile.passes.rewrite.basis_fields`, zero until a basis is known."""
    site = plan.site
    width, dim = site.joint_width, site.head_dim
    own = torch.float32 if device.type == "cpu" else site.dtype
    shape, dtype = {
        "encoder": ((width, plan.rank), own),
        "decoder": ((plan.rank, width), own),
        "value_transform": ((dim, dim), own),
        "decoder_codes": ((width, plan.rank), torch.int8),
        "decoder_scales": ((width,), torch.float32),
    }[name]
    return torch.zeros(shape, dtype=dtype, device=device)


def make_basis(memory: SiteMemory, plan: SitePlan, config: SalsConfig, rows: Rows | None, projection: Any) -> Basis:
    """The site's basis by ``config.basis`` from what was observed. ``projection``: ``(weight, norm weight or None)`` or
    None.
    """
    site, rank = plan.site, plan.rank
    if config.basis == "weights" and projection is not None:
        return weights(projection[0], projection[1], rank)
    assert memory.key_moment is not None
    if config.basis == "query_weighted" and memory.query_moment is not None:
        relative = None
        if rows is not None and site.key_rotary is not None:
            known = rows.written().nonzero().flatten()
            relative = relative_rows(
                rows.cos[0][known].float(), rows.sin[0][known].float(), site.rotary_form, DISTANCES
            )
        return query_weighted(memory.key_moment, memory.query_moment, relative, site.rotary_form, rank)
    return pca(memory.key_moment, rank)


class AdoptedCache:
    """The state beside one set of static KV buffers.

    ``phase`` is ``"dense"`` (the buffers alone are up to date) or ``"sparse"`` (latents are as well). ``tokens`` is an
    upper bound of the tokens cached, counted on the host. ``versions`` are the buffers' version counters after our last
    call: any other writer changes them.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        rows: Sequence[Rows],
        rows_of: dict[Any, Rows],
        rotary: tuple[tuple[str, int], ...],
    ) -> None:
        self.phase = "dense"
        self.tokens = 0
        #: the model whose bases the latents are in (storages of its weights)
        self.owner: tuple[int, ...] = ()
        #: calls since somebody else last wrote to the buffers
        self.calls = 0
        self.rows = list(rows)
        self.rows_of = rows_of
        #: rotary form and rotated dims of each site, in the order of the graph that adopted the cache
        self.rotary = rotary
        self.latents: dict[Any, Latents] = {}
        self.keys = {storage_key(b) for b in buffers}
        self.versions: list[int] | None = None
        self.counter_versions: list[int] | None = None
        self.refused = ""
        #: state tensors in the order each variant takes them, remembered between calls
        self.inputs: dict[Any, list[Tensor]] = {}
        #: per graph, which weights they were made of
        self.stamps: dict[Any, list[tuple[int, int]]] = {}

    def touched(self, buffers: Sequence[Tensor]) -> bool:
        """Whether somebody else wrote to the buffers since our last call."""
        return self.versions is not None and self.versions != [b._version for b in buffers]

    def recounted(self, counters: Sequence[Tensor]) -> bool:
        """Whether somebody else wrote to the layers' token counters since our last call, or may have."""
        if any(c.is_inference() for c in counters):
            return True
        return self.counter_versions != [c._version for c in counters]

    def record_versions(self, buffers: Sequence[Tensor], counters: Sequence[Tensor] = ()) -> None:
        if not any(c.is_inference() for c in counters):
            self.counter_versions = [c._version for c in counters]
        if any(b.is_inference() for b in buffers):
            self.refused = UNWATCHED
            return
        self.versions = [b._version for b in buffers]

    def forget(self) -> None:
        """The buffers' contents are no longer what we wrote."""
        self.phase, self.tokens, self.calls, self.refused = "dense", 0, 0, ""
        for rows in self.rows:
            rows.forget()

    def nbytes(self) -> int:
        """Bytes of latents, codes, rings and rows."""
        shared = sum(t.nbytes for r in self.rows for t in vars(r).values())
        return shared + sum(latent.nbytes() for latent in self.latents.values())


def pre_rotary_keys(site: AttentionSite, key: Tensor, rows: Rows, slots: Tensor) -> Tensor:
    """Stored keys ``[B, n, N, D]`` of ``slots [n]``, un-rotated by the rows recorded when they were written."""
    if site.key_rotary is None:
        return key
    cos, sin = rows.cos[:, slots].float().unsqueeze(2), rows.sin[:, slots].float().unsqueeze(2)
    return reference.invert_rotary(key.float(), cos, sin, site.rotary_form)


def import_dense(
    plan: SitePlan, key: Tensor, value: Tensor, rows: Rows, latents: Latents, memory: SiteMemory, slots: Tensor
) -> None:
    """Encode the tokens of a dense cache: ``key``, ``value`` ``[B, S, N, D]`` (rotated keys), tokens at ``slots [n]``
    ascending.
    """
    site = plan.site
    key, value = key[:, slots], value[:, slots]
    reference.store_latents(
        latents.codes,
        latents.scales,
        latents.value_codes,
        latents.value_scales,
        pre_rotary_keys(site, key, rows, slots),
        value,
        memory.tensors["encoder"],
        memory.tensors["value_transform"],
        slots.unsqueeze(0),
    )
    window = latents.ring_key.shape[1]
    recent = slots[-window:]
    latents.ring_key[:, recent % window] = key[:, -window:]
    latents.ring_value[:, recent % window] = value[:, -window:]


def bytes_per_token(plan: SitePlan, config: SalsConfig) -> tuple[float, float]:
    """``(stored, dense)`` KV bytes of a cached site per slot and batch row: codes, scales and its ring, over the slots
    it has.

    Rotary rows are shared by all sites and counted in :func:`kv_bytes_per_token`.
    """
    site = plan.site
    dense = 2.0 * site.joint_width * torch.empty((), dtype=site.dtype).element_size()
    if site.key_cache is None or plan.action == "dense":
        return dense, dense
    capacity = site.key_cache.capacity
    return Latents.allocate(plan, 1, capacity, config, torch.device("meta")).nbytes() / capacity, dense


def kv_bytes_per_token(plans: Sequence[SitePlan], groups: Sequence[RowGroup], config: SalsConfig) -> dict[str, float]:
    """KV bytes per slot and batch row over all cached sites: ``dense`` and ``sals`` (everything stored, rows once per
    group).
    """
    cached = [bytes_per_token(p, config) for p in plans if p.site.cached]
    total = {"dense": sum(d for _, d in cached), "sals": sum(s for s, _ in cached)}
    for group in groups:
        site = plans[group.sites[0]].site
        assert site.key_cache is not None
        capacity = site.key_cache.capacity
        rows = Rows.allocate(site, 1, capacity, config, torch.device("meta"))
        total["sals"] += sum(t.nbytes for t in vars(rows).values()) / capacity
    return total

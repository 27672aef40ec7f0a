"""KV caches without dense buffers: their state, and the graphs that run on it.

A :class:`VirtualCache` is what a ``SalsCache`` (``integrations/transformers.py``) holds: latents, rings and rotary
rows, and nothing else once it holds more than ``budget`` tokens. It is found by the *handles* that the cache shows to
the model where a static cache shows its buffers (``kernels/virtual.py``), one element each. The host counts its tokens,
so that every choice is made without asking the device:

========  ===========================================  ==========================================================
phase     holds                                        a call
========  ===========================================  ==========================================================
empty     nothing                                      ``short`` if its tokens fit the budget, else ``fresh``
short     up to ``budget`` tokens, exact and dense     ``short``, ``grow`` (a prefill past the budget), or an
                                                       import between calls and ``sparse``
latent    latents, ring, rows                          ``sparse`` (at most ``decode_tokens`` new) or ``rebuild``
========  ===========================================  ==========================================================

Layers that the plan leaves dense (``skip_layers``) keep dense buffers here, too.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.library import Library, register_fake

from .cache import Latents, Rows, SiteMemory, import_dense, make_basis, pre_rotary_keys, storage_key
from .config import SalsConfig
from .kernels import reference
from .kernels.virtual import VIRTUAL_BUFFER
from .passes.ir import Declined, SitePlan
from .passes.rewrite import Rewritten, StateInput, rewrite_virtual, row_groups, short_slots
from .runtime import CompiledGraph, Registry, Variant

log = logging.getLogger("sals_compile")

#: Every living cache by the storage of its handles.
_caches: weakref.WeakValueDictionary[int, VirtualCache] = weakref.WeakValueDictionary()


def placed(device: torch.device | str | None) -> torch.device:
    """The device, index and all; torch's default device for None."""
    place = torch.get_default_device() if device is None else torch.device(device)
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


def handles(device: torch.device) -> tuple[Tensor, Tensor]:
    """What stands for a layer's keys and for its values: one NaN each."""
    with torch.inference_mode(False):
        made = torch.full((1,), torch.nan, device=device), torch.full((1,), torch.nan, device=device)
    for tensor in made:  # static for CUDA graphs; a second cache need not recompile
        torch._dynamo.mark_static_address(tensor, guard=False)
    return made


class VirtualCache:
    """The state of one cache: ``handles`` are its layers' stand-ins for keys, ``counters`` their token counts (0-d).

    Everything per layer is keyed by the storage of the layer's key handle. ``tokens`` is exact where there are
    counters; without them (the model is told its slots) decode steps are taken to follow each other, and the slots of
    a prefill are read.
    """

    def __init__(self, handles: Sequence[Tensor], counters: Sequence[Tensor], capacity: int) -> None:
        self.handles, self.counters, self.capacity = list(handles), list(counters), capacity
        for handle in handles:
            _caches[storage_key(handle)] = self
        self.tokens = 0
        self.drop()

    def drop(self) -> None:
        """Free all state; the next call allocates it anew."""
        self.phase = "empty"
        self.batch = 0
        self.owner: Any = None
        self.rows: list[Rows] = []
        self.rows_of: dict[int, Rows] = {}
        #: rotary form and rotated dims of each layer's keys, which every graph over the cache must agree with
        self.rotary: dict[int, tuple[str, int]] = {}
        self.latents: dict[int, Latents] = {}
        self.short: dict[int, dict[str, Tensor]] = {}
        self.kept: dict[int, dict[str, Tensor]] = {}
        self.versions: dict[int, int] = {}
        #: state tensors in the order each variant takes them, remembered between calls
        self.inputs: dict[Any, list[Tensor]] = {}
        #: per graph, which weights they were made of
        self.stamps: dict[Any, list[tuple[int, int]]] = {}
        #: graphs whose state this is, and the weights they then had
        self.claimed: weakref.WeakKeyDictionary[VirtualGraph, Any] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualCache:
        """A cache of its own with the same tokens, for the same model."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        handles, counters = copy.deepcopy((self.handles, self.counters), memo)
        VirtualCache.__init__(twin, handles, counters, self.capacity)
        for name in vars(self).keys() - vars(twin).keys():  # a subclass's own
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        twin.phase, twin.batch, twin.tokens = self.phase, self.batch, self.tokens
        at = {storage_key(old): storage_key(new) for old, new in zip(self.handles, twin.handles, strict=True)}
        twin.owner = None if self.owner is None else {at[k]: memory for k, memory in self.owner.items()}
        twin.rows = copy.deepcopy(self.rows, memo)
        for name in ("rows_of", "rotary", "latents", "short", "kept"):
            setattr(twin, name, {at[k]: copy.deepcopy(v, memo) for k, v in getattr(self, name).items()})
        twin.record_versions()
        return twin

    def tensors(self) -> list[Tensor]:
        """All state, each tensor once."""
        pieces = [t for group in (self.latents.values(), self.rows) for entry in group for t in vars(entry).values()]
        return pieces + [t for group in (self.short, self.kept) for entry in group.values() for t in entry.values()]

    def nbytes(self) -> int:
        """Bytes held for keys and values, everything counted."""
        return sum(t.nbytes for t in self.tensors())

    # ---- the token counters ------------------------------------------------------------------------------------------

    def recounted(self) -> bool:
        """Whether somebody else wrote to the layers' token counters since we last did, or may have."""
        if any(c.is_inference() for c in self.counters):
            return True
        return any(self.versions.get(id(c)) != c._version for c in self.counters)

    def record_versions(self) -> None:
        if not any(c.is_inference() for c in self.counters):
            self.versions = {id(c): c._version for c in self.counters}

    def reset(self) -> None:
        """Forget all tokens; the memory stays allocated."""
        self.set_length(0)

    def crop(self, tokens: int) -> None:
        """Remove the last ``-tokens`` tokens. Raises ``ValueError`` where there are fewer."""
        if self.tokens + tokens < 0:
            raise ValueError(f"cannot crop {-tokens} tokens from a cache that holds {self.tokens}")
        if tokens:
            self.set_length(self.tokens + tokens)

    def set_length(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens; the counters are set alike."""
        for counter in self.counters:
            counter.fill_(tokens)
        self.forget_from(tokens)
        self.record_versions()

    def forget_from(self, tokens: int) -> None:
        """Tokens from slot ``tokens`` on are gone, as if they had never been written."""
        for rows in self.rows:
            rows.forget_from(tokens)
        if tokens == 0:
            # Masked slots are multiplied by a weight of zero, which would keep a NaN.
            for tensor in (t for latents in self.latents.values() for t in vars(latents).values()):
                tensor.zero_()
            self.phase = "empty" if self.phase == "latent" else self.phase
        for entry in (*self.short.values(), *self.kept.values()):
            for tensor in entry.values():
                tensor.zero_() if tokens == 0 else None
        self.tokens = tokens

    # ---- the batch ---------------------------------------------------------------------------------------------------

    def reorder(self, index: Tensor) -> None:
        """Row ``i`` of the batch becomes what row ``index[i]`` was (beam search). In place: addresses stay."""
        for tensor in self.tensors():
            if tensor.numel() and tensor.shape[0] == self.batch > 1:
                tensor.copy_(tensor.index_select(0, index.to(tensor.device)))

    def select(self, index: Tensor) -> None:
        """The batch becomes rows ``index`` of what it was; of another size, or not."""
        if not self.batch:
            return
        size, old = index.numel(), self.batch

        def chosen(tensor: Tensor) -> Tensor:
            if tensor.numel() == 0 or tensor.shape[0] != old:
                return tensor
            return tensor.index_select(0, index.to(tensor.device))

        for entry in (*self.latents.values(), *self.rows):
            shared = isinstance(entry, Rows) and entry.cos.shape[0] == 1
            for name, tensor in vars(entry).items():
                setattr(entry, name, tensor if shared else chosen(tensor))
        for buffers in (*self.short.values(), *self.kept.values()):
            buffers.update({name: chosen(t) for name, t in buffers.items()})
        self.batch = size
        self.inputs.clear()
        self.claimed.clear()


# ---- the basis, from the first prefill -------------------------------------------------------------------------------


class Fitter:
    """Makes one site's basis inside the first prefill's graph, when that prefill runs."""

    def __init__(self, plan: SitePlan, memory: SiteMemory, config: SalsConfig) -> None:
        self.plan, self.memory, self.config = plan, memory, config
        #: tokens in the short buffers before the call that is running
        self.past = 0
        _fitters[id(self)] = self

    def fit(
        self, query_pre: Tensor, key_pre: Tensor, cos: Tensor, sin: Tensor, past: Tensor | None, rows: Rows
    ) -> None:
        """Observe this call's queries and keys, and those of a short context before it, and install the basis."""
        memory, site = self.memory, self.plan.site
        if memory.ready:
            return
        device = key_pre.device
        memory.key_moment = None
        moment = memory.moment(site, "key_moment", device)
        reference.observe_keys(moment, key_pre)
        if self.config.basis == "query_weighted":
            reference.observe(memory.moment(site, "query_moment", device), query_pre)
        seen = [cos[:1], sin[:1]]
        if past is not None and self.past:
            slots = torch.arange(self.past, device=device)
            reference.observe_keys(moment, pre_rotary_keys(site, past[:, slots], rows, slots))
            old = (rows.cos[:1, slots], rows.sin[:1, slots])
            seen = [torch.cat((a, b.to(a.dtype)), 1) for a, b in zip(old, seen, strict=True)]
        known = Rows(seen[0], seen[1], rows.block_cos, rows.block_sin, rows.ring_slots)
        basis = make_basis(memory, self.plan, self.config, known, None)
        memory.install(basis, self.plan, self.config, device)
        memory.key_moment = memory.query_moment = None


_fitters: weakref.WeakValueDictionary[int, Fitter] = weakref.WeakValueDictionary()


def fit_basis(
    encoder: Tensor,
    decoder: Tensor,
    query_pre: Tensor,
    key_pre: Tensor,
    new_cos: Tensor,
    new_sin: Tensor,
    past_key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    fitter: int,
) -> None:
    """Fill ``encoder [E,R]`` and ``decoder [R,E]`` with the basis of the keys seen, unless that was done before.

    ``query_pre [B,L,H,D]`` and ``key_pre [B,L,N,D]`` are this call's, ``new_cos``/``new_sin [P,L,Dr]`` their rotary
    rows; ``past_key [B,T,N,D]`` (rotated) and ``cos``/``sin`` those of a short context before it. ``fitter``: id of a
    :class:`Fitter`.
    """
    empty = key_pre.new_empty(0)
    _fitters[fitter].fit(query_pre, key_pre, new_cos, new_sin, past_key, Rows(cos, sin, empty, empty, empty))


_library = Library("sals", "FRAGMENT")
_library.define(
    "fit_basis(Tensor(a!) encoder, Tensor(b!) decoder, Tensor query_pre, Tensor key_pre, Tensor new_cos, "
    "Tensor new_sin, Tensor? past_key, Tensor cos, Tensor sin, int fitter) -> ()"
)
_library.impl("fit_basis", fit_basis, "CompositeExplicitAutograd")
register_fake("sals::fit_basis", lambda *_: None, lib=_library)


# ---- the compiled callable -------------------------------------------------------------------------------------------


def unclaimed(gm: GraphModule, plans: Sequence[SitePlan]) -> list[Node]:
    """Virtual buffers of a graph that no matched site reads: they cannot be given a value."""
    claimed = {c.buffer for p in plans for c in (p.site.key_cache, p.site.value_cache) if c is not None}
    return [n for n in gm.graph.find_nodes(op="call_function", target=VIRTUAL_BUFFER) if n not in claimed and n.users]


def unclaimed_message(nodes: Sequence[Node], declined: Sequence[Declined]) -> str:
    """What to tell the user of :func:`unclaimed` buffers."""
    reasons = "\n".join(f"  {d.name}: {d.reason}" for d in declined) or "  (no attention reads them)"
    return (
        f"a SalsCache needs every attention over it to be matched, and {len(nodes)} of its buffers are read by "
        f"attention that was declined; use transformers' StaticCache for this model. Declined:\n{reasons}"
    )


def _forms(rotary: dict[int, tuple[str, int]]) -> str:
    return ", ".join(f"{form} of {dim} dims" if dim else form for form, dim in dict.fromkeys(rotary.values()))


class VirtualGraph(CompiledGraph):
    """A graph whose KV cache is virtual. Sites that read no such cache stay dense in it."""

    def __init__(
        self,
        gm: GraphModule,
        plans: Sequence[SitePlan],
        config: SalsConfig,
        registry: Registry,
        example: dict[Node, Any],
        mode: str | None,
    ) -> None:
        reason = "left dense beside a SalsCache, which it does not read"
        plans = [p if p.site.virtual else dataclasses.replace(p, action="dense", reason=reason) for p in plans]
        self.held = [i for i, p in enumerate(plans) if p.site.virtual]
        self.fitters: dict[int, Fitter] = {}
        self.owners: dict[int, SiteMemory] = {}
        super().__init__(gm, plans, row_groups(plans), config, registry, example, mode)

    def _prepare(self, example: dict[Node, Any]) -> None:
        with torch.inference_mode(False):
            self._prepare_state(example)

    def _prepare_state(self, example: dict[Node, Any]) -> None:
        super()._prepare(example)

    def _follow_model(self, args: Sequence[Any]) -> None:
        before = self.owner
        super()._follow_model(args)
        if self.owner == before and self.owners:
            return
        #: who a cache belongs to: the model's memory of each layer
        self.owners = {i: self.memories[i] for i in self.held}
        for index in self.active:
            memory, plan = self.memories[index], self.plans[index]
            memory.reserve(plan, self.config, plan.site.output.meta["val"].device)
            if index in self.fitters:
                self.fitters[index].memory = memory
            elif not memory.ready:
                self.fitters[index] = Fitter(plan, memory, self.config)
                self.variants.clear()  # their graphs make no basis

    def _compile_ahead(self) -> None:
        """Nothing: a call that a variant's guards exclude runs node by node."""

    def rewrite(self, name: str) -> Rewritten:
        fits = {i: id(f) for i, f in self.fitters.items()}
        return rewrite_virtual(self.gm, self.plans, self.groups, self.config, name, fits)

    # ---- a call ------------------------------------------------------------------------------------------------------

    def __call__(self, args: list[Any]) -> Any:
        with self.registry.lock:
            args = list(args)
            cache = self._cache(args)
            # State made under inference_mode() could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                self._follow_model(args)
                self._claim(cache, args)
                fresh = self.sizes(self._site(self.held[0]).key_cache.slots.meta["val"].shape[-1], args)
                self._count(cache, fresh, args)
                name = self._choose(cache, fresh, args)
                variant = self._ready(name, cache, args)
            for fitter in self.fitters.values():
                fitter.past = cache.tokens
            outputs = variant.call([*args, *cache.inputs[variant]])
            cache.tokens += fresh
            if name not in ("short", "sparse"):
                self._settle_in_latents(cache)
            self.running = cache
            return outputs

    def inspect(self, args: Sequence[Any]) -> None:
        """Before AOT's prologue: notice whether somebody else wrote to the token counters."""
        self.recount = self._cache(args).recounted()

    def settle(self) -> None:
        """After AOT's epilogue, which writes the counters."""
        cache, self.running = self.running, None
        if cache is not None:
            cache.record_versions()

    running: VirtualCache | None = None
    #: the cache of the last call: most calls are for the same
    known: weakref.ref[VirtualCache] | None = None
    known_handles: Sequence[tuple[int, Tensor]] = ()

    def _site(self, index: int) -> Any:
        return self.plans[index].site

    def _handle(self, index: int, args: Sequence[Any]) -> int:
        return storage_key(args[self.position[self._site(index).key_cache.owner]])

    def _cache(self, args: Sequence[Any]) -> VirtualCache:
        known = None if self.known is None else self.known()
        if known is not None and all(args[p] is h for p, h in self.known_handles):
            return known
        found = {id(c): c for c in (_caches.get(self._handle(i, args)) for i in self.held)}
        cache = next(iter(found.values()))
        if len(found) != 1 or cache is None:
            raise RuntimeError(
                "the layers of this call belong to different SalsCaches, or to one that is gone; pass one SalsCache"
            )
        self.known = weakref.ref(cache)
        positions = [self.position[self._site(i).key_cache.owner] for i in self.held]
        self.known_handles = [(p, args[p]) for p in positions]
        return cache

    def _claim(self, cache: VirtualCache, args: Sequence[Any]) -> None:
        """Make the cache this model's, of this batch size; a cache that holds tokens must be already."""
        if self.owner and cache.claimed.get(self) == self.owner:
            return
        owner = {self._handle(i, args): self.owners[i] for i in self.held}
        rotary = {self._handle(i, args): (self._site(i).rotary_form, self._site(i).rotary_dim) for i in self.held}
        batch = int(self._site(self.held[0]).key_cache.buffer.meta["val"].shape[0])
        if cache.owner == owner and cache.batch == batch and cache.rotary == rotary:
            for group in self.groups:
                shared = self._group_rows(cache, group.index, args)
                wanted = self._position_batch(group, args)
                if wanted > shared.cos.shape[0]:
                    shared.spread(wanted)
                    cache.inputs.clear()
            cache.claimed[self] = self.owner
            return
        if cache.tokens and cache.owner is not None and cache.owner != owner:
            raise RuntimeError(
                f"this SalsCache holds {cache.tokens} tokens of another model, or of the same model compiled with "
                f"other options; reset() it, or use a SalsCache for each"
            )
        if cache.tokens and cache.batch != batch:
            raise ValueError(
                f"this SalsCache holds a batch of {cache.batch} and the call has {batch}; use "
                f"batch_repeat_interleave() or batch_select_indices(), or reset() it"
            )
        if cache.tokens and cache.owner == owner and cache.rotary != rotary:
            raise RuntimeError(
                f"this SalsCache holds {cache.tokens} tokens whose keys were rotated as {_forms(cache.rotary)}, and "
                f"this call's graph rotates them as {_forms(rotary)}, so it cannot rebuild them; use transformers' "
                f"StaticCache for this model"
            )
        cache.drop()
        cache.owner, cache.batch, cache.rotary = owner, batch, rotary
        for group in self.groups:
            site = self._site(group.sites[0])
            device = site.output.meta["val"].device
            rows = Rows.allocate(site, self._position_batch(group, args), cache.capacity, self.config, device)
            cache.rows.append(rows)
            for index in group.sites:
                cache.rows_of[self._handle(index, args)] = rows
        for index in self.held:
            if self.plans[index].action == "dense":
                site, buffers = self._site(index), {}
                for field, write in (("key", site.key_cache), ("value", site.value_cache)):
                    value = write.buffer.meta["val"]
                    buffers[field] = torch.zeros(tuple(map(int, value.shape)), dtype=value.dtype, device=value.device)
                cache.kept.setdefault(self._handle(index, args), buffers)
        cache.claimed[self] = self.owner

    def _count(self, cache: VirtualCache, fresh: int, args: Sequence[Any]) -> None:
        """Hold the host's count of tokens against the layers' own counters, where somebody else wrote to them."""
        full = cache.tokens + fresh > cache.capacity
        unsure = not cache.counters and (cache.tokens == 0 or full or fresh > self.config.decode_tokens)
        if self.recount or unsure:
            starts = {int(self._evaluate(n, args).min()) for n in {self._site(i).key_cache.slots: 0 for i in self.held}}
            if len(starts) > 1 or max(starts) > cache.tokens:
                raise RuntimeError(
                    f"this call writes from slot {max(starts)} on and the cache holds {cache.tokens} tokens; change "
                    f"token counters only by crop() and reset(), and leave no gap between calls"
                )
            if min(starts) < cache.tokens:
                cache.forget_from(min(starts))
        if cache.tokens + fresh > cache.capacity:
            raise IndexError(
                f"KV cache is full: this call writes up to slot {cache.tokens + fresh - 1} and the cache has "
                f"{cache.capacity}; create it with a larger max_cache_len, or reset it"
            )

    # ---- phases ------------------------------------------------------------------------------------------------------

    def _choose(self, cache: VirtualCache, fresh: int, args: Sequence[Any]) -> str:
        """The variant for this call, its state allocated (the table at the top of this file)."""
        if not self.active or (cache.phase == "latent" and cache.tokens and fresh <= self.config.decode_tokens):
            return "sparse"
        threshold = 0 if self.config.attention == "exact" else short_slots(self.plans, cache.capacity)
        if cache.phase != "latent" and cache.tokens + fresh <= threshold:
            self._allocate(cache, args, short=True)
            cache.phase = "short"
            return "short"
        self._allocate(cache, args, short=False)
        if fresh <= self.config.decode_tokens:
            if cache.phase == "short" and cache.tokens:
                self._import_short(cache, args)
            if cache.tokens or all(self.memories[i].ready for i in self.active):
                self._settle_in_latents(cache)
                return "sparse"
        if cache.tokens == 0:
            return "fresh"
        return "grow" if cache.phase == "short" else "rebuild"

    def _compressed(self, args: Sequence[Any]) -> dict[int, int]:
        """The compressed layers of the call's cache: site index by handle, one site where several share a layer."""
        return {self._handle(i, args): i for i in reversed(self.active)}

    def _allocate(self, cache: VirtualCache, args: Sequence[Any], short: bool) -> None:
        """Latents, or a short context's dense buffers, of every layer that has none yet."""
        for at, index in self._compressed(args).items():
            plan, site = self.plans[index], self._site(index)
            device = site.output.meta["val"].device
            if short and at not in cache.short:
                shape = (cache.batch, short_slots(self.plans, cache.capacity), site.kv_heads, site.head_dim)
                cache.short[at] = {
                    field: torch.zeros(shape, dtype=write.buffer.meta["val"].dtype, device=device)
                    for field, write in (("key", site.key_cache), ("value", site.value_cache))
                }
            if not short and at not in cache.latents:
                cache.latents[at] = Latents.allocate(plan, cache.batch, cache.capacity, self.config, device)

    def _settle_in_latents(self, cache: VirtualCache) -> None:
        """From now on the latents are the cache."""
        if cache.short:
            stale = [v for v in cache.inputs if any(e.kind == "short" for e in v.rewritten.inputs)]
            for variant in stale:
                del cache.inputs[variant]
            cache.short.clear()
            log.info("%d tokens of %d layers went from dense to latents", cache.tokens, len(cache.latents))
        cache.phase = "latent"

    def _import_short(self, cache: VirtualCache, args: Sequence[Any]) -> None:
        """Encode a short context, the bases made from it where they are not known yet."""
        slots: Tensor | None = None
        for at, index in self._compressed(args).items():
            plan, memory, site = self.plans[index], self.memories[index], self._site(index)
            key, value = cache.short[at]["key"], cache.short[at]["value"]
            slots = torch.arange(cache.tokens, device=key.device)
            rows = cache.rows_of[at]
            if not memory.ready:
                memory.key_moment = None
                moment = memory.moment(site, "key_moment", key.device)
                reference.observe_keys(moment, pre_rotary_keys(site, key[:, slots], rows, slots))
                memory.install(make_basis(memory, plan, self.config, rows, None), plan, self.config, key.device)
                memory.key_moment = None
            import_dense(plan, key, value, rows, cache.latents[at], memory, slots)
        for rows in cache.rows:
            rows.hold_last(cache.tokens)

    # ---- variants ----------------------------------------------------------------------------------------------------

    def _state(self, entry: StateInput, cache: Any, args: Sequence[Any]) -> Tensor:
        if entry.kind in ("short", "kept", "latent"):
            at = self._handle(entry.owner, args)
            if entry.kind == "latent":
                return getattr(cache.latents[at], entry.field)
            return getattr(cache, entry.kind)[at][entry.field]
        return super()._state(entry, cache, args)

    def _group_rows(self, cache: Any, group: int, args: Sequence[Any]) -> Rows:
        return cache.rows_of[self._handle(self.groups[group].sites[0], args)]

    def _ready(self, name: str, cache: VirtualCache, args: list[Any]) -> Variant:
        """The variant for this call; ``cache.inputs`` has its state."""
        variant = self._compiled_for(name, cache, args)
        if any(not self._holds(g, args) for g in variant.guards):
            variant = self._unspecialised(variant)
        self._follow_weights(cache, args)
        if variant not in cache.inputs:
            cache.inputs[variant] = [self._state(e, cache, args) for e in variant.rewritten.inputs]
        return variant

    def _compiled_for(self, name: str, cache: VirtualCache, args: list[Any]) -> Variant:
        """The variant lowered for the cache's batch."""
        key = (name, cache.batch, tuple(r.cos.shape[0] for r in cache.rows))
        if key not in self.variants:
            rewritten = self.rewrite(name)
            extra = [self._state(e, cache, args) for e in rewritten.inputs]
            config = self.config
            if name not in ("short", "sparse"):  # a prefill runs once, and may make bases
                plain = {**config.inductor, "triton.cudagraphs": False}
                config = dataclasses.replace(config, cudagraphs=False, inductor=plain)
            self.variants[key] = self._lower(rewritten, extra, config)
        return self.variants[key]

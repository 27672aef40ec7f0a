"""Every option of the compiler, validated and documented. A leaf: anyone may import it."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

ATTENTION = ("sals", "reconstruct", "exact", "dense")
LOWERING = ("inductor", "eager", "mlir")
BASIS = ("query_weighted", "pca", "weights")
SCORING = ("block_rotary", "rope_free")
HEAD_SCORE = ("sum", "max", "mass")

#: Named sets of options. The paper's (arXiv 2510.24273): PCA latents in the key's own type, scored without rotation by
#: half of the latent, no value transform, first two and last layer dense; its 12.5 % setting has 2-bit values. A recent
#: window of 64 is the one that its quality was first measured with; with ours of 128 it is better by a fifth.
#: ``compact`` is ours at the size of the latter: a sparse layer stores a token in 1/6.4 of its bytes.
PRESETS: dict[str, dict[str, Any]] = {
    "paper-25": {
        "rank": 0.25,
        "score_rank": 0.125,
        "latent_bits": 16,
        "value_bits": 4,
        "value_transform": "none",
        "basis": "pca",
        "scoring": "rope_free",
        "head_score": "sum",
        "skip_layers": (0, 1, -1),
        "recents": 64,
    },
}
PRESETS["paper-12.5"] = PRESETS["paper-25"] | {"rank": 0.125, "score_rank": 0.0625, "value_bits": 2}
PRESETS["compact"] = {"rank": 0.25, "value_bits": 2}


class OptionError(ValueError):
    """A bad option: the message names the option, its value, what is allowed and, for a typing slip, the nearest
    name.
    """


@dataclass(frozen=True)
class SalsConfig:
    """Options of ``torch.compile(model, backend="sals", options={...})``. All are optional.

    Symbols: ``E = KV heads * head dim`` (joint key width), ``R`` rank, ``Rs`` score rank, ``T`` tokens attended per
    query. Defaults are those measured in the README's quality table.

    Attributes:
        preset: a named set of options, ``"paper-25"``, ``"paper-12.5"`` or ``"compact"``; options given beside it
            override it.
        attention: what becomes of a matched site. ``"sals"``: low-rank latents and top-k selection. ``"reconstruct"``:
            the same latents, every key rebuilt, no selection. ``"exact"``: full rank, not quantised, all tokens (equals
            dense; for tests). ``"dense"``: matched and verified, left dense.
        rank: ``R``; an int, or a float: the share of ``E`` coordinates, in bytes of one code, that a token's latent may
            take with its scale (see :meth:`resolve_rank`). 0.5 with 8-bit codes is a quarter of a 16-bit key.
        score_rank: ``Rs``, the leading latent coordinates that score tokens; an int, or a float as a fraction of ``E``.
        latent_bits: 8 (int8 with one scale per token) or 16 (the key's own floating type).
        decoder_bits: of the decoder that rebuilds the selected keys. 8 (int8 with one scale per column, for int8 tensor
            cores; needs ``latent_bits=8``) or 16 (the model's own type). None: 8 where latents have 8 bits and the
            model computes in half precision on a GPU (a CPU gains nothing by it).
        value_bits: 2, 4 or 8 (grouped along the head dim), or 16 (the value's own type).
        value_transform: ``"hadamard"`` rotates each value head before quantising (undone on the output), or ``"none"``.
        basis: how encoder and decoder are computed: ``"query_weighted"``, ``"pca"`` (the paper) or ``"weights"`` (no
            data).
        scoring: ``"block_rotary"`` or ``"rope_free"`` (the paper).
        head_score: how the heads' approximate logits make one score: ``"mass"`` of attention that they give;
            ``"sum"`` (the paper; fewer kernels on a GPU, but it loses tokens that one head alone looks for, as in
            copying); or ``"max"``.
        budget: ``T``, tokens attended per query: sinks, recents and critical tokens. No more cached than this: dense.
            ``"auto"``: per layer the fewest that keep ``auto_mass`` of the attention on the calibration's text, which
            option ``calibration`` must then give.
        budget_by_site: ``T`` of single sites by their names, in place of ``budget``; what ``budget="auto"`` fills.
        auto_mass: the share of attention, 0 to 1, that ``budget="auto"`` and ``skip_layers="auto"`` keep, as
            :meth:`sals_compile.Calibration.retained` counts it.
        sinks: first tokens, always attended.
        recents: last tokens, always attended, kept exact in a ring.
        query_block: queries that share one selection when a graph has no cache (encoders, whole-sequence forward).
        decode_tokens: the most query tokens of a call that is treated as decoding (sparse) rather than prefill (dense,
            exact).
        skip_layers: sites left dense: indices in order of appearance (negative from the end), or module path
            substrings. ``"auto"``: sites whose best ``T`` tokens keep less than ``auto_mass`` of the attention on the
            calibration's text; without ``calibration``, the first two and the last (the paper's choice).
        query_rank: factor the query projection into two products of this rank, where that costs less (calls through the
            latents only: a dense prefill stays exact). A float is the share of the variance of its outputs to keep:
            each site takes the smallest rank that does. By the calibration's moments if it holds them
            (``calibrate(..., projections=True)``), else by the weights alone. None: not at all.
        calibration: a ``Calibration`` or the path of one; without it the first long prompt is the calibration.
        on_decline: ``"dense"`` leaves a declined site as it was; ``"error"`` raises with the reasons.
        lowering: ``"inductor"``, ``"eager"`` or ``"mlir"``.
        cudagraphs: replay decode through Inductor's CUDA graphs.
        inductor: options passed through to Inductor (``torch._inductor.config`` patches).
    """

    preset: str | None = None
    attention: str = "sals"
    rank: int | float = 0.5
    score_rank: int | float = 0.125
    latent_bits: int = 8
    decoder_bits: int | None = None
    value_bits: int = 4
    value_transform: str = "hadamard"
    basis: str = "query_weighted"
    scoring: str = "block_rotary"
    head_score: str = "mass"
    budget: Any = 512
    budget_by_site: Mapping[str, int] = field(default_factory=dict)
    auto_mass: float = 0.93
    sinks: int = 16
    recents: int = 128
    query_block: int = 64
    decode_tokens: int = 8
    skip_layers: tuple[int | str, ...] = ()
    query_rank: int | float | None = None
    calibration: Any = None
    on_decline: str = "dense"
    lowering: str = "inductor"
    cudagraphs: bool = False
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.preset is not None:
            _one_of("preset", self.preset, tuple(PRESETS))
        _one_of("attention", self.attention, ATTENTION)
        _one_of("lowering", self.lowering, LOWERING)
        _one_of("basis", self.basis, BASIS)
        _one_of("scoring", self.scoring, SCORING)
        _one_of("head_score", self.head_score, HEAD_SCORE)
        _one_of("latent_bits", self.latent_bits, (8, 16))
        _one_of("decoder_bits", self.decoder_bits, (8, 16, None))
        if self.decoder_bits == 8 and self.latent_bits != 8:
            raise OptionError(
                f"option decoder_bits=8: an int8 decoder multiplies int8 latents, and latent_bits is "
                f"{self.latent_bits!r}; set latent_bits=8, or leave decoder_bits unset"
            )
        _one_of("value_bits", self.value_bits, (2, 4, 8, 16))
        _one_of("value_transform", self.value_transform, ("hadamard", "none"))
        _one_of("on_decline", self.on_decline, ("dense", "error"))
        for name in ("rank", "score_rank"):
            value = getattr(self, name)
            if isinstance(value, float) and not 0 < value <= 1:
                raise OptionError(
                    f"option {name}={value!r}: a float is a fraction of the joint key width and lies in (0, 1]; "
                    f"give an int for an absolute rank"
                )
            if isinstance(value, int) and value < 1:
                raise OptionError(f"option {name}={value!r}: a rank is at least 1")
        for name, least in (("sinks", 0), ("recents", 1), ("query_block", 1), ("decode_tokens", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"option {name}={getattr(self, name)!r}: must be at least {least}")
        budgets = {"budget": self.budget} | {f"budget_by_site[{k!r}]": v for k, v in self.budget_by_site.items()}
        if isinstance(self.budget, str):
            if self.budget != "auto":
                raise OptionError(f"option budget={self.budget!r} is of type str; expected int, or 'auto'")
            del budgets["budget"]
            if self.calibration is None:
                raise OptionError(
                    "option budget='auto': it is read off a calibration's text, and option calibration is not set; "
                    "make one with sals_compile.calibrate() or `sals calibrate`, or give budget as a number of tokens"
                )
        for name, value in budgets.items():
            if not isinstance(value, int):
                raise OptionError(f"option {name}={value!r} is of type {type(value).__name__}; expected int")
            if value <= self.sinks + self.recents:
                raise OptionError(
                    f"option {name}={value}: must exceed sinks + recents = {self.sinks} + {self.recents} = "
                    f"{self.sinks + self.recents}, or nothing is left for critical tokens; raise it or lower the others"
                )
        if not 0 < self.auto_mass < 1:
            raise OptionError(f"option auto_mass={self.auto_mass!r}: a share of attention, between 0 and 1")
        if self.query_rank is not None:
            fits = self.query_rank >= 1 if isinstance(self.query_rank, int) else 0 < self.query_rank < 1
            if not fits:
                raise OptionError(
                    f"option query_rank={self.query_rank!r}: an int is a rank of at least 1, a float the share of "
                    f"variance to keep and lies between 0 and 1"
                )
            if self.attention == "exact":
                raise OptionError(
                    f"option query_rank={self.query_rank!r}: factored queries are approximate, which attention='exact' "
                    f"rules out; leave one of them unset"
                )
        if self.decode_tokens > self.recents:
            raise OptionError(
                f"option decode_tokens={self.decode_tokens}: must not exceed recents={self.recents}, whose ring holds "
                f"the tokens of one call"
            )

    @staticmethod
    def from_options(options: Mapping[str, Any] | None) -> SalsConfig:
        """Check names and types of ``options`` and build the configuration. Raises :class:`OptionError`."""
        options = dict(options or {})
        fields = {f.name: f for f in dataclasses.fields(SalsConfig)}
        for name, value in options.items():
            if name not in fields:
                near = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise OptionError(f"unknown option {name!r} (value {value!r}){hint} Known options: {', '.join(fields)}")
            options[name] = _typed(name, value)
        return SalsConfig(**PRESETS.get(options.get("preset") or "", {}) | options)

    def decoder_in_int8(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a site that computes in ``dtype`` on ``device`` rebuilds its selected keys from an int8 decoder."""
        if self.attention == "exact" or self.latent_bits != 8:
            return False
        if self.decoder_bits is None:
            return dtype != torch.float32 and device.type != "cpu"
        return self.decoder_bits == 8

    def resolve_rank(self, joint_width: int) -> tuple[int, int]:
        """``(R, Rs)`` for ``E = joint_width``. Raises :class:`OptionError` for a rank over ``E`` or ``Rs > R``.

        A fraction is a promise about bytes, so a token's scale counts: its 16 bits are two coordinates of 8 bits.
        The rank is what then fits, rounded down to a multiple of :func:`_granule`. A scale under a hundredth of the row
        is forgiven, since kernels read rows of whole cache lines faster: on an H200 a decode step of a Llama-3-8B site
        takes a tenth longer with 496 coordinates than with 512. 1.0 is the whole key. An int stays as given. ``Rs``
        costs no bytes of its own: the nearest int, and no more than ``R`` for an equal fraction.
        """
        if self.attention == "exact":
            return joint_width, joint_width
        for name in ("rank", "score_rank"):
            value = getattr(self, name)
            if isinstance(value, int) and value > joint_width:
                raise OptionError(
                    f"option {name}={value!r}: exceeds the joint key width E={joint_width} (KV heads x head dim) of a "
                    f"matched site; use a float in (0, 1] for a fraction of it"
                )
        rank, score_rank = self.rank, self.score_rank
        if isinstance(rank, float):
            scale = SCALE_BITS // self.latent_bits if self.latent_bits < 16 else 0
            granule = _granule(joint_width) if self.latent_bits < 16 else 1
            fitting = round(rank * joint_width)
            fitting -= scale if fitting < 100 * scale else 0
            rank = joint_width if rank == 1 else max(1, fitting - fitting % granule)
        if isinstance(score_rank, float):
            wanted = max(1, round(score_rank * joint_width))
            same = isinstance(self.rank, float) and score_rank <= self.rank
            score_rank = min(wanted, rank) if same else wanted
        if score_rank > rank:
            raise OptionError(
                f"option score_rank={self.score_rank!r}: {score_rank} exceeds rank {rank}; scoring reads the leading "
                f"latent coordinates"
            )
        return rank, score_rank


#: Bits of a token's scale beside its 8-bit latents.
SCALE_BITS = 16


def _granule(joint_width: int) -> int:
    """What a fractional rank is a multiple of: a vector load of 16 codes for wide keys. In narrow ones so many would be
    a good share of the latent (SmolLM2, E = 192: at a quarter the KL is 0.034 with 46 coordinates, 0.041 with 40).
    """
    return 16 if joint_width >= 512 else 2


_TYPES: dict[str, tuple[type, ...]] = {
    "preset": (str, type(None)),
    "rank": (int, float),
    "score_rank": (int, float),
    "query_rank": (int, float, type(None)),
    "decoder_bits": (int, type(None)),
    "cudagraphs": (bool,),
    "inductor": (Mapping,),
    "budget": (int, str),
    "budget_by_site": (Mapping,),
    "auto_mass": (float,),
    "calibration": (object,),
}
for _name in ("latent_bits", "value_bits", "sinks", "recents", "query_block", "decode_tokens"):
    _TYPES[_name] = (int,)


def _typed(name: str, value: Any) -> Any:
    if name == "skip_layers":
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            value = (value,)
        try:
            value = tuple(value)
        except TypeError:
            value = (None,)
        if not all(isinstance(v, (int, str)) and not isinstance(v, bool) for v in value):
            raise OptionError(f"option {name}={value!r}: a sequence of layer indices (int) or module path parts (str)")
        return value
    if name == "calibration" and isinstance(value, os.PathLike):
        return os.fspath(value)
    types = _TYPES.get(name, (str,))
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types and object not in types):
        names = " or ".join(t.__name__ for t in types)
        raise OptionError(f"option {name}={value!r} is of type {type(value).__name__}; expected {names}")
    return value


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"option {name}={value!r}: allowed are {', '.join(map(repr, allowed))}{hint}")

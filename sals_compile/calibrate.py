"""What a model's keys and queries look like on a text, kept in a file: :class:`Calibration`.

A calibration holds second moments, not bases, so that method, rank and the slice of a tensor-parallel rank are chosen
later (:meth:`Calibration.basis`), and two calibrations can be added (:meth:`Calibration.merge`). The file is
safetensors: tensors ``SITE/FIELD`` and JSON metadata with a format name, a version and the model's fingerprint.
No pickle, no code.

Dimensions: ``N`` KV heads, ``D`` head dim, ``E = N*D``, ``M`` distances, ``Dr <= D`` rotated dims.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import inspect
import json
import math
import os
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import _disable_current_modes

from . import basis as bases
from .basis import Basis, relative_rows
from .cache import DISTANCES
from .kernels import reference
from .kernels.index_expr import evaluate
from .kernels.reference import ROTARY_FORMS
from .passes.ir import AttentionSite, Mismatch, Operand
from .passes.verify import rotary_rows

FORMAT = "sals-calibration"
VERSION = 2

#: Entries of each weight that a fingerprint remembers, evenly spaced.
SAMPLES = 16

#: The shortest sequence that says anything about the distances between tokens.
SHORTEST = 16

#: Budgets at which a calibration notes how much attention the best tokens get: two to an octave.
BUDGETS = tuple(round(32 * 2 ** (i / 2)) for i in range(27))

#: Tokens by which :meth:`Calibration.budget` counts.
STEP = 64

#: Queries of each sequence at which that is measured, evenly spaced over its last half.
QUERIES = 32

#: Attention weights computed at a time for it.
WORKSPACE = 1 << 24

#: Files read by :meth:`Calibration.load`, by path: what the file was then, and what was read.
_loaded: dict[str, tuple[tuple[int, ...], Calibration]] = {}


class CalibrationError(ValueError):
    """A calibration that cannot be read, does not fit the model, or is not finite. Says what, where, and the remedy."""


@dataclass(frozen=True)
class Fingerprint:
    """Which model: its class, its size, a digest of its parameters' names and shapes, and some of their values.

    The values are compared with a tolerance, so that a model cast to bf16 or fp16 is still the same model.
    """

    model: str
    parameters: int
    digest: str
    samples: tuple[float, ...]

    @staticmethod
    def of(model: torch.nn.Module) -> Fingerprint:
        """The fingerprint of a model: its class, parameter shapes, and a few entries of a few weights."""
        named = sorted(model.named_parameters(remove_duplicate=True), key=lambda item: item[0])
        shapes = json.dumps([[name, list(p.shape)] for name, p in named])
        # A few large weights tell two models of one architecture apart; all of them would make the file large.
        weights = [p for _, p in named if p.dim() >= 2][:4] or [p for _, p in named][:4]
        samples = [value for p in weights for value in sample(p).tolist()]
        digest = hashlib.sha256(shapes.encode()).hexdigest()[:12]
        return Fingerprint(type(model).__name__, sum(p.numel() for _, p in named), digest, tuple(samples))

    def matches(self, other: Fingerprint) -> bool:
        """Whether both are of one model; the sampled entries may differ by rounding (a type of less precision)."""
        return (self.digest, self.parameters) == (other.digest, other.parameters) and _same(self.samples, other.samples)

    def __str__(self) -> str:
        values = hashlib.sha256(repr([f"{s:.2e}" for s in self.samples]).encode()).hexdigest()[:6]
        return f"{self.model} ({self.parameters} parameters, {self.digest}-{values})"


@dataclass(frozen=True)
class SiteMoments:
    """What was observed at one attention site. Moments are sums, in fp32 on the CPU.

    Attributes:
        key_moment: ``[E,E]``, sum of ``k k^T`` over tokens; ``k`` the joint pre-rotary key.
        query_moment: ``[N,D,D]``, sum of ``q q^T`` over tokens and the query heads of each KV head; pre-rotary.
        rotary: ``"none"``, ``"half"`` or ``"interleaved"``.
        relative_cos, relative_sin: ``[M,Dr]``, rotations by the distances to average over; empty without rotary.
        weight_sample: entries of the key projection's weight, by which a compiled site knows whose calibration this is;
            empty if the projection was not found.
        kept: ``[len(BUDGETS)]``, sum over ``queries [1]`` queries of the share of attention (mean over heads) that the
            best so many tokens get, chosen for all heads together.
        projected_moment: ``[O+1,O+1]``, sum of ``y y^T`` over tokens; ``y`` is a one, then the query projection's
            output ``W x`` of all heads without its bias. Empty unless asked for (``calibrate(..., projections=True)``).
    """

    key_moment: Tensor
    query_moment: Tensor
    rotary: str = "none"
    relative_cos: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    relative_sin: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    weight_sample: Tensor = field(default_factory=lambda: torch.empty(0))
    kept: Tensor = field(default_factory=lambda: torch.zeros(len(BUDGETS)))
    queries: Tensor = field(default_factory=lambda: torch.zeros(1))
    projected_moment: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    def relative(self) -> tuple[Tensor, Tensor] | None:
        """``cos``, ``sin [M,Dr]`` as :func:`sals_compile.basis.query_weighted` takes them; None without rotary."""
        return None if self.rotary == "none" else (self.relative_cos, self.relative_sin)

    def fault(self) -> str:
        """What is wrong with these moments, or the empty string."""
        key, query = self.key_moment, self.query_moment
        if key.dim() != 2 or key.shape[0] != key.shape[1] or key.shape[0] == 0:
            return f"key_moment has shape {list(key.shape)}, not [E, E]"
        if query.dim() != 3 or query.shape[1] != query.shape[2] or query.shape[0] * query.shape[1] != key.shape[0]:
            return f"query_moment has shape {list(query.shape)}, not [N, D, D] with N * D = {key.shape[0]}"
        if self.rotary not in ROTARY_FORMS:
            return f"rotary form {self.rotary!r} is unknown"
        if self.rotary != "none":
            cos, sin = self.relative_cos, self.relative_sin
            if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] == 0 or not 0 < cos.shape[1] <= query.shape[2]:
                return f"relative rows have shapes {list(cos.shape)} and {list(sin.shape)}, not [M, Dr]"
        if self.kept.shape != (len(BUDGETS),) or self.queries.shape != (1,):
            return f"kept has shape {list(self.kept.shape)}, queries {list(self.queries.shape)}"
        if self.projected_moment.dim() != 2 or self.projected_moment.shape[0] != self.projected_moment.shape[1]:
            return f"projected_moment has shape {list(self.projected_moment.shape)}, not [O+1, O+1]"
        for name in _TENSORS:
            if not bool(torch.isfinite(getattr(self, name)).all()):
                return f"{name} holds NaN or infinity"
        return ""


_TENSORS = (
    "key_moment",
    "query_moment",
    "relative_cos",
    "relative_sin",
    "weight_sample",
    "kept",
    "queries",
    "projected_moment",
)


@dataclass(frozen=True)
class Calibration:
    """Moments of every site of one model on some text. Made by :func:`calibrate`, or read by :meth:`load`.

    Attributes:
        sites: by module path, as ``explain()`` prints it (``model.layers.3.self_attn``).
        fingerprint: of the model; see :class:`Fingerprint`.
        tokens: how many tokens were observed.
        context: the longest sequence observed, the longest distance that the bases know of.
    """

    sites: Mapping[str, SiteMoments]
    fingerprint: Fingerprint
    tokens: int
    context: int

    def basis(self, site: str, method: str, rank: int, *, weight: Tensor | None = None, joint: bool = True) -> Basis:
        """The basis of a site; see :mod:`sals_compile.basis` for the methods.

        Args:
            site: module path.
            method: ``"query_weighted"`` or ``"pca"``. ``"weights"`` takes no calibration.
            rank: from 1 to the site's joint key width.
            weight: the key projection's weight ``[E,Hidden]`` of the model being compiled, if known; another model's is
                refused.
            joint: False gives each KV head its own subspace.

        Raises:
            CalibrationError: the site is not in this calibration, or it is another model's.
            ValueError: an impossible rank or method.
        """
        moments = self._site(site)
        if weight is not None and moments.weight_sample.numel():
            width = moments.key_moment.shape[0]
            found = sample(weight)
            if weight.shape[0] != width or not _same(moments.weight_sample.tolist(), found.tolist()):
                raise CalibrationError(
                    f"the calibration was made for another model: {self.fingerprint} has at {site!r} a key projection "
                    f"of {width} rows beginning {_shown(moments.weight_sample)}; the model being compiled has "
                    f"{weight.shape[0]} rows beginning {_shown(found)}. Calibrate this model, or unset the option"
                )
        if method == "pca":
            return bases.pca(moments.key_moment, rank, joint=joint, kv_heads=moments.query_moment.shape[0])
        if method == "query_weighted":
            return bases.query_weighted(
                moments.key_moment, moments.query_moment, moments.relative(), moments.rotary, rank, joint=joint
            )
        if method == "weights":
            raise CalibrationError(
                "basis='weights' is computed from the model's weights and takes no calibration: "
                "leave the option calibration unset, or choose basis='query_weighted' or 'pca'"
            )
        raise CalibrationError(f"basis={method!r} is unknown: choose one of {', '.join(map(repr, bases.METHODS))}")

    def retained(self, site: str, tokens: int) -> float:
        """Share of a site's attention (0 to 1) that its best ``tokens`` tokens get, chosen for all heads together.

        Mean over heads and over queries in the last half of the calibration's sequences, so it belongs to contexts of
        that length; in longer ones as many tokens keep less. It is what no selection can exceed: scores from latents
        choose a little worse.

        Raises:
            CalibrationError: the site is not in this calibration, or has no query that attends to anything.
        """
        curve = self._curve(site)
        for low, high, below, above in zip(BUDGETS, BUDGETS[1:], curve, curve[1:], strict=False):
            if tokens <= high:
                place = (math.log2(max(tokens, low)) - math.log2(low)) / (math.log2(high) - math.log2(low))
                return below + place * (above - below)
        return curve[-1]

    def budget(self, site: str, mass: float) -> int:
        """The fewest tokens, in steps of :data:`STEP` and at most :attr:`context`, that keep ``mass`` of the attention.

        See :meth:`retained`. Raises :class:`CalibrationError` as it does.
        """
        most = -(-self.context // STEP) * STEP
        return next((t for t in range(STEP, most, STEP) if self.retained(site, t) >= mass), most)

    def _curve(self, site: str) -> list[float]:
        moments = self._site(site)
        with _disable_current_modes():  # the compiler asks while AOT traces under a fake mode
            queries, kept = float(moments.queries), moments.kept.tolist()
        if queries == 0:
            raise CalibrationError(
                f"the calibration of {self.fingerprint} knows no attention of site {site!r}, because its mask allowed "
                "none: calibrate on text without padding, or give budget and skip_layers as numbers"
            )
        return [share / queries for share in kept]

    def _site(self, site: str) -> SiteMoments:
        if site not in self.sites:
            near = difflib.get_close_matches(site, self.sites, n=1)
            hint = f" (nearest: {near[0]!r})" if near else ""
            raise CalibrationError(
                f"the calibration of {self.fingerprint} has no site {site!r}{hint}; it has {len(self.sites)} sites. "
                "Calibrate this model, or leave the option calibration unset"
            )
        return self.sites[site]

    def projected(self, site: str, outputs: int) -> tuple[Tensor, Tensor] | None:
        """Mean ``[O]`` and covariance ``[O,O]`` of a site's query projection without its bias, fp64 on the CPU, or None
        where they were not observed. Raises :class:`CalibrationError` where it has not ``outputs`` (``O``) of them.
        """
        moments = self.sites.get(site)
        if moments is None or moments.projected_moment.numel() == 0:
            return None
        if moments.projected_moment.shape[0] != outputs + 1:
            raise CalibrationError(
                f"the calibration of {self.fingerprint} has at {site!r} a query projection of "
                f"{moments.projected_moment.shape[0] - 1} outputs, the model being compiled one of {outputs}: "
                "calibrate this model, or unset the option"
            )
        moment = moments.projected_moment.double() / moments.projected_moment[0, 0]
        mean = moment[0, 1:]
        return mean, moment[1:, 1:] - torch.outer(mean, mean)

    def check(self, model: torch.nn.Module) -> None:
        """Raise :class:`CalibrationError`, naming both, if this is not the calibration of ``model``."""
        found = Fingerprint.of(model)
        if not self.fingerprint.matches(found):
            raise CalibrationError(
                f"the calibration was made for {self.fingerprint}, but the model is {found}: calibrate this model"
            )

    def merge(self, other: Calibration) -> Calibration:
        """The calibration of both texts together. Distances are those of the longer context.

        Raises:
            CalibrationError: the two are of different models (both are named) or have different sites.
        """
        if not self.fingerprint.matches(other.fingerprint):
            raise CalibrationError(
                f"cannot merge calibrations of different models: {self.fingerprint} and {other.fingerprint}"
            )
        if set(self.sites) != set(other.sites):
            odd = sorted(set(self.sites) ^ set(other.sites))
            raise CalibrationError(
                f"cannot merge: {len(odd)} sites are in one calibration only, the first {odd[0]!r}; "
                "calibrate both with the same model code and options"
            )
        longer = self if self.context >= other.context else other
        sites = {}
        for name, first in self.sites.items():
            second = other.sites[name]
            if first.projected_moment.shape != second.projected_moment.shape:
                raise CalibrationError(
                    f"cannot merge: one calibration of site {name!r} holds the query projection's moment, the other "
                    "does not; make both with the same projections="
                )
            if (first.rotary, first.query_moment.shape) != (second.rotary, second.query_moment.shape):
                raise CalibrationError(
                    f"cannot merge: site {name!r} is {first.rotary} {list(first.query_moment.shape)} in one and "
                    f"{second.rotary} {list(second.query_moment.shape)} in the other"
                )
            sites[name] = replace(
                longer.sites[name],
                key_moment=first.key_moment + second.key_moment,
                query_moment=first.query_moment + second.query_moment,
                kept=first.kept + second.kept,
                queries=first.queries + second.queries,
                projected_moment=first.projected_moment + second.projected_moment,
            )
        return Calibration(sites, self.fingerprint, self.tokens + other.tokens, longer.context)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file in one step: it is complete, or what was there before is still there.

        Raises:
            CalibrationError: a moment is not finite or misshapen; nothing is written.
            OSError: the folder cannot be written to; nothing is written.
        """
        from safetensors.torch import save

        for name, moments in self.sites.items():
            if fault := moments.fault():
                raise CalibrationError(
                    f"site {name!r}: {fault}; nothing was written. If it is NaN, the model's activations overflowed "
                    "on this text: run it in bfloat16 or float32, and check the text"
                )
        tensors = {
            f"{name}/{kind}": getattr(moments, kind).detach().to("cpu", torch.float32).contiguous()
            for name, moments in self.sites.items()
            for kind in _TENSORS
            if kind != "projected_moment" or moments.projected_moment.numel()
        }
        description = {
            "fingerprint": vars(self.fingerprint) | {"samples": list(self.fingerprint.samples)},
            "tokens": self.tokens,
            "context": self.context,
            "rotary": {name: moments.rotary for name, moments in self.sites.items()},
        }
        metadata = {"format": FORMAT, "version": str(VERSION), "calibration": json.dumps(description)}
        _write_atomically(Path(path), save(tensors, metadata))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """Read what :meth:`save` wrote. A file that has not changed since it was last read gives the same object.

        Raises:
            CalibrationError: the file is missing, truncated, of another format or version, or inconsistent.
        """
        from safetensors import SafetensorError, safe_open

        file = Path(path)
        if not file.is_file():
            raise CalibrationError(f"no calibration file at {str(file)!r}: make one with `sals calibrate`")
        # The graphs of prefill and decode each read it, and share state because their calibration is one object.
        status = file.stat()
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        known = _loaded.get(str(file.resolve()))
        if known is not None and known[0] == state:
            return known[1]
        tensors: dict[str, Tensor] = {}
        try:
            with safe_open(str(file), framework="pt") as opened:
                metadata = opened.metadata() or {}
                if metadata.get("format") == FORMAT and metadata.get("version") == str(VERSION):
                    tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError, ValueError) as error:
            raise CalibrationError(
                f"{str(file)!r} is no readable safetensors file ({error}): it is truncated or of another kind; "
                "make it again with `sals calibrate`"
            ) from error
        if metadata.get("format") != FORMAT:
            raise CalibrationError(
                f"{str(file)!r} holds tensors but no calibration (format {metadata.get('format')!r}, not {FORMAT!r}): "
                "give the path of a file that `sals calibrate` wrote"
            )
        if metadata.get("version") != str(VERSION):
            raise CalibrationError(
                f"{str(file)!r} is a calibration of version {metadata.get('version')}, this release reads version "
                f"{VERSION}: make it again with `sals calibrate`"
            )
        try:
            read = _assembled(json.loads(metadata["calibration"]), tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise CalibrationError(
                f"{str(file)!r} is damaged ({type(error).__name__}: {error}): make it again with `sals calibrate`"
            ) from error
        _loaded[str(file.resolve())] = (state, read)
        return read


def sample(weight: Tensor) -> Tensor:
    """:data:`SAMPLES` entries ``[SAMPLES]`` of a weight of any shape, evenly spaced, fp32 on the CPU."""
    flat = weight.detach().reshape(-1)
    count = min(SAMPLES, flat.numel())
    index = torch.linspace(0, max(flat.numel() - 1, 0), count, dtype=torch.float64).round().long()
    return flat[index.to(flat.device)].to("cpu", torch.float32)


def key_projection(site: AttentionSite, example: Mapping[Node, Any]) -> tuple[Tensor, Tensor | None] | None:
    """``(weight [E,Hidden], gain [Hidden] or None)``: key projection and the norm before it, if the graph's inputs."""
    found = site.projection
    if found is None or not isinstance(example.get(found.weight), Tensor):
        return None
    weight = example[found.weight].detach()
    if found.transposed:
        weight = weight.T
    if found.rows is not None:
        weight = weight[found.rows[0] : found.rows[1]]
    if weight.shape[0] != site.joint_width:
        return None
    return weight, None if found.norm is None else example[found.norm].detach()


def _same(first: Any, second: Any) -> bool:
    """Equal but for a cast to a 16-bit format."""
    if len(first) != len(second):
        return False
    return all(abs(a - b) <= 0.01 * max(abs(a), abs(b)) + 1e-6 for a, b in zip(first, second, strict=True))


def _shown(values: Tensor) -> str:
    return "[" + ", ".join(f"{v:.3g}" for v in values[:3].tolist()) + ", …]"


def _assembled(description: dict[str, Any], tensors: dict[str, Tensor]) -> Calibration:
    raw = description["fingerprint"]
    fingerprint = Fingerprint(
        str(raw["model"]), int(raw["parameters"]), str(raw["digest"]), tuple(float(s) for s in raw["samples"])
    )
    sites = {}
    for name, rotary in description["rotary"].items():
        held = [k for k in _TENSORS if k != "projected_moment" or f"{name}/{k}" in tensors]
        moments = SiteMoments(rotary=rotary, **{kind: tensors[f"{name}/{kind}"] for kind in held})
        if fault := moments.fault():
            raise ValueError(f"site {name!r}: {fault}")
        sites[name] = moments
    return Calibration(sites, fingerprint, int(description["tokens"]), int(description["context"]))


def _write_atomically(path: Path, content: bytes) -> None:
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner reads; a calibration is not secret.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(scratch, 0o666 & ~mask)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


# ---- making one ------------------------------------------------------------------------------------------------------


def calibrate(
    model: torch.nn.Module,
    batches: Iterable[Tensor | Mapping[str, Any]],
    *,
    context: int | None = None,
    progress: bool = True,
    projections: bool = False,
) -> Calibration:
    """Run a model over text once and keep what its attention sites saw, for ``options={"calibration": ...}``.

    The model is traced as ``torch.compile(model, backend="sals")`` traces it, so any model whose sites match can be
    calibrated, and the sites have the names that the compiler gives them. It runs dense; moments are summed in fp32 on
    the model's device within a batch and in fp64 on the CPU over batches. One site's activations at a time are read.

    Args:
        model: takes token ids ``[B, S]`` as its first argument, or the mappings given as keyword arguments.
        batches: token ids, int64 ``[B, S]`` (or ``[S]``), without padding, each sequence from position 0; or mappings.
            Some 10 000 tokens of text like that to come are enough; longer sequences teach longer distances.
        context: cut token ids into sequences of this many tokens. Default: as they come.
        progress: show a progress bar on stderr.
        projections: also keep the moments of the query projections' outputs (``4 (H D)^2`` bytes a site), by which the
            option ``query_rank`` factors them.

    Raises:
        CalibrationError: no site matches, a sequence is shorter than :data:`SHORTEST` tokens, all of them together have
            fewer tokens than a site has key dims, or activations are not finite. Each says where, and the remedy.
    """
    if context is not None and context < SHORTEST:
        raise CalibrationError(f"context={context} is too short: at least {SHORTEST} tokens are needed")
    model = getattr(model, "_orig_mod", model)
    observer = _Observer(projections)
    forward = torch.compile(_own_code(model.forward), backend=observer.backend)
    parameter = next(model.parameters(), torch.empty(0))
    named = _cheap_arguments(model)
    pieces = _pieces(batches, context)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _bar(pieces, progress) as counted:
            for number, batch in counted:
                if isinstance(batch, Mapping):
                    forward(**{k: _moved(v, parameter.device) for k, v in batch.items()})
                else:
                    forward(batch.to(parameter.device), **named)
                observer.settle(number)
    finally:
        model.train(training)
    sites = observer.sites()
    widest = max(int(m.key_moment.shape[0]) for m in sites.values())
    if observer.tokens < widest:
        raise CalibrationError(
            f"{observer.tokens} tokens of calibration are fewer than the {widest} dims of a joint key, so no basis of "
            f"theirs is known: give at least {4 * widest} tokens, better 10000"
        )
    return Calibration(sites, Fingerprint.of(model), observer.tokens, observer.context)


class _Observer:
    """Sums the moments of every site of every graph that Dynamo traces; its :meth:`backend` compiles those graphs."""

    def __init__(self, projections: bool = False) -> None:
        self.projections = projections
        self.tokens = 0
        self.context = 0
        self.declined: dict[str, str] = {}
        self._records: dict[str, AttentionSite] = {}
        self._weights: dict[str, Tensor] = {}
        self._totals: dict[str, dict[str, Tensor]] = {}
        self._batch: dict[str, dict[str, Tensor]] = {}
        self._rows: dict[str, dict[str, Tensor]] = {}
        self._longest: dict[str, tuple[Tensor, Tensor]] = {}

    # ---- compiling

    def backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Anchor, trace, canonicalize, match and verify as ``backend.py`` does; then run the graph as it was."""
        from torch._functorch.aot_autograd import aot_module_simplified

        from .passes.anchor import anchor, anchoring, pin_capacities

        anchor(gm)
        pin_capacities(gm)

        def compiler(traced: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
            return self._watched(traced, example_inputs)

        with anchoring():
            return aot_module_simplified(
                gm,
                list(example_inputs),
                fw_compiler=compiler,  # type: ignore[arg-type]
                inference_compiler=compiler,  # type: ignore[arg-type]
                keep_inference_input_mutations=True,
            )

    def _watched(self, traced: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from .passes.canonicalize import canonicalize
        from .passes.match.attention import match_graph
        from .passes.verify import verify

        placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
        aligned = len(placeholders) == len(example_inputs)
        example = dict(zip(placeholders, example_inputs, strict=True)) if aligned else {}
        canonicalize(traced)
        matched = match_graph(traced)
        _, failed = verify(matched.sites, example)
        self.declined |= {d.name: d.reason for d in (*matched.declined, *failed)}
        refused = {d.name for d in failed}
        sites = [s for s in matched.sites if s.name not in refused]
        for site in sites:
            self._records[site.name] = site
            with _disable_current_modes():  # AOT traces under a fake mode; the weights are real
                projection = key_projection(site, example)
                if projection is not None:
                    self._weights[site.name] = sample(projection[0])
        watches = self._watches(sites)
        if self.projections:
            self._watch_projections(sites, watches, example)
        return _Watch(traced, watches).run

    def _watch_projections(
        self, sites: Sequence[AttentionSite], watches: dict[Node, list[Callable[[Any], None]]], example: Any
    ) -> None:
        from .passes.low_rank_query import match_query_projection

        for site in sites:
            with contextlib.suppress(Mismatch):  # such a site keeps its projection
                found = match_query_projection(site)
                bias = None if found.bias is None else example[found.bias].detach()
                assert found.product is not None
                watches.setdefault(found.product, []).append(partial(self._add_projected, site, found.rows, bias))

    def _watches(self, sites: Sequence[AttentionSite]) -> dict[Node, list[Callable[[Any], None]]]:
        """What to do with a node's value as soon as it is computed."""
        watches: dict[Node, list[Callable[[Any], None]]] = {}
        for site in sites:
            for kind, operand in (("query_moment", site.query_pre), ("key_moment", site.key_pre)):
                watches.setdefault(operand.node, []).append(partial(self._add, site, kind, operand))
            attention = _Attention(site, partial(self._add_kept, site))
            for node in attention.needed:
                watches.setdefault(node, []).append(partial(attention.take, node))
            if site.key_rotary is not None:
                for node in {site.key_rotary.cos.node, site.key_rotary.sin.node}:
                    watches.setdefault(node, []).append(partial(self._keep_rows, site, node))
        return watches

    # ---- running

    def _add(self, site: AttentionSite, kind: str, operand: Operand, value: Tensor) -> None:
        rows = operand.read(lambda _: value)
        sums = self._batch.setdefault(site.name, {})
        if kind == "query_moment":
            shape: tuple[int, ...] = (site.kv_heads, site.head_dim, site.head_dim)
        else:
            shape = (site.joint_width, site.joint_width)
            sums["tokens"] = torch.tensor(rows.shape[0] * rows.shape[1])
            sums["length"] = torch.tensor(rows.shape[1])
        total = sums.setdefault(kind, torch.zeros(shape, dtype=torch.float32, device=rows.device))
        (reference.observe if kind == "query_moment" else reference.observe_keys)(total, rows)

    def _add_kept(self, site: AttentionSite, kept: Tensor, queries: Tensor) -> None:
        sums = self._batch.setdefault(site.name, {})
        sums["kept"] = sums["kept"] + kept if "kept" in sums else kept
        sums["queries"] = sums["queries"] + queries if "queries" in sums else queries

    def _add_projected(
        self, site: AttentionSite, rows: tuple[int, int] | None, bias: Tensor | None, value: Tensor
    ) -> None:
        value = value if bias is None else value - bias
        value = value if rows is None else value[..., rows[0] : rows[1]]
        sums = self._batch.setdefault(site.name, {})
        value = torch.nn.functional.pad(value, (1, 0), value=1.0)
        width = value.shape[-1]
        total = sums.setdefault(
            "projected_moment", torch.zeros((width, width), dtype=torch.float32, device=value.device)
        )
        reference.observe_keys(total, value.reshape(1, -1, 1, width))

    def _keep_rows(self, site: AttentionSite, node: Node, value: Tensor) -> None:
        assert site.key_rotary is not None
        seen = self._rows.setdefault(site.name, {})
        seen[node.name] = value
        cos, sin = site.key_rotary.cos.node, site.key_rotary.sin.node
        if cos.name in seen and sin.name in seen:
            rows = rotary_rows(site, lambda n: seen[n.name])
            if site.name not in self._longest or rows[0].shape[1] > self._longest[site.name][0].shape[0]:
                self._longest[site.name] = (rows[0][0].float().cpu(), rows[1][0].float().cpu())
            del self._rows[site.name]

    def settle(self, number: int) -> None:
        """After batch ``number``: add its sums to the totals, or say what is wrong with it."""
        if not self._batch:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self.declined.items())[:3])
            raise CalibrationError(
                "no attention site of this model can be calibrated: "
                + (reasons or "none was found in the graphs that were traced")
                + ". explain(model, ...) shows every site and what would make it match"
            )
        shortest = min(int(sums["length"]) for sums in self._batch.values())
        if shortest < SHORTEST:
            raise CalibrationError(_too_short(number, shortest))
        for name, sums in self._batch.items():
            for kind in ("key_moment", "query_moment", "kept", "queries", "projected_moment"):
                if kind not in sums:
                    continue
                moment = sums[kind].to("cpu", torch.float64)
                if not bool(torch.isfinite(moment).all()):
                    raise CalibrationError(
                        f"batch {number}: the {kind.split('_')[0]} activations of site {name!r} hold NaN or infinity; "
                        "run the model in bfloat16 or float32, and check the text"
                    )
                totals = self._totals.setdefault(name, {})
                totals[kind] = totals[kind] + moment if kind in totals else moment
        first = next(iter(self._batch.values()))
        self.tokens += int(first["tokens"])
        self.context = max(self.context, int(first["length"]))
        self._batch.clear()

    def sites(self) -> dict[str, SiteMoments]:
        """The result."""
        if not self._totals:
            raise CalibrationError("there was nothing to calibrate on: batches is empty")
        result = {}
        for name, totals in self._totals.items():
            site = self._records[name]
            facts: dict[str, Any] = {}
            if name in self._weights:
                facts["weight_sample"] = self._weights[name]
            if "projected_moment" in totals:
                facts["projected_moment"] = totals["projected_moment"].float()
            if site.key_rotary is not None:
                cos, sin = relative_rows(*self._longest[name], site.rotary_form, DISTANCES)
                facts |= {"relative_cos": cos.float(), "relative_sin": sin.float()}
            result[name] = SiteMoments(
                totals["key_moment"].float(),
                totals["query_moment"].float(),
                site.rotary_form,
                kept=totals["kept"].float(),
                queries=totals["queries"].float(),
                **facts,
            )
        return result


class _Attention:
    """Gathers what one site's attention is computed from as the graph computes it, then says how concentrated it is."""

    def __init__(self, site: AttentionSite, done: Callable[[Tensor, Tensor], None]) -> None:
        self.site, self.done = site, done
        integers = [i for i in site.modifier_integers if isinstance(i, Node)]
        self.needed = tuple(dict.fromkeys([site.query.node, site.key.node, *site.modifier_tensors, *integers]))
        self.values: dict[Node, Any] = {}

    def take(self, node: Node, value: Any) -> None:
        self.values[node] = value
        if len(self.values) < len(self.needed):
            return
        site, get = self.site, self.values.__getitem__
        query, key = site.query.read(get), site.key.read(get)
        tensors = [get(t) for t in site.modifier_tensors]
        integers = [get(i) if isinstance(i, Node) else i for i in site.modifier_integers]
        self.values = {}  # one site's activations at a time
        self.done(*concentration(site, query, key, tensors, integers))


def concentration(
    site: AttentionSite, query: Tensor, key: Tensor, tensors: Sequence[Tensor], integers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """``(kept [len(BUDGETS)], queries [1])``: see :class:`SiteMoments`.

    ``query [B,L,H,D]`` and ``key [B,S,N,D]`` are rotated; at most :data:`QUERIES` queries of each sequence are looked
    at, from its last half. Sums in fp32.
    """
    batch, length, heads, _ = query.shape
    total, kv_heads = key.shape[1:3]
    count = max(1, min(QUERIES, WORKSPACE // (batch * heads * total)))
    at = torch.linspace(length // 2, length - 1, count, device=query.device).round().long().unique()
    grouped = query[:, at].float().unflatten(2, (kv_heads, -1))
    logits = torch.einsum("blngd,bsnd->bngls", grouped, key.float()).flatten(1, 2) * site.scale
    indices = {
        "b": torch.arange(batch, device=key.device).view(-1, 1, 1, 1),
        "h": torch.arange(heads, device=key.device).view(1, -1, 1, 1),
        "q": at.view(1, 1, -1, 1),
        "kv": torch.arange(total, device=key.device).view(1, 1, 1, -1),
        "score": logits,
    }
    if site.modifier.modifies:
        logits = evaluate(site.modifier.score, indices, tensors, integers)
    if site.modifier.masks:
        logits = torch.where(evaluate(site.modifier.mask, indices, tensors, integers), logits, -torch.inf)
    mass = reference.softmax(logits, None).mean(1)  # [B,L,S]: a joint choice keeps the sum of what it chose
    given = mass.sum(-1, keepdim=True)
    attending = given.squeeze(-1) > 0
    best = mass.sort(-1, descending=True).values.cumsum(-1) / given
    last = torch.tensor(BUDGETS, device=key.device).clamp_max(total) - 1
    return best[..., last][attending].sum(0), attending.sum().float().view(1)


class _Watch(Interpreter):
    """Runs a graph as it is and shows some of its values to whom they concern, when they are computed."""

    def __init__(self, gm: GraphModule, watches: Mapping[Node, Sequence[Callable[[Any], None]]]) -> None:
        super().__init__(gm)
        self.watches = watches

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        for watch in self.watches.get(n, ()):
            watch(value)
        return value


def _too_short(number: int, length: int) -> str:
    return (
        f"batch {number}: sequences of {length} tokens are too short to calibrate on, at least {SHORTEST} are needed; "
        "join texts to sequences as long as the contexts that you expect"
    )


def _pieces(batches: Iterable[Any], context: int | None) -> Iterable[tuple[int, Any]]:
    """``(number, batch)``, token ids checked, made ``[B, S]`` and cut to ``context``."""
    if isinstance(batches, (Tensor, Mapping, str)):
        raise CalibrationError(
            f"batches is a {type(batches).__name__}: pass a list (or any iterable) of token id tensors [B, S]"
        )

    def check(number: int, batch: Any) -> list[tuple[int, Any]]:
        if isinstance(batch, Mapping):
            return [(number, batch)]
        if not isinstance(batch, Tensor) or batch.dim() not in (1, 2) or batch.is_floating_point():
            found = f"{batch.dtype} {list(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise CalibrationError(f"batch {number} is {found}: pass token ids, an integer tensor [B, S], or a mapping")
        batch = batch.unsqueeze(0) if batch.dim() == 1 else batch
        if batch.shape[1] < SHORTEST:
            raise CalibrationError(_too_short(number, batch.shape[1]))
        cuts = [batch] if context is None else [c for c in batch.split(context, 1) if c.shape[1] >= SHORTEST]
        return [(number, c) for c in cuts]

    if isinstance(batches, Sequence):  # checked before anything runs; and the progress bar knows its end
        return [piece for number, batch in enumerate(batches) for piece in check(number, batch)]
    return (piece for number, batch in enumerate(batches) for piece in check(number, batch))


def _cheap_arguments(model: torch.nn.Module) -> dict[str, Any]:
    """Keyword arguments, where the model knows them, that save what calibration does not need."""
    parameters = inspect.signature(model.forward).parameters
    wanted = {"use_cache": False, "logits_to_keep": 1}
    return {name: value for name, value in wanted.items() if name in parameters}


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same method with a code object of its own: Dynamo's limit of recompilations is not shared with the user."""
    function = getattr(forward, "__func__", None)
    if not isinstance(forward, types.MethodType) or not isinstance(function, types.FunctionType):
        return forward
    copied = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(copied, forward.__self__)


@contextlib.contextmanager
def _bar(pieces: Iterable[Any], progress: bool) -> Iterator[Iterable[Any]]:
    if not progress:
        yield pieces
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        total = len(pieces) if isinstance(pieces, Sequence) else None
        yield bar.track(pieces, total=total, description="calibrating, batches")

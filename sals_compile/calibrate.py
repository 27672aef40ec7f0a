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
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import basis as bases
from .basis import Basis
from .kernels.reference import ROTARY_FORMS

FORMAT = "sals-calibration"
VERSION = 1

#: Entries of each weight that a fingerprint remembers, evenly spaced.
SAMPLES = 16


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
        named = sorted(model.named_parameters(remove_duplicate=True), key=lambda item: item[0])
        shapes = json.dumps([[name, list(p.shape)] for name, p in named])
        # A few large weights tell two models of one architecture apart; all of them would make the file large.
        weights = [p for _, p in named if p.dim() >= 2][:4] or [p for _, p in named][:4]
        samples = [value for p in weights for value in sample(p).tolist()]
        digest = hashlib.sha256(shapes.encode()).hexdigest()[:12]
        return Fingerprint(type(model).__name__, sum(p.numel() for _, p in named), digest, tuple(samples))

    def matches(self, other: Fingerprint) -> bool:
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
    """

    key_moment: Tensor
    query_moment: Tensor
    rotary: str = "none"
    relative_cos: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    relative_sin: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    weight_sample: Tensor = field(default_factory=lambda: torch.empty(0))

    def relative(self) -> tuple[Tensor, Tensor] | None:
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
        for name in ("key_moment", "query_moment", "relative_cos", "relative_sin", "weight_sample"):
            if not bool(torch.isfinite(getattr(self, name)).all()):
                return f"{name} holds NaN or infinity"
        return ""


_TENSORS = ("key_moment", "query_moment", "relative_cos", "relative_sin", "weight_sample")


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
        if site not in self.sites:
            near = difflib.get_close_matches(site, self.sites, n=1)
            hint = f" (nearest: {near[0]!r})" if near else ""
            raise CalibrationError(
                f"the calibration of {self.fingerprint} has no site {site!r}{hint}; it has {len(self.sites)} sites. "
                "Calibrate this model, or leave the option calibration unset"
            )
        moments = self.sites[site]
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
            if (first.rotary, first.query_moment.shape) != (second.rotary, second.query_moment.shape):
                raise CalibrationError(
                    f"cannot merge: site {name!r} is {first.rotary} {list(first.query_moment.shape)} in one and "
                    f"{second.rotary} {list(second.query_moment.shape)} in the other"
                )
            sites[name] = replace(
                longer.sites[name],
                key_moment=first.key_moment + second.key_moment,
                query_moment=first.query_moment + second.query_moment,
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
        """Read what :meth:`save` wrote.

        Raises:
            CalibrationError: the file is missing, truncated, of another format or version, or inconsistent.
        """
        from safetensors import SafetensorError, safe_open

        file = Path(path)
        if not file.is_file():
            raise CalibrationError(f"no calibration file at {str(file)!r}: make one with `sals calibrate`")
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
            return _assembled(json.loads(metadata["calibration"]), tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise CalibrationError(
                f"{str(file)!r} is damaged ({type(error).__name__}: {error}): make it again with `sals calibrate`"
            ) from error


def sample(weight: Tensor) -> Tensor:
    """:data:`SAMPLES` entries of a weight, evenly spaced, fp32 on the CPU."""
    flat = weight.detach().reshape(-1)
    count = min(SAMPLES, flat.numel())
    index = torch.linspace(0, max(flat.numel() - 1, 0), count, dtype=torch.float64).round().long()
    return flat[index.to(flat.device)].to("cpu", torch.float32)


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
        moments = SiteMoments(rotary=rotary, **{kind: tensors[f"{name}/{kind}"] for kind in _TENSORS})
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

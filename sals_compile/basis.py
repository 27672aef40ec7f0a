"""Covariances -> the low-rank basis of a site's keys .

Dimensions: ``N`` KV heads, ``D`` head dim, ``E = N*D`` joint key width, ``R`` rank, ``Dr <= D`` rotated dims,
``M`` rotary rows.

Three methods, one result. All find the ``R``-dimensional subspace that keeps most of a covariance; they differ in the
norm in which an error of the key counts:

- :func:`pca` (the paper, arXiv 2510.24273 section 3): every direction of the key counts the same;
- :func:`query_weighted` (ours): a direction counts as much as queries look at it, at the distances at which they look.
  A key at its position meets a query at its own, so with ``Δ`` the distance between them
  ``logit = q^T Rot(-Δ) k = (Rot(Δ) q)^T k``, and the expected squared error of the logits of a key error ``e`` is
  ``e^T M e`` with ``M = blockdiag_n(mean_Δ Rot(Δ) Q_n Rot(Δ)^T)``, where ``Q_n`` is the second moment of the pre-rotary
  queries of KV head ``n``. The direction matters: with ``Rot(-Δ)`` the KL to the dense model doubles (0.017 -> 0.032);
- :func:`weights` (no data): the covariance that the key projection gives to white, normalised hidden states.

Cost: one symmetric eigendecomposition in float64 per site, about ``9 E^3`` flops: 0.4 s at ``E`` = 1024, 1.9 s at 2048
and 19 s at 4096 on one thread of a 2.6 GHz EPYC. Block subspace iteration was measured beside it and dropped: at ``R =
E/2`` it takes 8 to 13 times as long, and at ``E/8`` it is slower too before its residual is small (40 iterations leave
3e-4 at ``E`` = 2048). So there is one path, and its residual is checked.

Left out, from a simulation: latents whose trailing coordinates have 4 bits (``R`` = 5/6 ``E`` at the bytes of ``E``/2)
halve the KL, but double what a rebuild multiplies and change the layout that every kernel reads; values in groups of 64
cost nothing at 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels.reference import ROTARY_FORMS, apply_rotary

METHODS = ("query_weighted", "pca", "weights")

#: Eigenvalues of ``M`` below this fraction of the largest are raised to it: directions that no query looks at keep a
#: finite price, and the decoder (``M^-½``) stays bounded by a thousand times the encoder.
FLOOR = 1e-6


@dataclass(frozen=True)
class Basis:
    """``latent = key @ encoder``, ``key ≈ latent @ decoder``; its first ``Rs`` coordinates are the best of that rank.

    ``encoder [E,R]`` and ``decoder [R,E]`` are fp32; ``eigenvalues [E]`` (fp64, descending, of the whole covariance in
    the method's norm) say what each coordinate carries: their sum from ``R`` on is the expected squared error.
    """

    encoder: Tensor
    decoder: Tensor
    eigenvalues: Tensor
    method: str

    @property
    def rank(self) -> int:
        """``R``, the number of latent coordinates."""
        return self.encoder.shape[1]

    @property
    def retained(self) -> float:
        """Share of the covariance (in the method's norm) that the basis keeps, 0 to 1."""
        total = float(self.eigenvalues.sum())
        return float(self.eigenvalues[: self.rank].sum()) / total if total > 0 else 1.0


def pca(key_moment: Tensor, rank: int, *, joint: bool = True, kv_heads: int = 1) -> Basis:
    """The paper's basis: leading eigenvectors of ``key_moment [E,E]``, the sum of ``k k^T`` over joint pre-rotary keys.

    ``joint=False`` gives each of ``kv_heads`` its own subspace (a block-diagonal encoder) of the same total rank.
    Source: arXiv 2510.24273, section 3. Raises ``ValueError`` for a rank outside 1 to ``E``, a moment that is not
    finite or not square, or ``kv_heads`` that do not divide ``E``; so do the other methods.
    """
    key_moment = _covariance(key_moment, "key_moment")
    return _basis(key_moment, None, rank, 1 if joint else kv_heads, "pca")


def query_weighted(
    key_moment: Tensor,
    query_moment: Tensor,
    relative: tuple[Tensor, Tensor] | None,
    rotary: str,
    rank: int,
    *,
    joint: bool = True,
) -> Basis:
    """The basis with the least expected squared error of the attention logits.

    ``key_moment [E,E]``: sum of ``k k^T`` over joint pre-rotary keys. ``query_moment [N,D,D]``: sum of ``q q^T`` over
    the pre-rotary query heads of each KV head. ``relative``: ``cos``, ``sin [M,Dr]`` of the distances to average over
    (:func:`relative_rows`), or None for a model without rotary embedding. ``joint=False``: see :func:`pca`. Ours; the
    module's text derives it. Raises ``ValueError`` as :func:`pca` does, and for two moments that do not fit.
    """
    key_moment = _covariance(key_moment, "key_moment")
    query_moment = _covariance(query_moment, "query_moment")
    if query_moment.dim() != 3 or query_moment.shape[0] * query_moment.shape[1] != key_moment.shape[0]:
        raise ValueError(
            f"query_moment {list(query_moment.shape)} does not fit key_moment {list(key_moment.shape)}: "
            "pass [N, D, D] with N * D = E, one matrix for each KV head"
        )
    metric = mean_over_distances(query_moment, relative, rotary)
    heads = 1 if joint else query_moment.shape[0]
    return _basis(key_moment, metric.to(key_moment.device), rank, heads, "query_weighted")


def weights(
    key_weight: Tensor, norm_weight: Tensor | None, rank: int, *, joint: bool = True, kv_heads: int = 1
) -> Basis:
    """The basis without data: ``pca`` of the keys of white hidden states, ``C = W_k diag(g)^2 W_k^T``.

    ``key_weight [E,Hidden]``; ``norm_weight [Hidden]`` is the gain ``g`` of the norm before it, None for none.
    ``joint=False``: see :func:`pca`. Raises ``ValueError`` as it does, and for a gain that does not fit the weight.
    """
    weight = _finite(key_weight, "key_weight")
    if weight.dim() != 2:
        raise ValueError(f"key_weight has shape {list(weight.shape)}: pass the projection's weight, [E, Hidden]")
    if norm_weight is not None:
        gain = _finite(norm_weight, "norm_weight")
        if gain.shape != weight.shape[1:]:
            raise ValueError(
                f"norm_weight has shape {list(gain.shape)}, key_weight {list(weight.shape)}: the gain of the norm "
                f"before the key projection has {weight.shape[1]} entries; pass None if there is no such norm"
            )
        weight = weight * gain
    return _basis(weight @ weight.T, None, rank, 1 if joint else kv_heads, "weights")


def factor_projection(
    weight: Tensor, rank: int | float, statistics: tuple[Tensor, Tensor] | None, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """``(down [r,I], up [O,r], shift [O], kept)``: the affine map ``up (down x) + shift`` nearest to ``weight x``.

    Least expected squared error of the outputs for the rank (``passes/low_rank_query.py`` has the proof); ``kept`` is
    the share of their variance that it keeps. fp32.

    ``rank``: an int, or the share of the variance to keep (a float): the smallest rank that does. ``statistics``: mean
    ``[O]`` and covariance ``[O,O]`` of the outputs; None: those of white inputs times the norm's gain
    ``norm_weight [I]``, of mean zero. Raises ``ValueError`` where the statistics are of another number of outputs.
    """
    outputs = weight.shape[0]
    if statistics is None:
        mean, found = torch.zeros(outputs, device=weight.device), weights(weight, norm_weight, outputs)
    else:
        mean, found = statistics[0].to(weight.device, torch.float32), pca(statistics[1].to(weight.device), outputs)
    if found.encoder.shape[0] != outputs:
        raise ValueError(f"the covariance is of {found.encoder.shape[0]} outputs, the weight has {outputs}")
    kept = found.eigenvalues.cumsum(0) / found.eigenvalues.sum().clamp_min(torch.finfo(torch.float64).tiny)
    if isinstance(rank, float):
        rank = min(int((kept < rank - 1e-12).sum()) + 1, outputs)
    up = found.encoder[:, :rank]
    return up.T @ weight.detach().float(), up, mean - up @ (up.T @ mean), float(kept[rank - 1])


def relative_rows(cos: Tensor, sin: Tensor, rotary: str, count: int) -> tuple[Tensor, Tensor]:
    """Rotary rows of up to ``count`` distances, log-spaced from 0 to ``S - 1``: ``cos``, ``sin [M,Dr]`` fp64.

    ``cos``, ``sin [S,Dr]`` are the rows that a model applied at consecutive positions; a distance ``Δ`` is row ``Δ``
    composed with the inverse of row 0. Each pair of dims is a general 2x2 matrix ``[[c1, -s1], [s2, c2]]``, so scaled
    rows (YaRN) are right too: the scale, which a distance does not have, cancels. Raises ``ValueError`` for rows that
    are misshapen, none or singular, and for a count under 1.
    """
    _check_rotary(rotary)
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] == 0 or cos.shape[1] % 2:
        raise ValueError(
            f"cos has shape {list(cos.shape)}, sin {list(sin.shape)}: pass the recorded rows, [S, Dr] each with S >= 1 "
            "and Dr even"
        )
    if count < 1:
        raise ValueError(f"count={count}: at least 1 distance is needed")
    if rotary == "none":
        raise ValueError("rotary='none' has no rows: pass relative=None to query_weighted")
    length = cos.shape[0]
    steps = torch.logspace(0.0, 1.0, max(count - 1, 1), base=float(max(length - 1, 1)), dtype=torch.float64)
    distances = torch.cat((torch.zeros(1, dtype=torch.int64), steps.round().to(torch.int64).clamp_max(length - 1)))
    distances = torch.unique(distances[:count]).to(cos.device)
    c1, c2 = _pairs(_finite(cos, "cos"), rotary)
    s1, s2 = _pairs(_finite(sin, "sin"), rotary)
    determinant = c1[0] * c2[0] + s1[0] * s2[0]
    if bool((determinant.abs() < 1e-12).any()):
        raise ValueError(
            "row 0 of cos and sin is no rotation (its pairs are singular): pass rows that a model has written"
        )
    row = distances.to(c1.device)
    relative_c1 = (c1[row] * c2[0] + s1[row] * s2[0]) / determinant
    relative_s1 = (s1[row] * c1[0] - c1[row] * s1[0]) / determinant
    relative_s2 = (s2[row] * c2[0] - c2[row] * s2[0]) / determinant
    relative_c2 = (c2[row] * c1[0] + s2[row] * s1[0]) / determinant
    return _join(relative_c1, relative_c2, rotary), _join(relative_s1, relative_s2, rotary)


def mean_over_distances(query_moment: Tensor, relative: tuple[Tensor, Tensor] | None, rotary: str) -> Tensor:
    """``mean_Δ Rot(Δ) Q_n Rot(Δ)^T``: what the queries of each KV head look like from the keys. ``[N,D,D]`` fp64.

    ``relative`` is what :func:`relative_rows` returns; ``ValueError`` where it does not fit ``query_moment [N,D,D]``.
    """
    _check_rotary(rotary)
    query_moment = query_moment.to(torch.float64)
    if rotary == "none" or relative is None:
        return query_moment
    cos, sin = (_finite(rows, "relative").to(query_moment.device) for rows in relative)
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[1] > query_moment.shape[-1] or cos.shape[1] % 2:
        raise ValueError(
            f"relative has shapes {list(cos.shape)} and {list(sin.shape)} for head dim {query_moment.shape[-1]}: "
            "pass relative_rows(cos, sin, ...), [M, Dr] each with Dr even and at most D"
        )
    total = torch.zeros_like(query_moment)
    for row_cos, row_sin in zip(cos, sin, strict=True):
        half = apply_rotary(query_moment, row_cos, row_sin, rotary)  # Q Rot^T
        total += apply_rotary(
            half.transpose(-1, -2), row_cos, row_sin, rotary
        )  # Q is symmetric, so this is Rot Q Rot^T
    return total / cos.shape[0]


def _basis(key_moment: Tensor, metric: Tensor | None, rank: int, blocks: int, method: str) -> Basis:
    """Leading eigenvectors of ``M^½ C M^½``, within each of ``blocks`` diagonal blocks; ``metric [N,D,D]`` or None."""
    width = key_moment.shape[0]
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= width:
        raise ValueError(
            f"rank={rank!r} is not possible for a joint key width of {width}: choose an integer from 1 to {width}"
        )
    if blocks < 1 or width % blocks:
        raise ValueError(
            f"kv_heads={blocks} does not divide the joint key width {width}: pass the model's number of KV heads"
        )
    root = inverse = None
    covariance = key_moment
    if metric is not None:
        root, inverse = _square_roots(metric)
        covariance = root @ key_moment @ root
    covariance = (covariance + covariance.T) / 2
    size = width // blocks
    eigenvalues = covariance.new_empty(width)
    vectors = covariance.new_zeros(width, width)
    for start in range(0, width, size):
        part = slice(start, start + size)
        eigenvalues[part], vectors[part, part] = _eigh(covariance[part, part])
    order = torch.argsort(eigenvalues, descending=True, stable=True)
    eigenvalues = eigenvalues[order].clamp_min(0.0)
    vectors = vectors[:, order[:rank]]
    encoder = vectors if root is None else root @ vectors
    decoder = vectors.T if inverse is None else vectors.T @ inverse
    # An eigenvector's sign is arbitrary; fixed, so that the same data give the same basis everywhere.
    signs = encoder.gather(0, encoder.abs().argmax(0, keepdim=True)).sign()
    signs = torch.where(signs == 0, 1.0, signs)
    return Basis((encoder * signs).float(), (decoder * signs.T).float(), eigenvalues, method)


def _square_roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """``M^½`` and ``M^-½`` of ``blockdiag(metric)``, eigenvalues floored; the identity if no query was ever seen."""
    eigenvalues, vectors = torch.linalg.eigh((metric + metric.transpose(-1, -2)) / 2)
    largest = float(eigenvalues.max())
    if largest <= 0.0:
        eigenvalues = torch.ones_like(eigenvalues)
    else:
        eigenvalues = (eigenvalues / largest).clamp_min(FLOOR)
    roots = eigenvalues.sqrt()
    root = (vectors * roots.unsqueeze(-2)) @ vectors.transpose(-1, -2)
    inverse = (vectors / roots.unsqueeze(-2)) @ vectors.transpose(-1, -2)
    return torch.block_diag(*root), torch.block_diag(*inverse)


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.linalg.eigh`` with its residual checked: a basis that is silently wrong would only show as bad text."""
    scale = matrix.abs().max().clamp_min(torch.finfo(matrix.dtype).tiny)
    eigenvalues, vectors = torch.linalg.eigh(matrix / scale)
    residual = float((matrix / scale @ vectors - vectors * eigenvalues).abs().max())
    if not residual <= 1e-9 * matrix.shape[0]:
        raise ArithmeticError(
            f"the eigendecomposition of a {list(matrix.shape)} covariance failed (residual {residual:.1e})"
        )
    return eigenvalues * scale, vectors


def _covariance(matrix: Tensor, name: str) -> Tensor:
    if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ValueError(
            f"{name} has shape {list(matrix.shape)}: pass square second moments, such as a Calibration holds"
        )
    matrix = _finite(matrix, name)
    return (matrix + matrix.transpose(-1, -2)) / 2


def _finite(tensor: Tensor, name: str) -> Tensor:
    """In fp64 on the tensor's device (on the CPU where the device has no fp64), or an error if not finite."""
    tensor = tensor.detach()
    tensor = tensor.to("cpu" if tensor.device.type == "mps" else tensor.device, torch.float64)
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(
            f"{name} holds NaN or infinity: the model's activations were not finite on the calibration text; "
            "run the model in bfloat16 or float32, and check its inputs"
        )
    return tensor


def _check_rotary(rotary: str) -> None:
    if rotary not in ROTARY_FORMS:
        raise ValueError(f"rotary={rotary!r} is unknown: choose one of {', '.join(map(repr, ROTARY_FORMS))}")


def _pairs(rows: Tensor, rotary: str) -> tuple[Tensor, Tensor]:
    """The entries of the first and of the second dim of each rotated pair, ``[S,Dr/2]`` each."""
    first, second = rows.chunk(2, dim=-1) if rotary == "half" else (rows[:, 0::2], rows[:, 1::2])
    return first, second


def _join(first: Tensor, second: Tensor, rotary: str) -> Tensor:
    """The inverse of :func:`_pairs`."""
    if rotary == "half":
        return torch.cat((first, second), dim=-1)
    return torch.stack((first, second), dim=-1).flatten(-2)

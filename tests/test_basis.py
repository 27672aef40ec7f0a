"""Properties of the bases: projections, optimal in their norm, deterministic, whatever the covariance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sals_compile import basis
from sals_compile.kernels import reference

FORMS = ("none", "half", "interleaved")


@st.composite
def sites(draw):
    """Random keys and queries of a site: ``(keys [T,N,D], queries [T,N,G,D], cos [S,Dr], sin [S,Dr], rotary)``."""
    seed = draw(st.integers(0, 2**20))
    heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (3, 2)]))
    dim = draw(st.sampled_from([4, 8]))
    rotary = draw(st.sampled_from(FORMS))
    rotary_dim = draw(st.sampled_from([dim, dim // 2]))
    tokens = draw(st.sampled_from([2, 5, 40]))  # fewer tokens than E: a rank-deficient covariance
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0, -draw(st.integers(0, 6)), heads * dim)
    keys = torch.randn(tokens, heads * dim, generator=generator) * spread
    queries = torch.randn(tokens, heads, groups, dim, generator=generator) * spread.flip(0)[:dim]
    scale = draw(st.sampled_from([1.0, 1.3]))
    cos, sin = rows(rotary, rotary_dim, 20, scale)
    return keys.view(tokens, heads, dim), queries, cos, sin, rotary


def rows(rotary, rotary_dim, length, scale=1.0, start=0):
    frequencies = 10.0 ** -torch.arange(0, 2, 4 / rotary_dim)
    angles = (torch.arange(length) + start).unsqueeze(1) * frequencies
    angles = torch.cat((angles, angles), -1) if rotary == "half" else angles.repeat_interleave(2, -1)
    return angles.cos() * scale, angles.sin() * scale


def moments(keys, queries):
    joint = keys.flatten(1).double()
    per_head = queries.double().permute(1, 0, 2, 3).flatten(1, 2)
    return joint.T @ joint, per_head.transpose(1, 2) @ per_head


def make(method, data, rank, joint=True):
    keys, queries, cos, sin, rotary = data
    key_moment, query_moment = moments(keys, queries)
    if method == "query_weighted":
        relative = None if rotary == "none" else basis.relative_rows(cos, sin, rotary, 8)
        return basis.query_weighted(key_moment, query_moment, relative, rotary, rank, joint=joint)
    if method == "pca":
        return basis.pca(key_moment, rank, joint=joint, kv_heads=keys.shape[1])
    gain = torch.linspace(0.5, 2.0, keys.shape[0])
    return basis.weights(keys.flatten(1).T, gain, rank, joint=joint, kv_heads=keys.shape[1])


@settings(max_examples=60)
@given(sites(), st.sampled_from(basis.METHODS), st.booleans(), st.integers(1, 24))
def test_encoder_and_decoder_project(data, method, joint, rank):
    width = data[0][0].numel()
    rank = min(rank, width)
    made = make(method, data, rank, joint)
    assert made.encoder.shape == (width, rank) and made.decoder.shape == (rank, width)
    assert made.encoder.dtype == made.decoder.dtype == torch.float32
    assert made.rank == rank and made.method == method
    # decoder @ encoder = I_R is what makes encoder @ decoder a projection.
    torch.testing.assert_close(
        made.decoder.double() @ made.encoder.double(), torch.eye(rank).double(), atol=2e-4, rtol=0
    )
    assert bool((made.eigenvalues.diff() <= 0).all()) and float(made.eigenvalues.min()) >= 0
    assert 0 <= made.retained <= 1 + 1e-12
    if not joint:
        heads, dim = data[0].shape[1:]
        owned = made.encoder.view(heads, dim, rank).abs().amax(1) > 0
        assert bool((owned.sum(0) == 1).all()), "each coordinate of a per-head basis belongs to one KV head"


@settings(max_examples=40)
@given(sites(), st.sampled_from(basis.METHODS), st.booleans())
def test_full_rank_reproduces_the_keys(data, method, joint):
    keys = data[0].flatten(1)
    made = make(method, data, keys.shape[1], joint)
    rebuilt = keys @ made.encoder @ made.decoder
    torch.testing.assert_close(rebuilt, keys, atol=2e-4 * float(keys.abs().max()), rtol=0)


@settings(max_examples=40)
@given(sites(), st.sampled_from(basis.METHODS), st.integers(1, 12), st.integers(1, 24))
def test_first_coordinates_are_the_smaller_basis(data, method, small, large):
    width = data[0][0].numel()
    large = min(large, width)
    small = min(small, large)
    whole, part = make(method, data, large), make(method, data, small)
    torch.testing.assert_close(whole.encoder[:, :small], part.encoder, atol=0, rtol=0)
    torch.testing.assert_close(whole.decoder[:small], part.decoder, atol=0, rtol=0)


def logit_error(made, data):
    """Brute force: the squared error of every query's logit with every key at every distance of the basis."""
    keys, queries, cos, sin, rotary = data
    keys, queries = keys.double(), queries.double()
    rebuilt = (keys.flatten(1) @ made.encoder.double() @ made.decoder.double()).view_as(keys)
    error = rebuilt - keys
    if rotary == "none":
        return float(torch.einsum("qngd,knd->qkng", queries, error).square().sum())
    total = 0.0
    for row_cos, row_sin in zip(*basis.relative_rows(cos, sin, rotary, 8), strict=True):
        # The key stands at position 0, the query a distance later.
        rotated = reference.apply_rotary(queries, row_cos, row_sin, rotary)
        total += float(torch.einsum("qngd,knd->qkng", rotated, error).square().sum())
    return total


@settings(max_examples=60)
@given(sites(), st.integers(1, 20))
def test_query_weighted_has_the_least_logit_error(data, rank):
    rank = min(rank, data[0][0].numel())
    ours = logit_error(make("query_weighted", data, rank), data)
    largest = logit_error(
        basis.Basis(torch.zeros(data[0][0].numel(), 1), torch.zeros(1, data[0][0].numel()), torch.ones(1), ""), data
    )
    for method, joint in (("pca", True), ("pca", False), ("query_weighted", False)):
        other = logit_error(make(method, data, rank, joint), data)
        assert ours <= other * 1.001 + 1e-6 * largest, (method, joint)


@settings(max_examples=40)
@given(sites(), st.integers(1, 20))
def test_pca_has_the_least_key_error(data, rank):
    keys = data[0].flatten(1).double()
    rank = min(rank, keys.shape[1])

    def error(made):
        return float((keys @ made.encoder.double() @ made.decoder.double() - keys).square().sum())

    ours = error(make("pca", data, rank))
    assert ours <= error(make("query_weighted", data, rank)) * 1.001 + 1e-9 * float(keys.square().sum())
    made = make("pca", data, rank)
    assert math.isclose(
        ours, float(made.eigenvalues[rank:].sum()), rel_tol=1e-3, abs_tol=1e-5 * float(keys.square().sum())
    )


@settings(max_examples=30)
@given(sites(), st.sampled_from(basis.METHODS), st.booleans(), st.floats(1e-20, 1e20))
def test_deterministic_and_indifferent_to_scale(data, method, joint, scale):
    width = data[0][0].numel()
    first, second = make(method, data, width // 2, joint), make(method, data, width // 2, joint)
    assert torch.equal(first.encoder, second.encoder) and torch.equal(first.decoder, second.decoder)
    largest = first.encoder.gather(0, first.encoder.abs().argmax(0, keepdim=True))
    assert bool((largest > 0).all()), "the entry of largest magnitude of every coordinate is positive"
    key_moment, _ = moments(*data[:2])
    scaled = basis.pca(key_moment * scale, 1)
    torch.testing.assert_close(scaled.encoder, basis.pca(key_moment, 1).encoder, atol=1e-4, rtol=0)


@settings(max_examples=40)
@given(
    st.sampled_from(["half", "interleaved"]),
    st.sampled_from([2, 8]),
    st.integers(1, 40),
    st.integers(1, 50),
    st.integers(0, 100),
    st.sampled_from([1.0, 1.4]),
)
def test_relative_rows_are_rotations_by_the_distance(rotary, rotary_dim, length, count, start, scale):
    cos, sin = rows(rotary, rotary_dim, length, scale, start)
    relative_cos, relative_sin = basis.relative_rows(cos, sin, rotary, count)
    expected_cos, expected_sin = rows(rotary, rotary_dim, length)
    assert 1 <= relative_cos.shape[0] <= min(count, length) and relative_cos.shape[1] == rotary_dim
    found = []
    for row_cos, row_sin in zip(relative_cos, relative_sin, strict=True):
        off = ((expected_cos - row_cos).abs() + (expected_sin - row_sin).abs()).amax(-1)
        found.append(int(off.argmin()))
        assert float(off.min()) < 1e-4
    if rotary_dim > 2:  # with one frequency of 1 rad, distances can coincide
        assert found == sorted(set(found)) and found[0] == 0
        if count > 1:
            assert found[-1] == length - 1


def test_mean_over_distances_against_brute_force():
    data = torch.randn(7, 2, 8, generator=torch.Generator().manual_seed(0)).double()
    cos, sin = (r.double() for r in rows("interleaved", 4, 5))
    moment = torch.einsum("tnd,tne->nde", data, data)
    expected = torch.zeros_like(moment)
    for p in range(5):
        rotated = reference.apply_rotary(data, cos[p], sin[p], "interleaved")
        expected += torch.einsum("tnd,tne->nde", rotated, rotated) / 5
    torch.testing.assert_close(basis.mean_over_distances(moment, (cos, sin), "interleaved"), expected)


def test_a_site_that_saw_nothing_still_has_a_basis():
    zero = torch.zeros(8, 8)
    for made in (
        basis.pca(zero, 3),
        basis.query_weighted(zero, torch.zeros(2, 4, 4), None, "none", 3),
        basis.query_weighted(torch.eye(8), torch.zeros(2, 4, 4), None, "none", 3),
    ):
        torch.testing.assert_close(made.decoder @ made.encoder, torch.eye(3))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: basis.pca(torch.eye(8), 9), ["rank=9", "1 to 8"]),
        (lambda: basis.pca(torch.eye(8), 0), ["rank=0", "1 to 8"]),
        (lambda: basis.pca(torch.eye(8), 2.0), ["rank=2.0", "integer"]),
        (lambda: basis.pca(torch.eye(8), 2, joint=False, kv_heads=3), ["kv_heads=3", "8"]),
        (lambda: basis.pca(torch.ones(8, 4), 2), ["key_moment", "[8, 4]"]),
        (lambda: basis.pca(torch.eye(8) * torch.nan, 2), ["key_moment", "NaN", "finite"]),
        (
            lambda: basis.query_weighted(torch.eye(8), torch.zeros(3, 4, 4), None, "none", 2),
            ["query_moment", "[3, 4, 4]"],
        ),
        (lambda: basis.query_weighted(torch.eye(8), torch.zeros(2, 4, 4), None, "spiral", 2), ["'spiral'", "'half'"]),
        (
            lambda: basis.query_weighted(torch.eye(8), torch.zeros(2, 4, 4), (torch.ones(1, 6),) * 2, "half", 2),
            ["relative", "[1, 6]", "head dim 4"],
        ),
        (lambda: basis.weights(torch.ones(8, 6), torch.ones(5), 2), ["norm_weight", "[5]", "6"]),
        (lambda: basis.relative_rows(torch.ones(4, 3), torch.ones(4, 3), "half", 2), ["[4, 3]", "Dr even"]),
        (lambda: basis.relative_rows(torch.zeros(4, 2), torch.zeros(4, 2), "half", 2), ["row 0", "singular"]),
        (lambda: basis.relative_rows(torch.ones(4, 2), torch.zeros(4, 2), "half", 0), ["count=0"]),
    ],
)
def test_errors_name_option_value_and_remedy(call, words):
    with pytest.raises(ValueError) as error:
        call()
    for word in words:
        assert word in str(error.value)

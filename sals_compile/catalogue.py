"""Models that people run, tiny and with random weights, and what the compiler finds in each (``sals doctor --models``,
the README's table, ``tests/test_catalogue.py``).

An :class:`Entry` builds a model and drives it: a prefill and cached decode where the model has a cache, one forward
where it has none. ``sites`` is what each graph must hold rewritten; ``declined`` a part of the reason that each
declined site must give. Models of transformers are skipped where it is not installed.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import report

VOCABULARY = 96
Call = Callable[..., Any]

#: How an entry is compiled: dtype, and torch.compile's ``dynamic`` (True: every size is a symbol from the first call).
PROFILES: dict[str, tuple[torch.dtype, bool | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp32-dynamic": (torch.float32, True),
    "bf16-dynamic": (torch.bfloat16, True),
}
#: Largest relative error of exact mode accepted, beside the model's own eager run, by dtype.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Entry:
    """``build()`` gives the module; ``drive(module, call)`` calls ``call`` (the compiled module, or itself) and returns
    what to compare."""

    name: str
    build: Callable[[], nn.Module]
    drive: Callable[[nn.Module, Call], list[Tensor]]
    #: rewritten sites per graph
    sites: int
    #: a part of each declined site's reason; empty: none may be declined
    declined: str = ""
    #: attention implementations of transformers to try; None where the model has one of its own
    implementations: tuple[str | None, ...] = (None,)
    #: why no site is in sight when every size is a symbol; empty: the same are as otherwise
    cut: str = ""

    @property
    def cached(self) -> bool:
        """Whether the first call is a prefill and the others decode."""
        return self.drive in (decode, decode_hidden)


@dataclass(frozen=True)
class Row:
    """One line of the table: what one phase of a model came to. ``verdict`` is ``rewritten``, ``declined`` (as
    expected), ``failed`` or ``skipped``; ``detail`` says why, where that is not plain."""

    model: str
    implementation: str
    profile: str
    phase: str
    expected: int
    found: int
    rewritten: int
    error: float
    verdict: str
    detail: str = ""


def _config(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | more


_GROUPED = {"num_key_value_heads": 2}


def _transformers(kind: str, **more: Any) -> Callable[[], nn.Module]:
    """Builder of ``transformers.<kind>`` from its configuration class."""

    def build() -> nn.Module:
        import transformers

        model_class = getattr(transformers, kind, None)
        if model_class is None:
            raise ImportError(f"transformers {importlib.metadata.version('transformers')} has no {kind}")
        return model_class(model_class.config_class(**more))

    return build


def _random(module: nn.Module, *shape: int) -> Tensor:
    """Seeded noise in the module's type."""
    floating = (t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point())
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(next(floating))


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def decode(module: nn.Module, call: Call) -> list[Tensor]:
    """Prefill 8 tokens into a ``StaticCache`` and decode 3."""
    import transformers

    config: Any = module.config
    cache = transformers.StaticCache(config=config, max_cache_len=32)
    ids = _ids(2, 11)
    outputs = [call(ids[:, :8], past_key_values=cache).logits]
    outputs += [call(ids[:, t : t + 1], past_key_values=cache).logits for t in range(8, 11)]
    return outputs


def forward_ids(module: nn.Module, call: Call) -> list[Tensor]:
    """One forward over padded token ids."""
    ids = _ids(2, 12)
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    return [call(ids, attention_mask=mask)[0][mask.bool()]]


def forward_whole(module: nn.Module, call: Call) -> list[Tensor]:
    """One causal forward without a cache."""
    return [call(_ids(2, 12), use_cache=False)[0]]


def forward_pixels(module: nn.Module, call: Call) -> list[Tensor]:
    return [call(_random(module, 2, 3, 16, 16))[0]]


def forward_pair(module: nn.Module, call: Call) -> list[Tensor]:
    """Encoder and decoder over token ids."""
    return [call(input_ids=_ids(2, 12), decoder_input_ids=_ids(2, 7), use_cache=False)[0]]


def forward_audio(module: nn.Module, call: Call) -> list[Tensor]:
    return [call(input_features=_random(module, 2, 16, 64), decoder_input_ids=_ids(2, 7), use_cache=False)[0]]


def forward_hidden(module: nn.Module, call: Call) -> list[Tensor]:
    return [call(_random(module, 2, 12, 32))]


class ComplexLlamaAttention(nn.Module):
    """After Llama's original code: rotary in complex numbers, a cache written by slices, heads by ``expand``."""

    cache_k: Tensor
    cache_v: Tensor
    freqs_cis: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.wk, self.wv = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)
        self.register_buffer("cache_k", torch.zeros(2, 32, 2, 8))
        self.register_buffer("cache_v", torch.zeros(2, 32, 2, 8))
        angles = torch.outer(torch.arange(64).float(), 1.0 / 100.0 ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))

    @staticmethod
    def turn(x: Tensor, freqs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)

    def forward(self, x: Tensor, start: int) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = q.view(batch, length, 4, 8), k.view(batch, length, 2, 8), v.view(batch, length, 2, 8)
        freqs = self.freqs_cis[start : start + length]
        q, k = self.turn(q, freqs), self.turn(k, freqs)
        self.cache_k[:batch, start : start + length] = k
        self.cache_v[:batch, start : start + length] = v
        keys, values = self.cache_k[:batch, : start + length], self.cache_v[:batch, : start + length]
        keys, values = (
            t[:, :, :, None, :].expand(batch, t.shape[1], 2, 2, 8).reshape(batch, -1, 4, 8) for t in (keys, values)
        )
        q, keys, values = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        scores = torch.matmul(q, keys.transpose(2, 3)) / 8**0.5
        if length > 1:
            mask = torch.full((length, length), float("-inf"))
            scores = scores + torch.hstack([torch.zeros(length, start), torch.triu(mask, diagonal=1)]).type_as(q)
        scores = torch.softmax(scores.float(), dim=-1).type_as(q)
        return self.wo(torch.matmul(scores, values).transpose(1, 2).reshape(batch, length, -1))


def decode_hidden(module: nn.Module, call: Call) -> list[Tensor]:
    x = _random(module, 2, 11, 32)
    return [call(x[:, :8], 0)] + [call(x[:, t : t + 1], t) for t in range(8, 11)]


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` over itself, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


class Encoder(nn.Module):
    """``nn.TransformerEncoder``, causal and with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        padding = torch.arange(length) >= torch.tensor([[length - 2], [length]])
        # Said, because finding out reads the mask's values, which no compiler can trace.
        return self.layers(x, mask=mask, src_key_padding_mask=padding, is_causal=True)


class EncoderDecoder(nn.Module):
    """``nn.Transformer``: self-attention in both halves, and cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(32, 4, 1, 1, 48, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        target = x[:, :7]
        mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=x.dtype)
        return self.layers(x, target, tgt_mask=mask, tgt_is_causal=True)


class FlexAttention(nn.Module):
    """``flex_attention`` with a ``score_mod`` and a ``block_mask``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.slopes = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, 4, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        slopes = self.slopes

        def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + slopes[h] * (kv_idx - q_idx)

        def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return kv_idx <= q_idx

        mask = create_block_mask(causal, None, None, length, length, device="cpu")
        return flex_attention(q, k, v, score_mod=bias, block_mask=mask).transpose(1, 2).flatten(2)


_BOTH = ("sdpa", "eager")
_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ENTRIES: tuple[Entry, ...] = (
    Entry("Llama", _transformers("LlamaForCausalLM", **_config(**_GROUPED)), decode, 2, implementations=_BOTH),
    Entry(
        "Mistral",
        _transformers("MistralForCausalLM", **_config(sliding_window=16, **_GROUPED)),
        decode,
        2,
        implementations=_BOTH,
    ),
    Entry("Qwen2", _transformers("Qwen2ForCausalLM", **_config(**_GROUPED)), decode, 2, implementations=_BOTH),
    Entry(
        "Qwen3", _transformers("Qwen3ForCausalLM", **_config(head_dim=8, **_GROUPED)), decode, 2, implementations=_BOTH
    ),
    Entry(
        "Gemma2",
        _transformers("Gemma2ForCausalLM", **_config(head_dim=8, sliding_window=16, **_GROUPED)),
        decode,
        2,
        implementations=("eager",),
    ),
    Entry("GPT-NeoX", _transformers("GPTNeoXForCausalLM", **_config()), decode, 2, implementations=_BOTH),
    Entry("GPT-J", _transformers("GPTJForCausalLM", rotary_dim=4, **_GPT), decode, 2, implementations=("eager",)),
    Entry(
        "Phi-3",
        _transformers("Phi3ForCausalLM", **_config(original_max_position_embeddings=128, **_GROUPED)),
        decode,
        2,
        implementations=_BOTH,
    ),
    Entry(
        "Falcon",
        _transformers(
            "FalconForCausalLM", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
        ),
        decode,
        2,
        implementations=_BOTH,
    ),
    Entry(
        "BLOOM",
        _transformers("BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
        decode,
        2,
    ),
    Entry("GPT-2", _transformers("GPT2LMHeadModel", **_GPT), decode, 2, implementations=_BOTH),
    Entry(
        "gpt-oss",
        _transformers(
            "GptOssForCausalLM",
            **_config(head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=16, **_GROUPED),
        ),
        decode,
        2,
        implementations=("eager",),
    ),
    Entry(
        "Llama, whole sequence",
        _transformers("LlamaForCausalLM", **_config(**_GROUPED)),
        forward_whole,
        2,
        implementations=_BOTH,
    ),
    Entry("BERT", _transformers("BertModel", vocab_size=VOCABULARY, **_ENCODER), forward_ids, 2, implementations=_BOTH),
    Entry(
        "T5",
        _transformers("T5Model", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        forward_pair,
        6,
    ),
    Entry(
        "ViT",
        _transformers("ViTModel", image_size=16, patch_size=4, **_ENCODER),
        forward_pixels,
        2,
        implementations=_BOTH,
    ),
    Entry(
        "Whisper",
        _transformers(
            "WhisperModel",
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_mel_bins=16,
            max_source_positions=32,
            max_target_positions=32,
            pad_token_id=0,
            decoder_start_token_id=1,
        ),
        forward_audio,
        3,
        implementations=_BOTH,
    ),
    Entry("Llama, original complex form", ComplexLlamaAttention, decode_hidden, 1),
    Entry("nn.MultiheadAttention", SelfAttention, forward_hidden, 1),
    Entry(
        "nn.TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), forward_hidden, 1
    ),
    Entry("nn.TransformerEncoder, causal and padded", Encoder, forward_hidden, 2),
    Entry("nn.Transformer", EncoderDecoder, forward_hidden, 3),
    Entry("FlexAttention", FlexAttention, forward_hidden, 1),
    Entry(
        "DeBERTa-v2",
        _transformers(
            "DebertaV2Model",
            vocab_size=VOCABULARY,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            max_relative_positions=16,
            position_biased_input=False,
            **_ENCODER,
        ),
        forward_ids,
        2,
    ),
    Entry(
        "Longformer",
        _transformers(
            "LongformerModel", vocab_size=VOCABULARY, attention_window=4, max_position_embeddings=64, **_ENCODER
        ),
        forward_ids,
        0,
        declined="no matrix product leads here",
        cut="the model reads a tensor's value to size its windows, so Dynamo cuts the graph around the softmax",
    ),
    Entry(
        "DeepSeek-V3",
        _transformers(
            "DeepseekV3ForCausalLM",
            **_config(
                moe_intermediate_size=16,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=2,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=4,
                qk_nope_head_dim=8,
                v_head_dim=8,
                num_key_value_heads=4,
            ),
        ),
        decode,
        2,
        implementations=("eager",),
    ),
)


def examine(entry: Entry, implementation: str | None, profile: str, **options: Any) -> list[Row]:
    """Compile the entry in exact mode, run it beside its eager self and count its sites: a row per phase."""
    dtype, dynamic = PROFILES[profile]
    torch.manual_seed(0)
    torch._dynamo.reset()
    # Module.to would make complex buffers real.
    module = entry.build().eval()._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)
    if implementation is not None:
        module.set_attn_implementation(implementation)
    chosen = {"attention": "exact", "lowering": "eager"} | options
    compiled = torch.compile(module.forward, backend="sals", dynamic=dynamic, options=chosen)
    graphs: list[list[report.GraphReport]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        before = report.compiled_reports()
        result = compiled(*args, **kwargs)
        # Named by identity: the list of reports is bounded.
        new = [r for r in report.compiled_reports() if r.sites and not any(r is b for b in before)]
        graphs.append(new)
        return result

    state = {k: v.clone() for k, v in module.state_dict().items()} | {k: v.clone() for k, v in module.named_buffers()}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = entry.drive(module, module.forward)
        module.load_state_dict(state, strict=False)
        for name, buffer in module.named_buffers():
            buffer.copy_(state[name])
        actual = entry.drive(module, call)
    errors = [float((a - e).norm() / e.norm().clamp_min(1e-12)) for a, e in zip(actual, expected, strict=True)]
    phases = {"forward": slice(0, None)}
    if entry.cached:
        phases = {"prefill": slice(0, 1), "decode": slice(1, None)}
    rows: list[Row] = []
    known: list[report.GraphReport] = []
    for phase, calls in phases.items():
        known = [g for new in graphs[calls] for g in new] or known  # a graph with symbolic sizes may serve both
        error = max(errors[calls])
        sites = 0 if dynamic and entry.cut else entry.sites
        verdict, detail = _verdict(entry, known, sites, bool(dynamic and entry.cut), error, TOLERANCE[dtype])
        found = (len(known[0].sites), known[0].rewritten) if known else (0, 0)
        rows.append(Row(entry.name, implementation or "own", profile, phase, sites, *found, error, verdict, detail))
    return rows


def _verdict(
    entry: Entry, graphs: Sequence[report.GraphReport], sites: int, cut: bool, error: float, tolerance: float
) -> tuple[str, str]:
    """Verdict and detail of one phase."""
    reasons = [s.reason for g in graphs for s in g.sites if s.status == "declined"]
    rewritten = [g.rewritten for g in graphs]
    if not error <= tolerance:
        return "failed", f"relative error {error:.1e} over {tolerance:.0e}"
    if cut:
        return ("failed", "a site is in sight: update the catalogue") if graphs else ("declined", entry.cut)
    if any(n != sites for n in rewritten) or (sites and not graphs):
        return "failed", f"rewritten per graph {rewritten}, expected {sites}" + "".join(f"; {r}" for r in reasons[:1])
    if any(not entry.declined or entry.declined not in reason for reason in reasons):
        return "failed", f"declined: {reasons[0]}"
    if entry.declined and not reasons:
        return "failed", "nothing was declined"
    return ("declined", reasons[0]) if reasons else ("rewritten", "")


def cases(entries: Sequence[Entry], profiles: Sequence[str]) -> list[tuple[Entry, str | None, str]]:
    """Every entry in each of its implementations and each profile."""
    return [(e, i, p) for e in entries for i in e.implementations for p in profiles]


def rows(work: Sequence[tuple[Entry, str | None, str]]) -> Iterator[list[Row]]:
    """The rows of each case as it ends; what raises has failed, and what is not installed is skipped."""
    for entry, implementation, profile in work:
        try:
            yield examine(entry, implementation, profile)
        except Exception as error:
            verdict = "skipped" if isinstance(error, ImportError) else "failed"
            reason = (str(error).strip().splitlines() or [""])[0]
            if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
                reason = "needs pip install 'sals-compile[transformers]'"
            elif verdict == "failed":
                reason = f"{type(error).__name__}: {reason}"
            nan = float("nan")
            yield [Row(entry.name, implementation or "own", profile, "", entry.sites, 0, 0, nan, verdict, reason)]


# ---- the README's table ----------------------------------------------------------------------------------------------

_BEGIN, _END = "<!-- table:models -->", "<!-- /table:models -->"


def markdown(found: Sequence[Row], profiles: Sequence[str]) -> str:
    """The rows as a Markdown table: a line per model and implementation, the largest error of each profile."""
    lines = ["| model | attention | sites | " + " | ".join(profiles) + " |", "|---" * (3 + len(profiles)) + "|"]
    reasons: dict[str, str] = {}
    for model, implementation in dict.fromkeys((r.model, r.implementation) for r in found):
        own = [r for r in found if (r.model, r.implementation) == (model, implementation)]
        plain = [r for r in own if r.profile == own[0].profile]
        sites = ", ".join(f"{r.phase} {r.rewritten} of {r.found}" for r in plain)
        cells = []
        for profile in profiles:
            these = [r for r in own if r.profile == profile]
            verdicts = {r.verdict for r in these}
            error = max((r.error for r in these), default=0.0)
            reasons |= {f"{model}, {profile}": r.detail for r in these if r.detail}
            cells.append(f"{error:.0e}" if verdicts == {"rewritten"} else ", ".join(sorted(verdicts)))
        lines.append(f"| {model} | {implementation} | {sites} | " + " | ".join(cells) + " |")
    by_reason: dict[str, list[str]] = {}
    for where, reason in reasons.items():
        by_reason.setdefault(reason, []).append(where)
    notes = [f"- {'; '.join(where)}: {reason}" for reason, where in by_reason.items()]
    return "\n".join([*lines, "", *notes] if notes else lines)


def write_markdown(path: Path, text: str) -> None:
    """Put ``text`` between the marks ``<!-- table:models -->`` and ``<!-- /table:models -->`` of a file."""
    document = path.read_text(encoding="utf-8")
    before, begin, rest = document.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise OSError(f"{path} has no marks {_BEGIN} and {_END} to put the table between")
    path.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}", encoding="utf-8")

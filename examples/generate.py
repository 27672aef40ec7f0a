"""Decode a real model sparsely: SmolLM2-135M with real weights, dense beside SALS, on one long prompt.

    python examples/generate.py                        # what `make demo` runs
    python examples/generate.py --tokens 8000 --json out.json
    python examples/generate.py --model ./my-llama     # a local folder or a hub id

The only line that matters is ``torch.compile(model.forward, backend="sals")``; the rest measures what it did.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import StaticCache

import sals_compile
from sals_compile.bench import models

QUESTION = "Question: What is this text about? Answer in a few sentences."

console = Console()
#: the result stays readable when the output is piped to a file
report = Console(width=console.width if console.is_terminal else 160)


@torch.inference_mode(False)
@torch.no_grad()
def decode(
    forward: Callable[..., Any],
    model: torch.nn.Module,
    prompt: torch.Tensor,
    steps: int,
    capacity: int,
    forced: torch.Tensor | None,
    progress: Progress,
    name: str,
) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Prefill ``prompt [1, S]`` and decode ``steps`` tokens, greedily or along ``forced [1, steps]``.

    The cache has ``capacity`` slots. Returns the tokens fed or chosen ``[steps]``, log-probabilities ``[steps,
    vocabulary]`` (fp32) and seconds per step.
    """
    cache = StaticCache(config=model.config, max_cache_len=capacity)
    task = progress.add_task(f"{name}: prefill {prompt.shape[1]} tokens", total=steps)
    logits = forward(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    tokens, distributions, seconds = [], [], []
    progress.update(task, description=f"{name}: decode (compiles first)")
    for step in range(steps):
        token = logits.argmax(-1, keepdim=True) if forced is None else forced[:, step : step + 1]
        tokens.append(token)
        start = time.perf_counter()
        logits = forward(token, past_key_values=cache).logits[:, -1]
        seconds.append(time.perf_counter() - start)
        distributions.append(logits.float().log_softmax(-1))
        progress.advance(task)
    progress.update(task, description=f"{name}: done")
    return torch.cat(tokens, 1)[0], torch.cat(distributions), seconds


def speed(seconds: list[float]) -> float:
    """Tokens per second: the median of the medians of three equal parts, warm-up steps left out."""
    steady = seconds[min(8, len(seconds) // 4) :]
    third = max(1, len(steady) // 3)
    return 1.0 / statistics.median(statistics.median(steady[i : i + third]) for i in range(0, third * 3, third))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a local folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", type=int, default=4096, help="prompt length in tokens")
    parser.add_argument("--steps", type=int, default=128, help="teacher-forced decode steps measured")
    parser.add_argument("--generate", type=int, default=64, help="tokens of the continuation")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of SalsConfig")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    options = {k: json.loads(v) if v[:1] in '0123456789"[-tf' else v for k, v in (o.split("=", 1) for o in args.option)}

    try:
        model, tokenizer = models.load(args.model, dtype=getattr(torch, args.dtype))
        sals_compile.SalsConfig.from_options(options)
    except ValueError as error:
        raise SystemExit(f"generate.py: {error}") from error
    text = tokenizer(models.english_text(), return_tensors="pt").input_ids
    window = text[:, : args.tokens + args.steps]
    asked = models.long_prompt(tokenizer, args.tokens, QUESTION)
    runs = {
        "dense": torch.compile(model.forward),
        "sals": torch.compile(model.forward, backend="sals", options=options),
    }
    capacity = args.tokens + max(args.steps, args.generate)  # one for all runs, so that each graph compiles once
    quality: dict[str, torch.Tensor] = {}
    rates: dict[str, float] = {}
    texts: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name, forward in runs.items():
            _, quality[name], seconds = decode(
                forward, model, window[:, : args.tokens], args.steps, capacity, window[:, args.tokens :], progress, name
            )
            rates[name] = speed(seconds)
        for name, forward in runs.items():
            chosen, _, _ = decode(forward, model, asked, args.generate, capacity, None, progress, f"{name}, question")
            texts[name] = tokenizer.decode(chosen, skip_special_tokens=True)

    kl = (quality["dense"].exp() * (quality["dense"] - quality["sals"])).sum(-1).mean().item()
    top1 = (quality["dense"].argmax(-1) == quality["sals"].argmax(-1)).float().mean().item()
    decoding = sals_compile.compiled_reports()[1] if len(sals_compile.compiled_reports()) > 1 else None
    last = decoding or sals_compile.compiled_reports()[-1]
    result = {
        "sites_found": len(last.sites),
        "sites_rewritten": last.rewritten,
        "sites_verified": last.verified,
        "kl": kl,
        "top1": top1,
        "tokens_per_s": rates,
        "kv_bytes_per_token": last.kv_bytes_per_token(),
        "text": texts,
        "prompt_tokens": args.tokens,
        "steps": args.steps,
        "pass_seconds": sum(last.timings.values()),
        "dtype": args.dtype,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    report.print("\n[bold]What became of each attention site[/] (the decode graph)")
    report.print(str(last), markup=False, highlight=False, no_wrap=True)
    for name, continuation in texts.items():
        report.print(f"\n[bold]{name}:[/] ", end="")
        report.print(continuation.strip() or "(nothing)", markup=False, highlight=False)
    stored, faster = result["kv_bytes_per_token"], rates["sals"] / rates["dense"]
    report.print(
        f"\nsites       {last.rewritten} of {len(last.sites)} rewritten, {last.verified} verified"
        f"\ndecode      {rates['dense']:.2f} tokens/s dense (Inductor), {rates['sals']:.2f} SALS: x{faster:.2f}"
        f"\nKV bytes    {stored['dense']:.0f} per token dense, {stored['sals']:.0f} SALS: "
        f"x{stored['sals'] / stored['dense']:.2f}"
        f"\nquality     KL to dense {kl:.4f}, top-1 agreement {top1:.3f} over {args.steps} teacher-forced steps",
        highlight=False,
    )
    report.print("[dim](the dense buffers stay allocated beside the latents, as a mirror)[/]")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))
        console.print(f"written to {args.json}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None

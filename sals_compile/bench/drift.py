"""``sals bench drift``: does a long generation drift away from the dense model?

A model writes ``--steps`` tokens after a long prompt, sampled from its own compressed decoding over a ``SalsCache`` (so
that it does not fall into a loop, where every model agrees with itself). Afterwards the dense model reads the same
text, and the KL divergence of the two next-token distributions is taken at every step. Errors that feed on themselves
would make the last steps worse than the first; ``ratio`` is the mean KL of the last window over that of the first.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import OptionError
from ..report import compiled_reports
from . import models
from .decode import describe_machine

QUESTION = "Continue this text in its own manner, at length."

#: Tokens that the dense model reads at a time.
CHUNK = 256


@torch.no_grad()
def generate(
    forward: Callable[..., Any], cache: Any, prompt: Tensor, steps: int, temperature: float, seed: int
) -> tuple[Tensor, Tensor]:
    """``steps`` tokens sampled after ``prompt [1, P]``: the tokens ``[1, steps]`` and the log-probabilities that each
    was drawn from ``[steps, vocabulary]``, fp32 on the CPU (before ``temperature``; 0 takes the most likely).
    """
    generator = torch.Generator(device=prompt.device).manual_seed(seed)
    logits = forward(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
    chosen, seen = [], []
    for step in range(steps):
        seen.append(logits.log_softmax(-1).cpu())
        if temperature > 0:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            token = logits.argmax(-1, keepdim=True)
        chosen.append(token)
        if step + 1 < steps:
            logits = forward(token, past_key_values=cache).logits[:, -1].float()
    return torch.cat(chosen, 1), torch.cat(seen)


@torch.no_grad()
def divergence(model: Any, prompt: Tensor, written: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Per step, ``KL(dense || seen)`` in nats and whether both would choose the same token: ``[steps]`` each.

    The dense model reads ``prompt`` and ``written`` through transformers' own growing cache.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    last = None
    for start in range(0, prompt.shape[1], CHUNK):
        piece = prompt[:, start : start + CHUNK]
        last = model(piece, past_key_values=cache, logits_to_keep=1).logits
    assert last is not None
    rows, found = [last[0].float()], []
    for start in range(0, written.shape[1], CHUNK):
        piece = written[:, start : start + CHUNK]
        rows.append(model(piece, past_key_values=cache).logits[0].float())
        dense = torch.cat(rows)[: piece.shape[1]].log_softmax(-1)
        rows = [rows[-1][-1:]]
        other = seen[start : start + piece.shape[1]].to(dense.device)
        kl = (dense.exp() * (dense - other)).sum(-1)
        found.append(torch.stack((kl, (dense.argmax(-1) == other.argmax(-1)).float())).cpu())
    both = torch.cat(found, 1)
    return both[0], both[1]


def run(
    model: Any,
    prompt: Tensor,
    options: Mapping[str, Any],
    *,
    steps: int = 2000,
    window: int = 200,
    temperature: float = 1.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Mean KL and top-1 agreement of every ``window`` steps, and of the last window over the first.

    Raises ``ValueError`` for fewer than two windows, ``RuntimeError`` when decoding did not go sparse.
    """
    from ..integrations.transformers import SalsCache

    if steps < 2 * window:
        raise ValueError(f"{steps} steps have no first and last window of {window}; give at least {2 * window}")
    capacity = -(-(prompt.shape[1] + steps) // 128) * 128
    cache = SalsCache(model.config, capacity, device=model.device)
    torch._dynamo.reset()
    forward = torch.compile(model.forward, backend="sals", options=dict(options))
    written, seen = generate(forward, cache, prompt, steps, temperature, seed)
    if cache.state.phase != "latent":
        raise RuntimeError(f"decoding did not go sparse:\n{compiled_reports()[-1]}")
    kl, agree = divergence(model, prompt, written, seen)
    windows = [slice(a, a + window) for a in range(0, steps - window + 1, window)]
    return {
        "prompt": prompt.shape[1],
        "steps": steps,
        "kl": [float(kl[w].mean()) for w in windows],
        "top1": [float(agree[w].mean()) for w in windows],
        "ratio": float(kl[-window:].mean() / kl[:window].mean()),
        "tokens": written[0].tolist(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of ``sals bench drift``. Returns the exit code: 0, or 2 for a bad argument."""
    parser = argparse.ArgumentParser(
        prog="sals bench drift", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as for `sals explain`, language models only")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--window", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="an option of SalsConfig")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    logging.getLogger("sals_compile").setLevel(logging.ERROR)
    try:
        options = {k: json.loads(v) for k, v in (o.split("=", 1) for o in args.option)}
        model, tokenizer = models.load(args.model, dtype=getattr(torch, args.dtype))
        model = model.to(args.device)
        prompt = models.long_prompt(tokenizer, args.tokens, QUESTION).to(args.device)
        found = run(
            model,
            prompt,
            options,
            steps=args.steps,
            window=args.window,
            temperature=args.temperature,
            seed=args.seed,
        )
    except (OptionError, ImportError, OSError, ValueError) as error:
        print(f"sals bench drift: {error}", file=sys.stderr)
        return 2
    found |= {"text": tokenizer.decode(found["tokens"]), "options": options, "machine": describe_machine(args.device)}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    for at, (kl, top1) in enumerate(zip(found["kl"], found["top1"], strict=True)):
        first = at * args.window
        print(f"steps {first:5} to {first + args.window - 1:5}   KL {kl:.4f}   top-1 {top1:.3f}")
    print(f"last window over first: KL x{found['ratio']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

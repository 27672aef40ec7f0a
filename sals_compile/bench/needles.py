"""`sals bench needles`: facts hidden in a long text, asked for on the dense model and on SALS with identical prompts.

Three tasks, after RULER (arXiv 2404.06654) and the passkey test: ``passkey`` (one key in the text), ``multi-key`` (four
keys, one asked for: the others are distractors) and ``multi-value`` (one key with two values, both asked for; scored by
the share found). Values are strings of seven digits, so nothing but the needle tells them. The answer is begun for the
model (``... is``), and decoded greedily; a value counts if all of its digits stand in the answer in order.

Every prompt has exactly ``--tokens`` tokens. It is prefilled once, dense, through the compiled model, but for its last
token (with ``--sparse-question``: but for everything after the text). The rest and the answer are then decoded by SALS
and, from the same cache, by the dense model.

    sals bench needles --tokens 4096 --count 4 --json needles.json
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backend import registry_for
from ..calibrate import Calibration
from ..config import OptionError, SalsConfig
from . import models
from .quality import SKIP, QualityError, environment, parse_row

TASKS = ("passkey", "multi-key", "multi-value")

#: Keys that name a value; every one a common word.
KEYS = ("apple", "river", "candle", "window", "garden", "silver", "mountain", "pencil", "lantern", "harbor")

#: Digits of a value.
DIGITS = 7


@dataclass
class Prompt:
    """``tokens [1, S]`` ending in the begun answer; the text ends at ``split``; ``values`` are what to find."""

    task: str
    depth: float
    tokens: Tensor
    split: int
    values: list[str]


@dataclass
class Answers:
    """What was found: shares of the values, and the texts, by model."""

    task: str
    depth: float
    values: list[str]
    dense: float
    sals: float
    dense_text: str
    sals_text: str


@dataclass
class Scores:
    """Mean scores over prompts."""

    options: dict[str, Any]
    answers: list[Answers] = field(default_factory=list)

    def mean(self, kind: str, task: str | None = None) -> float:
        """Accuracy of ``kind`` (``"dense"`` or ``"sals"``), 0 to 1."""
        found = [getattr(a, kind) for a in self.answers if task in (None, a.task)]
        return sum(found) / max(len(found), 1)

    def summary(self) -> dict[str, Any]:
        """Accuracies by task and overall, and SALS's as a share of the dense model's (None if that is 0)."""
        result: dict[str, Any] = {}
        for task in [*dict.fromkeys(a.task for a in self.answers), None]:
            dense, sals = self.mean("dense", task), self.mean("sals", task)
            count = sum(task in (None, a.task) for a in self.answers)
            ratio = sals / dense if dense else None
            result[task or "all"] = {"prompts": count, "dense": dense, "sals": sals, "ratio": ratio}
        return result


def build(tokenizer: Any, text: str, task: str, depth: float, tokens: int, seed: int) -> Prompt:
    """A prompt of exactly ``tokens`` tokens with its first needle at ``depth`` (0 to 1) of the text.

    Raises:
        QualityError: an unknown task, or a text too short for ``tokens``.
    """
    if task not in TASKS:
        raise QualityError(f"task {task!r}: allowed are {', '.join(TASKS)}")
    draw = random.Random(seed)
    values = ["".join(draw.choice("123456789") for _ in range(DIGITS)) for _ in range(4)]
    keys = draw.sample(KEYS, 4)
    if task == "passkey":
        needles = [f"The pass key is {values[0]}. Remember it. {values[0]} is the pass key."]
        question, begun = "What is the pass key?", "The pass key is"
        wanted = values[:1]
    elif task == "multi-key":
        needles = [f"The special magic number for {k} is {v}." for k, v in zip(keys, values, strict=True)]
        question = f"What is the special magic number for {keys[0]} mentioned in the text?"
        begun, wanted = f"The special magic number for {keys[0]} is", values[:1]
    else:
        needles = [f"One of the special magic numbers for {keys[0]} is {v}." for v in values[:2]]
        question = f"What are the two special magic numbers for {keys[0]} mentioned in the text?"
        begun, wanted = f"The two special magic numbers for {keys[0]} are", values[:2]
    place = "<<text>>"
    message = f"Some facts are hidden in the following text. Remember them.\n\n{place}\n\n{question}"
    if getattr(tokenizer, "chat_template", None):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
        )
    else:
        prompt = (tokenizer.bos_token or "") + message + "\n"
    before, _, after = prompt.partition(place)
    head, tail = _encode(tokenizer, before), _encode(tokenizer, after + begun)
    hidden = [_encode(tokenizer, f"\n\n{needle}\n\n") for needle in needles]
    room = tokens - len(head) - len(tail) - sum(map(len, hidden))
    hay = _encode(tokenizer, text)
    if room < 64 or len(hay) < room:
        raise QualityError(f"the text has {len(hay)} tokens; a prompt of {tokens} needs {max(room, 64)} of them")
    offset = draw.randrange(len(hay) - room + 1)
    hay = hay[offset : offset + room]
    # The needle asked for (and the first of two values) stands at the depth, the others are spread over the text.
    places = [round(depth * room)] + [round((depth + (i + 1) / len(hidden)) % 1.0 * room) for i in range(len(hidden))]
    for place_at, needle in sorted(zip(places, hidden, strict=False), key=lambda item: -item[0]):
        hay[place_at:place_at] = needle
    ids = torch.tensor([head + hay + tail], dtype=torch.int64)
    return Prompt(task, depth, ids, len(head) + len(hay), wanted)


def found_in(answer: str, values: Sequence[str]) -> float:
    """Share of the values whose digits stand in the answer, white space aside."""
    joined = "".join(answer.split())
    return sum(value in joined for value in values) / len(values)


@torch.no_grad()
def answer(
    forward: Callable[..., Any], cache: Any, tokens: Tensor, start: int, steps: int, chunk: int, stop: int | None
) -> list[int]:
    """Feed ``tokens`` from ``start`` on in calls of ``chunk``, then decode greedily: up to ``steps`` tokens."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(start)
    for at in range(start, tokens.shape[1], chunk):
        logits = forward(tokens[:, at : at + chunk], past_key_values=cache).logits[:, -1]
    chosen: list[int] = []
    while len(chosen) < steps:
        chosen.append(int(logits.argmax(-1)))
        if chosen[-1] == stop or len(chosen) == steps:
            break
        logits = forward(torch.tensor([[chosen[-1]]], device=tokens.device), past_key_values=cache).logits[:, -1]
    return chosen


@torch.no_grad()
def run(
    model: Any,
    tokenizer: Any,
    options: Mapping[str, Any],
    *,
    tasks: Sequence[str] = TASKS,
    tokens: int = 4096,
    count: int = 4,
    steps: int = 24,
    sparse_question: bool = False,
    lowering: str = "eager",
    calibration: Calibration | None = None,
    text: str | None = None,
    progress: bool = True,
    done: Callable[[Scores], None] = lambda scores: None,
) -> Scores:
    """Ask ``count`` prompts of every task, at depths spread over the text, of both models.

    Args:
        model, tokenizer: as :func:`sals_compile.bench.models.load` gives them.
        options: of the compiler.
        calibration: without one, the first prompt is the calibration.
        text: the haystack; English prose by default.
        done: called after each prompt.

    Raises:
        QualityError: see :func:`build`; or decoding did not go sparse.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers import StaticCache

    text = models.english_text() if text is None else text
    full = {"skip_layers": SKIP, "lowering": lowering} | dict(options)
    if calibration is not None:
        full["calibration"] = calibration
    config = SalsConfig.from_options(full)
    torch._dynamo.reset()
    forward = torch.compile(model.forward, backend="sals", options=full, dynamic=False)
    scores = Scores(dict(options))
    prompts = [
        build(tokenizer, text, task, (i + 0.5) / count, tokens, seed=100 * TASKS.index(task) + i)
        for i in range(count)
        for task in tasks
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    stop = tokenizer.eos_token_id
    c = model.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task_bar = bar.add_task("needles", total=len(prompts))
        for prompt in prompts:
            bar.update(task_bar, description=f"{prompt.task} at {prompt.depth:.2f}")
            # Some slots to spare: the cache's length is the same for all prompts, so that each graph is compiled once.
            cache = StaticCache(config=c, max_cache_len=tokens + steps)
            cache.early_initialization(1, c.num_key_value_heads, head_dim, model.dtype, model.device)
            ids = prompt.tokens.to(model.device)
            # One boundary for all prompts of a run, so that there is one prefill graph.
            start = tokens - 1
            if sparse_question:
                start = tokens - max(tokens - p.split for p in prompts)
            forward(ids[:, :start], past_key_values=cache, logits_to_keep=1)
            sparse = answer(forward, cache, ids, start, steps, 1, stop)
            adopted = registry_for(config).caches.get(cache.layers[len(cache.layers) // 2].keys)
            if adopted is None or adopted.phase != "sparse":
                raise QualityError(
                    "decoding did not go sparse: " + (adopted.refused if adopted else "no cache adopted")
                )
            dense = answer(model.forward, cache, ids, start, steps, 1, stop)
            texts = [tokenizer.decode(t, skip_special_tokens=True) for t in (dense, sparse)]
            shares = [found_in(t, prompt.values) for t in texts]
            scores.answers.append(Answers(prompt.task, prompt.depth, prompt.values, *shares, *texts))
            bar.advance(task_bar)
            done(scores)
    return scores


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="sals bench needles", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default="smollm2", help="as for `sals explain`, language models only")
    made.add_argument("--tokens", type=int, default=4096, help="tokens of a prompt")
    made.add_argument("--count", type=int, default=4, help="prompts of each task, at as many depths")
    made.add_argument("--steps", type=int, default=24, help="most tokens of an answer")
    made.add_argument("--tasks", default=",".join(TASKS))
    made.add_argument("--sparse-question", action="store_true", help="decode the question sparsely too")
    made.add_argument("--text", type=Path, metavar="FILE", help="the haystack (default: English prose)")
    made.add_argument("--calibration", type=Path, metavar="FILE", help="a calibration made before")
    made.add_argument("--options", default="", metavar="OPTION=VALUE,...", help="options of the compiler")
    made.add_argument("--lowering", default="eager", choices=("eager", "inductor"))
    made.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    made.add_argument("--json", type=Path, help="write the results here")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``sals bench needles``. Returns the exit code: 0, or 2 for a bad argument."""
    from rich.console import Console
    from rich.table import Table

    args = parser().parse_args(argv)
    logging.getLogger("sals_compile").setLevel(logging.ERROR)
    try:
        model, tokenizer = models.load(args.model, dtype=getattr(torch, args.dtype))
        calibration = None
        if args.calibration:
            calibration = Calibration.load(args.calibration)
            calibration.check(model)
        facts = environment(model) | {"arguments": {k: str(v) for k, v in vars(args).items()}}

        def done(scores: Scores) -> None:
            if args.json:
                answers = [vars(a) for a in scores.answers]
                args.json.write_text(json.dumps(facts | {"summary": scores.summary(), "answers": answers}, indent=1))

        scores = run(
            model,
            tokenizer,
            parse_row("options:" + args.options)[1][1],
            tasks=args.tasks.split(","),
            tokens=args.tokens,
            count=args.count,
            steps=args.steps,
            sparse_question=args.sparse_question,
            lowering=args.lowering,
            calibration=calibration,
            text=args.text.read_text() if args.text else None,
            done=done,
        )
    except (QualityError, OptionError, ImportError, OSError, ValueError) as error:
        print(f"sals bench needles: {error}", file=sys.stderr)
        return 2
    shown = Table(title=f"{args.model}, prompts of {args.tokens} tokens")
    for column in ("task", "prompts", "dense", "SALS", "SALS / dense"):
        shown.add_column(column, justify="left" if column == "task" else "right")
    for task, row in scores.summary().items():
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        shown.add_row(task, str(row["prompts"]), f"{row['dense']:.3f}", f"{row['sals']:.3f}", ratio)
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())

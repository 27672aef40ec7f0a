"""`sals bench needles`: facts hidden in long texts, asked for on the dense model and on SALS with identical prompts.

Three tasks, after RULER (arXiv 2404.06654) and the passkey test, all hidden in the same text: ``passkey`` (one key),
``multi-key`` (four keys with a value each, one asked for: the others are distractors) and ``multi-value`` (one key with
two values, both asked for; scored by the share found). Values are strings of seven digits, so nothing but the needle
tells them. The answer is begun for the model (``... is``) and decoded greedily; a value counts if its digits stand in
the answer in order.

A text of exactly ``--tokens`` tokens is prefilled once, dense, through the compiled model. Every question about it, and
the answer, are then decoded sparsely, a few tokens of the question at a call: SALS never sees the needle and
the question in one dense pass, as it would where the question is part of the prefill. Then the same questions are
asked of the dense model from the same cache.

Figures are shown with their standard errors: six prompts a text, and forty say little about a share of 0.95.

    sals bench needles --tokens 4096 --count 8 --json needles.json
"""

from __future__ import annotations

import argparse
import json
import logging
import math
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

#: Tokens of a question per decode call; a question is begun a few tokens early, in the text, so that they divide it.
CHUNK = 8

#: Tokens that are fed again, dense, before each question, so that it starts from the text's exact state.
AGAIN = 16


@dataclass(frozen=True)
class Question:
    """``tail``: tokens of question and begun answer; ``values``: what to find; ``depth`` (0 to 1) of the needle."""

    task: str
    depth: float
    tail: list[int]
    values: list[str]


@dataclass(frozen=True)
class Text:
    """``tokens [1, S]``, up to the end of the text, and the questions about it."""

    tokens: Tensor
    questions: list[Question]


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
        """Accuracies by task and overall, and SALS's as a share of the dense model's (None if that is 0), each with its
        standard error (``_error``).

        An accuracy's is the binomial one, of prompts drawn independently. Both models answer the same prompts, which
        are hard or easy for both, so the ratio's is that of paired answers: ``sd(sals - ratio * dense) / (dense √n)``.
        """
        result: dict[str, Any] = {}
        for task in [*dict.fromkeys(a.task for a in self.answers), None]:
            dense, sals = self.mean("dense", task), self.mean("sals", task)
            asked = [a for a in self.answers if task in (None, a.task)]
            count = len(asked)
            row: dict[str, Any] = {"prompts": count, "dense": dense, "sals": sals, "ratio": None}
            row |= {f"{kind}_error": math.sqrt(row[kind] * (1 - row[kind]) / count) for kind in ("dense", "sals")}
            if dense:
                row["ratio"] = ratio = sals / dense
                squares = sum((a.sals - ratio * a.dense) ** 2 for a in asked)
                row["ratio_error"] = math.sqrt(squares / max(count - 1, 1) / count) / dense
            result[task or "all"] = row
        return result


def build(tokenizer: Any, text: str, tokens: int, seed: int, tasks: Sequence[str] = TASKS) -> Text:
    """A text of exactly ``tokens`` tokens (the prompt's beginning included) with all needles, spread evenly over it.

    Raises:
        QualityError: an unknown task, or a text too short for ``tokens``.
    """
    for task in tasks:
        if task not in TASKS:
            raise QualityError(f"task {task!r}: allowed are {', '.join(TASKS)}")
    draw = random.Random(seed)
    keys = draw.sample(KEYS, 5)
    values = ["".join(draw.choice("123456789") for _ in range(DIGITS)) for _ in range(7)]
    needles = {
        f"The pass key is {values[0]}. Remember it. {values[0]} is the pass key.": ("passkey", None),
        **{
            f"The special magic number for {key} is {value}.": ("multi-key", key)
            for key, value in zip(keys[:4], values[1:5], strict=True)
        },
        **{f"One of the special magic numbers for {keys[4]} is {v}.": ("multi-value", keys[4]) for v in values[5:]},
    }
    order = list(needles)
    draw.shuffle(order)
    depths = {needle: (i + 0.5) / len(order) for i, needle in enumerate(order)}
    place = "<<text>>"
    asked = "<<question>>"
    message = f"Some facts are hidden in the following text. Remember them.\n\n{place}\n\n{asked}"
    if getattr(tokenizer, "chat_template", None):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
        )
    else:
        prompt = (tokenizer.bos_token or "") + message + "\n"
    before, _, after = prompt.partition(place)
    head = _encode(tokenizer, before)
    hidden = {needle: _encode(tokenizer, f"\n\n{needle}\n\n") for needle in order}
    room = tokens - len(head) - sum(map(len, hidden.values()))
    hay = _encode(tokenizer, text)
    if room < 64 or len(hay) < room:
        raise QualityError(f"the text has {len(hay)} tokens; a prompt of {tokens} needs {max(room, 64)} of them")
    offset = draw.randrange(len(hay) - room + 1)
    hay = hay[offset : offset + room]
    for needle in reversed(order):
        at = round(depths[needle] * room)
        hay[at:at] = hidden[needle]

    questions: list[Any] = []
    for needle, (task, key) in needles.items():
        if task == "passkey":
            question, begun, wanted = "What is the pass key?", "The pass key is", values[:1]
        elif task == "multi-key":
            question = f"What is the special magic number for {key} mentioned in the text?"
            begun, wanted = f"The special magic number for {key} is", [values[1 + keys.index(str(key))]]
        else:
            question = f"What are the two special magic numbers for {key} mentioned in the text?"
            begun, wanted = f"The two special magic numbers for {key} are", values[5:]
        tail = _encode(tokenizer, after.replace(asked, question) + begun)
        known = any(q.task == task == "multi-value" for q in questions)
        if task in tasks and not known:
            questions.append(Question(task, depths[needle], tail, wanted))
    return Text(torch.tensor([head + hay], dtype=torch.int64), questions)


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
    steps: int = 18,
    lowering: str = "eager",
    calibration: Calibration | None = None,
    text: str | None = None,
    progress: bool = True,
    done: Callable[[Scores], None] = lambda scores: None,
) -> Scores:
    """Ask all questions about ``count`` texts of both models.

    Args:
        model, tokenizer: as :func:`sals_compile.bench.models.load` gives them.
        options: of the compiler.
        calibration: without one, the first text is the calibration.
        text: the haystack; English prose by default.
        done: called after each text.

    Raises:
        QualityError: see :func:`build`; or decoding did not go sparse.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers import StaticCache

    haystack = models.english_text() if text is None else text
    full = {"skip_layers": SKIP, "lowering": lowering} | dict(options) | {"decode_tokens": CHUNK}
    if calibration is not None:
        full["calibration"] = calibration
    config = SalsConfig.from_options(full)
    texts = [build(tokenizer, haystack, tokens, seed, tasks) for seed in range(count)]
    torch._dynamo.reset()
    forward = torch.compile(model.forward, backend="sals", options=full, dynamic=False)
    scores = Scores(dict(options))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    c = model.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    longest = max(len(q.tail) for t in texts for q in t.questions)
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("needles", total=2 * sum(len(t.questions) for t in texts))
        for asked in texts:
            cache = StaticCache(config=c, max_cache_len=tokens + 128 * (1 + (longest + steps) // 128))
            cache.early_initialization(1, c.num_key_value_heads, head_dim, model.dtype, model.device)
            body = asked.tokens.to(model.device)
            forward(body, past_key_values=cache, logits_to_keep=1)
            found: dict[str, list[str]] = {"sals": [], "dense": []}
            # All of SALS's questions first: what the uncompiled model writes to the cache would be foreign to it.
            for kind, called in (("sals", forward), ("dense", model.forward)):
                for question in asked.questions:
                    bar.update(task, description=f"{kind}: {question.task} at {question.depth:.2f}")
                    tail = torch.tensor([question.tail], device=model.device)
                    start = tokens - (-len(question.tail)) % CHUNK
                    if kind == "sals":
                        for layer in cache.layers:
                            layer.cumulative_length.fill_(start - AGAIN)
                        forward(body[:, start - AGAIN : start], past_key_values=cache, logits_to_keep=1)
                    whole = torch.cat((body, tail), 1)
                    chosen = answer(called, cache, whole, start, steps, CHUNK, tokenizer.eos_token_id)
                    found[kind].append(tokenizer.decode(chosen, skip_special_tokens=True))
                    if kind == "sals":
                        _check_sparse(config, cache)
                    bar.advance(task)
            for question, dense, sals in zip(asked.questions, found["dense"], found["sals"], strict=True):
                shares = [found_in(answered, question.values) for answered in (dense, sals)]
                scores.answers.append(Answers(question.task, question.depth, question.values, *shares, dense, sals))
            done(scores)
    return scores


def _check_sparse(config: SalsConfig, cache: Any) -> None:
    adopted = registry_for(config).caches.get(cache.layers[len(cache.layers) // 2].keys)
    if adopted is None or adopted.phase != "sparse":
        raise QualityError("decoding did not go sparse: " + (adopted.refused if adopted else "no cache was adopted"))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="sals bench needles", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default="smollm2", help="as for `sals explain`, language models only")
    made.add_argument("--tokens", type=int, default=4096, help="tokens of a text")
    made.add_argument("--count", type=int, default=8, help="texts, each with up to six questions")
    made.add_argument("--steps", type=int, default=18, help="most tokens of an answer")
    made.add_argument("--tasks", default=",".join(TASKS))
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
            lowering=args.lowering,
            calibration=calibration,
            text=args.text.read_text() if args.text else None,
            done=done,
        )
    except (QualityError, OptionError, ImportError, OSError, ValueError) as error:
        print(f"sals bench needles: {error}", file=sys.stderr)
        return 2
    shown = Table(title=f"{args.model}, texts of {args.tokens} tokens")
    for column in ("task", "prompts", "dense", "SALS", "SALS / dense"):
        shown.add_column(column, justify="left" if column == "task" else "right")
    for task, row in scores.summary().items():
        columns = ("dense", "sals", "ratio")
        figures = ("" if row[k] is None else f"{row[k]:.3f} ± {row[f'{k}_error']:.3f}" for k in columns)
        shown.add_row(task, str(row["prompts"]), *figures)
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())

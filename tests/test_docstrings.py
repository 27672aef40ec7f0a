"""What a user may call is documented: its shapes, the errors that it raises, and where its method comes from."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import linecache
import pkgutil
import re
import textwrap

import pytest

import sals_compile
from sals_compile import cli
from sals_compile.kernels import ops, reference

#: Modules whose public names are for users; other modules owe a docstring of their own only.
PUBLIC = (
    "sals_compile",
    "sals_compile.backend",
    "sals_compile.basis",
    "sals_compile.calibrate",
    "sals_compile.config",
    "sals_compile.report",
    "sals_compile.mlir",
    "sals_compile.integrations.transformers",
    "sals_compile.integrations.modules",
    "sals_compile.bench.models",
)
SHAPE = re.compile(r"\[[^\]]*\]|shape|[Ss]calar")


def callables():
    """``(name, function, text)`` of every public function, method and property; ``text`` is where to look for words
    about it: its docstring, and for ``__init__`` that of the class.
    """
    found = {}
    for where in PUBLIC:
        module = importlib.import_module(where)
        for name, thing in vars(module).items():
            own = getattr(thing, "__module__", None) == where
            if name.startswith("_") or not own or not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            found[f"{where}.{name}"] = (thing, thing.__doc__)
            for method, value in vars(thing).items() if inspect.isclass(thing) else ():
                value = value.fget if isinstance(value, property) else inspect.unwrap(getattr(value, "__func__", value))
                if inspect.isfunction(value) and method == "__init__" and not dataclasses.is_dataclass(thing):
                    found[f"{where}.{name}.__init__"] = (value, f"{thing.__doc__}\n{value.__doc__ or ''}")
                elif inspect.isfunction(value) and not method.startswith("_"):
                    found[f"{where}.{name}.{method}"] = (value, inspect.getdoc(getattr(thing, method)))
    return found


CALLABLES = callables()


def tree(thing):
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def undocumented(thing, text):
    """What a docstring owes and does not give, in words."""
    if not (text or "").strip() or text.startswith(f"{getattr(thing, '__name__', '')}("):  # as dataclasses make it
        return ["a docstring"]
    if inspect.isclass(thing):
        return []
    owed = []
    body = tree(thing)
    annotations = [a.annotation for a in body.args.args + body.args.kwonlyargs] + [body.returns]
    tensors = any(a is not None and re.search(r"\bTensor\b", ast.unparse(a)) for a in annotations)
    if tensors and not SHAPE.search(text):
        owed.append("the shapes of its tensors")
    for node in ast.walk(body):
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = ast.unparse(node.exc).split("(")[0].split(".")[-1]
            if error[0].isupper() and error not in text and error != "AssertionError":
                owed.append(f"that it raises {error}")
    return owed


@pytest.mark.parametrize("name", CALLABLES)
def test_docstrings_say_what_they_owe(name):
    assert undocumented(*CALLABLES[name]) == []


def test_the_check_finds_what_is_missing():
    namespace = {}
    source = "from torch import Tensor\ndef f(x: Tensor):\n    '''Doubles.'''\n    raise ValueError(x)\n"
    linecache.cache["<f>"] = (len(source), None, source.splitlines(keepends=True), "<f>")
    exec(compile(source, "<f>", "exec"), namespace)
    assert undocumented(namespace["f"], "Doubles.") == ["the shapes of its tensors", "that it raises ValueError"]
    assert undocumented(namespace["f"], "Doubles ``x [B]``; ValueError always.") == []
    assert undocumented(namespace["f"], None) == ["a docstring"]


def test_every_public_name_is_here():
    assert {n for n in sals_compile.__all__ if n != "__version__"} <= {n.rsplit(".", 1)[-1] for n in CALLABLES}
    assert len(CALLABLES) > 80


def test_every_module_opens_with_what_it_does():
    for info in pkgutil.walk_packages(sals_compile.__path__, "sals_compile."):
        try:
            module = importlib.import_module(info.name)
        except ImportError as error:  # an extra, or Triton, that is not installed
            assert not (error.name or "").startswith("sals_compile"), info.name
            continue
        assert (module.__doc__ or "").strip(), info.name


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_operators_have_a_meaning_with_dimensions(name):
    """The meaning of ``torch.ops.sals.NAME`` is the reference function of that name."""
    text = (getattr(reference, name, None) or getattr(ops, name)).__doc__
    assert SHAPE.search(text) or re.match(r":func:`\w+` of :func:`\w+`", text) or ":func:`encode`" in text, name


@pytest.mark.parametrize("where", ["sals_compile", "sals_compile.basis", "sals_compile.kernels.reference"])
def test_the_paper_is_cited(where):
    assert "2510.24273" in importlib.import_module(where).__doc__


def test_fields_of_what_users_read_are_documented():
    """A field stands in the docstring of its class, or in a comment above it."""
    for cls in (sals_compile.SalsConfig, sals_compile.SiteReport, sals_compile.Explanation, sals_compile.Calibration):
        for field in dataclasses.fields(cls):
            assert re.search(rf"^\s+(\w+, )*{field.name}(, \w+)*:", cls.__doc__, re.M), (cls, field.name)


def test_the_help_has_no_markup(capsys):
    """Docstrings serve as help texts; roles (``:func:``) are for documentation tools."""
    commands = [["explain"], ["calibrate"], ["doctor"], ["figures"], *(["bench", name] for name in cli.BENCHES)]
    for argv in ([], *commands):
        with pytest.raises(SystemExit) as stop:
            cli.main([*argv, "--help"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert text and not re.search(r":\w+:`", text), (argv, re.search(r".*:\w+:`.*", text))

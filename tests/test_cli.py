"""The ``sals`` command: output, JSON, exit codes, and one line, not a traceback, for what users can put right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import llama

from sals_compile import __version__, cli, doctor

EXAMPLE = str(Path(__file__).resolve().parent.parent / "examples" / "your_own_attention.py") + ":example"


def run(capsys, *argv):
    code = cli.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama as save_pretrained writes it, with a word-level tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    llama().save_pretrained(path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(64)} | {"?": 0}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(path)
    return path


def test_version_and_help(capsys):
    assert run(capsys, "--version") == (0, __version__ + "\n", "")
    code, out, _ = run(capsys)
    assert code == 2 and "examples:" in out
    for command in ("explain", "calibrate", "doctor"):
        with pytest.raises(SystemExit) as stop:
            cli.main([command, "--help"])
        assert stop.value.code == 0
        assert "usage: sals " + command in capsys.readouterr().out


def test_help_lists_examples():
    text = cli.parser().format_help()
    assert "sals explain smollm2" in text and "sals doctor" in text


def test_explain_a_function(capsys):
    code, out, _ = run(capsys, "explain", EXAMPLE)
    assert code == 0
    assert "interleaved" in out and "512 of 2048 cached tokens" in out and "KV bytes per token" in out


def test_explain_a_folder_as_json_page_and_picture(capsys, folder, tmp_path):
    argv = (
        "explain",
        folder,
        "--capacity",
        60,
        "--option",
        "budget=24",
        "--option",
        "sinks=2",
        "--option",
        "recents=8",
    )
    code, out, err = run(capsys, *argv, "--json", "--html", tmp_path / "page.html", "--draw", tmp_path / "graph.dot")
    assert code == 0, err
    (graph,) = json.loads(out)["graphs"]
    assert [s["status"] for s in graph["sites"]] == ["sals", "sals"]
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert "sals.attend" in (tmp_path / "graph.dot").read_text()


def test_explain_without_a_cache(capsys, folder):
    code, out, err = run(
        capsys, "explain", folder, "--no-cache", "--tokens", 40, "--option", "attention=exact", "--json"
    )
    assert code == 0, err
    assert [s["status"] for s in json.loads(out)["graphs"][0]["sites"]] == ["exact", "exact"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["explain", "./nowhere"], "no such file or folder"),
        (["explain", "nowhere.py:f"], "nowhere.py: no such file"),
        (["explain", "no.such.module:f"], "No module named 'no'"),
        (["explain", "json:nothing"], "json has no function 'nothing'"),
        (["explain", "os:getcwd"], "must return (callable, args)"),
        (["explain", EXAMPLE, "--option", "buget=3"], "did you mean 'budget'"),
        (["explain", EXAMPLE, "--option", "budget"], "write NAME=VALUE"),
        (["explain", EXAMPLE, "--option", "attention=spars"], "allowed are 'sals'"),
        (["explain", EXAMPLE, "--option", "score_rank=1.0", "--option", "rank=4"], "score_rank=1.0"),
        (["explain", EXAMPLE, "--html", "/no/such/folder/page.html"], "does not exist"),
        (["explain", EXAMPLE, "--draw", "graph.jpeg"], "the suffix must be"),
        (["calibrate", "smollm2", "/no/such/folder/basis.safetensors"], "does not exist"),
        (["bench", "speed"], "choose from decode, operator"),
        (["explain", "model.py"], "write model.py:NAME"),
    ],
)
def test_user_errors_are_one_line(capsys, argv, words):
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert words in err and err.startswith("sals: ") and "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('no weights')", "ValueError: no weights"),
        ("import torch; return torch.nn.Linear(2, 2), ()", "missing a required argument: 'input'"),
        ("return (lambda x: x), (1, 2)", "too many positional arguments"),
    ],
)
def test_what_the_users_own_code_raises_is_one_line(capsys, tmp_path, body, words):
    """``--verbose`` shows where it was raised."""
    (tmp_path / "mine.py").write_text(f"def call():\n    {body}\n")
    code, out, err = run(capsys, "explain", f"{tmp_path / 'mine.py'}:call")
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1
    code, _, err = run(capsys, "explain", f"{tmp_path / 'mine.py'}:call", "--verbose")
    assert code == 2 and "Traceback" in err and words in err


def test_a_bad_number_is_explained(capsys):
    with pytest.raises(SystemExit):
        cli.main(["explain", EXAMPLE, "--tokens", "ten"])
    assert "'ten': give a whole number from 1 on" in capsys.readouterr().err


def test_declines_have_an_exit_code_of_their_own(capsys, tmp_path):
    (tmp_path / "odd.py").write_text(
        "import torch\n"
        "def call():\n"
        "    q = torch.randn(1, 2, 8, 16)\n"
        "    return lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5), (q,)\n"
    )
    code, _, err = run(capsys, "explain", f"{tmp_path / 'odd.py'}:call", "--option", "on_decline=error")
    assert code == 3 and "dropout is active" in err and "Traceback" not in err


def test_bench_lists_what_is_there(capsys):
    code, out, _ = run(capsys, "bench", "--help")
    assert code == 0 and all(name in out for name in cli.BENCHES)
    assert run(capsys, "bench")[0] == 2


def test_a_bench_that_is_not_there_is_said(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_module", lambda name: "")
    code, _, err = run(capsys, "bench", "needles")
    assert code == 2 and "sals_compile/bench/needles.py is not in this installation" in err


def test_a_bench_gets_its_arguments(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "operator", "--help"])
    assert stop.value.code == 0
    assert "--sizes" in capsys.readouterr().out


def test_calibrate(capsys, folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 64}" for i in range(600)))
    output = tmp_path / "basis.safetensors"
    argv = ("calibrate", folder, output, "--text", text, "--tokens", 512, "--context", 128, "--json")
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    result = json.loads(out)
    assert result["sites"] == 2 and result["tokens"] == 512 and output.stat().st_size == result["bytes"]
    code, out, err = run(capsys, "explain", folder, "--option", f"calibration={output}", "--capacity", 600)
    assert code == 0, err


def test_doctor_without_the_self_test(capsys):
    code, out, _ = run(capsys, "doctor", "--no-test", "--json")
    found = json.loads(out)
    assert code == 0 and found["ok"] and found["checks"] == []
    assert found["versions"]["torch"] and found["devices"][0]["device"] == "cpu"
    assert {r["lowering"] for r in found["routes"]} == {"inductor", "eager", "mlir"}


def test_doctor_verdicts(capsys, monkeypatch):
    """The quick checks, and the exit code when one fails."""
    monkeypatch.setattr(doctor, "routes", lambda: [
        {"lowering": low, "device": dev, "runs": "no: left out by this test"}
        for low, dev in (("inductor", "cpu"), ("inductor", "gpu"), ("mlir", "cpu"))
    ])  # fmt: skip
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert out.count("  ok ") == 5 and out.count("  skipped ") == 4

    def broken():
        raise RuntimeError("no disk")

    monkeypatch.setattr(doctor, "_writable", broken)
    monkeypatch.setattr(doctor, "_decode", lambda *a: "left out")
    code, out, _ = run(capsys, "doctor", "--json")
    failed = [c for c in json.loads(out)["checks"] if c["verdict"] == "failed"]
    assert code == 1 and [c["name"] for c in failed] == ["generated kernels can be written"]
    assert "no disk" in failed[0]["detail"]


def test_installed_command_has_no_traceback():
    script = Path(sys.executable).parent / "sals"
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    done = subprocess.run([script, "explain", "./nowhere"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and done.stdout == ""
    assert "Traceback" not in done.stderr

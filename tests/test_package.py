"""The package as users get it: a wheel and an editable install, each in an environment of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"sals_compile": "sals_compile", "passes": "sals_compile/passes", "kernels": "sals_compile/kernels"}

# Run inside the new environment; prints what it finds as one line of JSON.
PROBE = """
import importlib.metadata, importlib.util, json
import sals_compile, sals_compile.kernels, sals_compile.passes, sals_compile.passes.match
import torch
from torch._dynamo.backends.registry import lookup_backend
(script,) = importlib.metadata.entry_points(group="console_scripts", name="sals")
print(json.dumps({
    "origin": sals_compile.__file__,
    "passes": sals_compile.passes.__file__,
    "stray": [name for name in ("passes", "kernels", "tests", "examples") if importlib.util.find_spec(name)],
    "listed": "sals" in torch._dynamo.list_backends(),
    "backend": lookup_backend("sals").__module__,
    "script": callable(script.load()),
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: building leaves files behind, and must not do so in the repository."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", folder, checkout, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module", params=["wheel", "editable"])
def environment(
    request: pytest.FixtureRequest, checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The python of a new environment with the package installed, and the folder that the package must come from."""
    folder = tmp_path_factory.mktemp(request.param)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # Dependencies come from the environment of the tests. A folder named in a .pth file stands after this environment's
    # own, and its own .pth files are not read, so an editable install out there does not shine through.
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "outer.pth").write_text("\n".join(sorted(outer)) + "\n")
    if request.param == "wheel":
        what, home = (request.getfixturevalue("wheel"),), site
    else:
        what, home = ("--editable", checkout), checkout
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--no-index", *what, cwd=folder)
    return python, home


def test_wheel_holds_every_module_and_nothing_else(wheel: Path, checkout: Path) -> None:
    expected = {"sals_compile/py.typed"}
    for source, installed in SOURCES.items():
        for path in (checkout / source).rglob("*.py"):
            expected.add(f"{installed}/{path.relative_to(checkout / source).as_posix()}")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - metadata == expected
    assert any(name.endswith("licenses/LICENSE") for name in metadata)


def test_installed_package(environment: tuple[Path, Path], tmp_path: Path) -> None:
    python, home = environment
    # -P and a foreign working folder: nothing may be found because the repository happens to be at hand.
    found = json.loads(run(python, "-P", "-c", PROBE, cwd=tmp_path).splitlines()[-1])
    assert Path(found["origin"]).is_relative_to(home)
    assert Path(found["passes"]).is_relative_to(home)
    assert found["stray"] == []
    assert found["listed"]
    assert found["backend"] == "sals_compile.backend"
    assert found["script"]


@pytest.mark.parametrize("name", ["passes", "kernels"])
def test_folders_are_not_top_level_modules(environment: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    result = subprocess.run(
        [environment[0], "-P", "-c", f"import {name}"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert f"ModuleNotFoundError: No module named '{name}'" in result.stderr

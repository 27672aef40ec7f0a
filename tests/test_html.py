"""The page: complete, self-contained, escaped, small, and without errors in a browser at desktop and phone widths."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from tiny import Attention, llama, static_cache
from torch import nn

from sals_compile import explain

CHROMIUM = next((c for c in ("chromium", "chromium-browser", "google-chrome") if shutil.which(c)), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
    "--allow-file-access-from-files",
)  # fmt: skip
LAYERS = 30


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A decode graph as deep as SmolLM2's."""
    model = llama(layers=LAYERS)
    cache = static_cache(model, 60)
    options = {"budget": 24, "sinks": 2, "recents": 8}
    found = explain(model.forward, torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache, options=options)
    path = tmp_path_factory.mktemp("page") / "decode.html"
    found.save_html(path)
    return path


class Checker(HTMLParser):
    """Collects tags and ids, and sees that tags are closed in order."""

    VOID = frozenset({"meta", "link", "path", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [v for k, v in attrs if k == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}>"


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    assert len(set(checker.ids)) == len(checker.ids)
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(checker.ids)
    return checker


def test_all_sites_are_shown_and_drawn(page):
    text = page.read_text()
    checker = checked(text)
    assert page.stat().st_size < 5e6
    for layer in range(LAYERS):
        assert text.count(f">model.layers.{layer}.self_attn</a>") == 1
    assert checker.tags.count("svg") == 2 * LAYERS
    for part in ("sals.attend", "sals.encode", "scaled_dot_product_attention", "kv &lt;= a0", "24 of 60 cached tokens"):
        assert part in text
    for part in ("mask_fn", "verify", "KV bytes per token", "2 sinks, 8 recents, 14 chosen by score"):
        assert part in text


def test_nothing_is_fetched(page):
    text = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"|url\(|@import|<script', text)


def test_declined_and_dense_sites(tmp_path):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = Attention(2, 2, 8, True, True, False)

        def forward(self, x):
            q = self.plain(x)[:, None]
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    found = explain(Mixed().eval(), torch.randn(1, 20, 16))
    assert {s.status for s in found.sites} == {"dense", "declined"}
    found.save_html(tmp_path / "mixed.html")
    text = (tmp_path / "mixed.html").read_text()
    checked(text)
    assert "dropout is active" in text and "20 keys do not exceed the budget" in text
    assert "the nearest miss" in text


def test_a_graph_without_attention(tmp_path):
    explain(nn.Linear(4, 4), torch.zeros(1, 4)).save_html(tmp_path / "none.html")
    text = (tmp_path / "none.html").read_text()
    checked(text)
    assert "No attention site was found" in text


def test_names_are_escaped(tmp_path):
    inner = Attention(2, 2, 8, True, True, False).eval()
    model = nn.Module()
    model.add_module("<b>&", inner)
    found = explain(inner, torch.randn(1, 20, 16), options={"skip_layers": ["<script>alert(1)</script>"]})
    found.save_html(tmp_path / "odd.html")
    assert "<script" not in (tmp_path / "odd.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)")
@pytest.mark.parametrize("width", [1400, 390])
def test_in_chromium(page, tmp_path, width):
    picture = tmp_path / "page.png"
    # Chromium makes no window narrower than 500 pixels: a phone's is a frame.
    probe = (
        "<body style='margin:0'><iframe style='border:0' width=%d height=1600 src='%s' onload=\"let d = "
        "this.contentDocument; document.title = d.documentElement.scrollWidth + ' of ' + this.contentWindow.innerWidth"
        " + ', ' + d.querySelectorAll('svg').length + ' drawn'\"></iframe></body>"
    )
    measured = tmp_path / "measured.html"
    measured.write_text(probe % (width, page.as_uri()))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={max(width, 500)},1600"]
    shown = subprocess.run(
        [*command, f"--screenshot={picture}", measured.as_uri()], capture_output=True, text=True, timeout=200
    )
    assert picture.stat().st_size > 20_000, shown.stderr
    assert "CONSOLE" not in shown.stderr, shown.stderr
    # The page itself never scrolls sideways: wide tables and pictures scroll within their own boxes.
    dumped = subprocess.run([*command, "--dump-dom", measured.as_uri()], capture_output=True, text=True, timeout=200)
    found = re.search(r"<title>(\d+) of (\d+), (\d+) drawn</title>", dumped.stdout)
    assert found, dumped.stdout
    wide, available, drawn = map(int, found.groups())
    assert wide <= available == width and drawn == 2 * LAYERS

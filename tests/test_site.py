"""The rendered documentation in a browser: tables fit a small laptop, no page is wider than a phone, formulas and pictures are there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
WAIT = 900
"""Seconds for all pages."""
MEASURE = """<!doctype html><body><script>
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const tell = (path, value) => fetch(path, { method: "POST", body: JSON.stringify(value) });
const measure = async (page, width) => {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  const loaded = new Promise((done) => (frame.onload = done));
  frame.src = page;
  document.body.append(frame);
  await loaded;
  const inside = frame.contentDocument, all = (selector) => [...inside.querySelectorAll(selector)];
  const raw = () => all(".arithmatex").filter((f) => !f.querySelector(".katex"));
  for (let n = 0; n < 200 && raw().length; n++) await wait(20);
  await wait(30);
  const boxes = all(".md-content .md-typeset__scrollwrap");
  const row = {
    page, width,
    tables: boxes.map((box) => [box.scrollWidth - box.clientWidth, box.innerText.trim().slice(0, 60)]),
    loose: all(".md-content table:not([class])").length - boxes.length,
    over: inside.documentElement.scrollWidth - width,
    height: inside.documentElement.scrollHeight,
    formulas: raw().length + all(".katex-error").length,
    pictures: all("img").filter((i) => i.complete && !i.naturalWidth).map((i) => i.src),
    hosts: all("script[src], link[rel=stylesheet], img[src]").map((e) => e.src || e.href)
      .filter((address) => !address.startsWith(location.origin) && !address.startsWith("data:")),
  };
  frame.remove();
  return row;
};
(async () => {
  for (const page of PAGES) for (const width of WIDTHS) await tell("/row", await measure(page, width));
  await tell("/end", null);
})().catch((error) => tell("/end", String(error)));
</script>"""

pytestmark = pytest.mark.slow


class Server(ThreadingHTTPServer):
    """Serves a folder and the page that measures, and keeps what that page reports."""

    page: str
    rows: list[dict[str, Any]]
    wrong: str | None
    done: threading.Event


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self):
        if self.path != "/measure":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.server.page.encode())

    def do_POST(self):
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        if self.path == "/row":
            self.server.rows.append(said)
        else:
            self.server.wrong = said
            self.server.done.set()

    def log_message(self, *_):
        pass


def measured(folder: Path, pages: list[str], widths: tuple[int, ...], profile: Path) -> list[dict[str, Any]]:
    """One row for every page and width, by a browser of its own."""
    server = Server(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    server.rows, server.wrong, server.done = [], None, threading.Event()
    server.page = MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(widths))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/measure"
    given = (f"--user-data-dir={profile}", "--window-size=1400,1000", "--remote-debugging-port=0", address)
    browser = subprocess.Popen(
        [str(BROWSER), *FLAGS, *given], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert server.done.wait(WAIT), f"the browser stopped after {server.rows[-1:]}"
    finally:
        browser.terminate()
        browser.wait(30)
        server.shutdown()
        server.server_close()
    assert server.wrong is None
    return server.rows


def built(folder: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """``--strict`` fails on broken links and anchors, and on pages that are not in the navigation; with ``--quiet`` it counts no warnings."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, capture_output=True, text=True, env=quiet)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site."""
    if BROWSER is None:
        pytest.skip("Chromium is not installed")
    pytest.importorskip("mkdocs", reason="needs the extra docs: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = built(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def rows(site, tmp_path_factory) -> list[dict[str, Any]]:
    pages = ["/" + str(page.relative_to(site)) for page in sorted(site.rglob("index.html"))]
    assert len(pages) > 50
    return measured(site, pages, (1366, 390), tmp_path_factory.mktemp("profile"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[gone](gone.md)", "a link 'gone.md', but the target is not found"),
        ("[gone](index.md#gone)", "does not contain an anchor '#gone'"),
        ("[home](index.md#home)", 'not included in the "nav" configuration'),
        ("[home](index.md#home)", ""),
    ],
)
def test_a_broken_link_and_a_page_without_a_way_to_it_are_found(text, says, tmp_path):
    """With the settings of the documentation, over two pages."""
    pytest.importorskip("mkdocs", reason="needs the extra docs: pip install -e '.[docs]'")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# Home\n")
    (tmp_path / "docs/page.md").write_text(f"# Page\n\n{text}\n")
    nav = ["index.md"] if "nav" in says else ["index.md", "page.md"]
    own = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": "docs",
        "nav": nav,
        "plugins": [],
        "hooks": [],
        "extra_css": [],
    }
    (tmp_path / "mkdocs.yml").write_text(json.dumps({**own, "extra_javascript": []}))
    done = built(tmp_path / "site", root=tmp_path)
    assert (done.returncode == 0) == (not says)
    assert says in done.stderr


def test_tables_fit_a_small_laptop(rows):
    laptop = [row for row in rows if row["width"] == 1366]
    assert [(row["page"], *table) for row in laptop for table in row["tables"] if table[0] > 1] == []
    assert sum(len(row["tables"]) for row in laptop) > 100
    assert [row["page"] for row in rows if row["loose"]] == []


def test_no_page_is_wider_than_its_window(rows):
    assert [(row["page"], row["width"], row["over"]) for row in rows if row["over"] > 0] == []


def test_no_page_is_endless(rows):
    laptop = [row for row in rows if row["width"] == 1366]
    assert [(row["page"], row["height"]) for row in laptop if row["height"] > 40_000] == []


def test_formulas_and_pictures_are_shown_and_nothing_is_loaded_from_elsewhere(rows):
    for name in ("formulas", "pictures", "hosts"):
        assert [(row["page"], row[name]) for row in rows if row[name]] == []


def test_a_wide_table_and_a_broken_picture_are_found(tmp_path):
    if BROWSER is None:
        pytest.skip("Chromium is not installed")
    table = "<table>" + "<td>unbreakable</td>" * 40 + "</table>"
    (tmp_path / "page.html").write_text(
        f'<div class=md-content><div class=md-typeset__scrollwrap style="overflow:auto">{table}</div></div>'
        f'<p style="width:1400px">wide</p><img src="nothing.png"><span class="arithmatex">\\(x\\)</span>'
    )
    (row,) = measured(tmp_path, ["/page.html"], (1366,), tmp_path / "profile")
    assert row["tables"][0][0] > 500
    assert row["over"] > 0
    assert row["formulas"] == len(row["pictures"]) == 1

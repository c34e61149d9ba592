"""The report's page in a real browser: no message, no request, fits a phone, light and dark, every control works.

Runs where Chromium or Chrome is installed (``VISACC_BROWSER`` names another binary). The page is opened unchanged but for
a probe script: it collects errors from the start, uses the controls, and sends what it saw to a frame around it, whose
width is a phone's (a window cannot be that narrow without a screen).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from report_runs import bench_run, eval_run, score_file, vlm_run

from visacc.report.page import build

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("VISACC_BROWSER") or next(filter(None, map(shutil.which, NAMES)), "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome (or VISACC_BROWSER=path)"),
]

EARLY = """<script>
window.seen = {messages: []};
for (const kind of ["error", "warn"]) {
  const before = console[kind];
  console[kind] = (...words) => { seen.messages.push(kind + ": " + words.join(" ")); before(...words); };
}
addEventListener("error", (e) => seen.messages.push("error: " + (e.message || e.target.outerHTML)), true);
addEventListener("unhandledrejection", (e) => seen.messages.push("rejection: " + e.reason));
document.addEventListener("securitypolicyviolation", (e) => seen.messages.push("blocked: " + e.blockedURI));
</script>"""

LATE = """<script>
addEventListener("load", () => setTimeout(() => {
  const $ = (s) => document.querySelector(s), $$ = (s) => [...document.querySelectorAll(s)];
  const wide = () => document.documentElement.scrollWidth - innerWidth;
  const colours = () => [document.body, $("th"), $("svg text"), $("button")].filter(Boolean).map((e) => {
    const style = getComputedStyle(e);
    return [e.tagName, e.tagName === "text" ? style.fill : style.color, style.backgroundColor];
  });
  const change = (e, value, kind = "change") => { e.value = value; e.dispatchEvent(new Event(kind, {bubbles: true})); };
  const drawn = (s) => $$(s).filter((e) => e.offsetParent && e.getBoundingClientRect().width > 0);
  const result = {width: innerWidth, wide: [wide()], dark: matchMedia("(prefers-color-scheme: dark)").matches};
  result.broken = $$("img").filter((i) => i.hasAttribute("src") && !i.naturalWidth).length;
  result.pictures = drawn(".strip img.picture").length;
  result.smallest = Math.min(...$$("p, td, th, figcaption, dd, li").map((e) => parseFloat(getComputedStyle(e).fontSize)));
  result.plot = $$(".plots svg text").map((e) => e.getBoundingClientRect().height);
  result.themes = [];
  for (let i = 0; i < 4; i++) {
    result.themes.push([$("#theme").textContent, colours()]);
    if (i < 3) $("#theme").click();
  }
  if ($("#pictures")) {
    $("[data-view=slider]").click();
    result.slider = {strips: drawn(".strip").length, frames: drawn(".compare .frame").length};
    change($("#left"), "0");
    change($("#right"), "2");
    const images = () => $$(".item:first-child .compare img.picture").map((i) => i.src);
    result.slider.own = images().map((src) =>
      $$(".item:first-child .shot").find((f) => f.querySelector(".picture").src === src)?.dataset.method);
    result.slider.right = $(".item:first-child .compare .over .picture").src ===
      $(".item:first-child .shot[data-method='2'] .picture").src;
    change($(".compare input"), "20", "input");
    const wipes = () => $$(".compare").map((c) => c.style.getPropertyValue("--wipe"));
    result.slider.one = wipes();
    change($("#wipe"), "70", "input");
    result.slider.all = wipes();
    $("#flip").click();
    result.slider.flipped = wipes();
    result.slider.clip = getComputedStyle($(".compare .over")).clipPath;
    const heat = () => getComputedStyle($(".compare .heat")).opacity;
    result.slider.heat = [heat()];
    $("#heat").click();
    result.slider.heat.push(heat());
    result.wide.push(wide());
    $("[data-view=strip]").click();
    result.slider.back = [drawn(".strip").length, drawn(".compare").length];
  }
  if ($("#which")) {
    const maps = () => $$(".order .heat").map((i) => i.src);
    const mean = maps();
    change($("#which"), "1");
    result.order = {
      picture: $$(".order .picture").map((i) => i.src).join() ===
        $$(".item:nth-child(2) .shot .picture").map((i) => i.src).join(),
      map: maps().join() === $$(".item:nth-child(2) .shot .heat").map((i) => i.src).join(),
    };
    change($("#opacity"), "30", "input");
    result.order.opacity = getComputedStyle($(".order .heat")).opacity;
    change($("#which"), "mean");
    result.order.mean = maps().join() === mean.join();
  }
  $$("details").forEach((d) => { d.open = true; });
  result.wide.push(wide());
  setTimeout(() => {
    result.messages = seen.messages;
    result.requests = performance.getEntriesByType("resource").map((r) => r.name).filter((n) => !n.startsWith("data:"));
    parent.postMessage(JSON.stringify(result), "*");
  }, 50);
}, 50));
</script>"""

OUTER = """<!doctype html><body style="margin:0"><iframe src="page.html" style="width:%dpx;height:844px;border:0"></iframe>
<pre id="result"></pre><script>
addEventListener("message", (e) => { document.querySelector("#result").textContent = btoa(encodeURIComponent(e.data)); });
</script>"""


def probe(page: Path, folder: Path, *, width: int = 390, dark: bool = False) -> dict[str, Any]:
    """What a browser saw of the page at a width."""
    import base64
    import urllib.parse

    folder.mkdir()
    text = page.read_text(encoding="utf-8")
    assert text.count("<title>") == 1
    text = text.replace("<title>", EARLY + "<title>", 1).replace("</body>", LATE + "</body>", 1)
    (folder / "page.html").write_text(text, encoding="utf-8")
    (folder / "outer.html").write_text(OUTER % width)
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
        "--disable-background-networking", f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={max(width, 800)},900",
        "--dump-dom", (folder / "outer.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    found = re.search(r'<pre id="result">([A-Za-z0-9+/=]+)</pre>', done.stdout)
    assert found, f"the page sent nothing: {done.stderr[-2000:]}"
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(urllib.parse.unquote(base64.b64decode(found[1]).decode()))


def check(seen: dict[str, Any], *, width: int, dark: bool) -> None:
    assert seen["messages"] == []
    assert seen["requests"] == []
    assert seen["width"] == width
    assert seen["dark"] is dark
    assert all(extra <= 0 for extra in seen["wide"]), seen["wide"]
    assert seen["broken"] == 0
    assert seen["smallest"] >= 12
    assert all(height >= 9 for height in seen["plot"])
    names = [name for name, _ in seen["themes"]]
    assert names == ["colours: automatic", "colours: light", "colours: dark", "colours: automatic"]
    automatic, light, night, again = (colours for _, colours in seen["themes"])
    assert automatic == again == (night if dark else light)
    for colours, is_dark in ((light, False), (night, True)):
        paper = luminance(colours[0][2])
        assert (paper < 0.05) is is_dark
        for tag, ink, own in colours:
            ground = luminance(own) if own != "rgba(0, 0, 0, 0)" else paper
            assert contrast(luminance(ink), ground) >= 4.5, (tag, ink, own)


def luminance(colour: str) -> float:
    values = [int(v) / 255 for v in re.findall(r"\d+", colour)[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("report")
    return build([bench_run(base / "run")], base / "report.html")


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, False)])
def test_bench_page(bench: Path, tmp_path: Path, width: int, dark: bool) -> None:
    seen = probe(bench, tmp_path / "probe", width=width, dark=dark)
    check(seen, width=width, dark=dark)
    assert seen["pictures"] == 4 * 4
    slider = seen["slider"]
    assert (slider["strips"], slider["frames"], slider["back"]) == (0, 4, [4, 0])
    assert slider["own"][0] == "0"
    assert slider["right"] is True
    assert slider["one"] == ["20%", "50%", "50%", "50%"]
    assert slider["all"] == ["70%"] * 4
    assert slider["flipped"] == ["0%"] * 4
    assert slider["clip"].startswith("inset(0px 0px 0px 0%)")
    assert [float(v) for v in slider["heat"]] == [0.0, 0.6]
    assert seen["order"] == {"picture": True, "map": True, "opacity": "0.3", "mean": True}


def test_evaluation_page(tmp_path: Path) -> None:
    page = build([eval_run(tmp_path / "run")], tmp_path / "report.html")
    seen = probe(page, tmp_path / "probe")
    check(seen, width=390, dark=False)
    assert seen["pictures"] == 6 * 3


def test_pages_without_pictures(tmp_path: Path) -> None:
    """A page of speculators and one of scores: the script finds nothing to drive and stays silent."""
    speculators = vlm_run(tmp_path / "vlm.json")
    scores = score_file(tmp_path / "scores.json", tmp_path / "scenes")
    for i, file in enumerate((speculators, scores)):
        seen = probe(build([file], tmp_path / f"{i}.html"), tmp_path / f"probe{i}")
        check(seen, width=390, dark=False)
        assert seen["pictures"] == 0

"""The page in a real browser: headless Chromium, driven by Playwright; skipped without them."""

import re
import shutil
from collections.abc import Iterator

import pytest

pytest.importorskip("starlette", reason='pip install "megatron-zpp[serve]"')
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

from megatron_zpp.serve.app import PAGE  # noqa: E402
from tests.megatron_zpp.serve.serving import POSITIONS, Server, serving, text_model  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(text_model()) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield started
        started.close()


@pytest.fixture
def page(browser, server: Server):
    """The page, open; whatever the browser complains of fails the test."""
    opened = browser.new_page()
    complaints: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("console", lambda line: complaints.append(line.text) if line.type == "error" else 0)
    opened.goto(f"http://127.0.0.1:{server.port}/")
    opened.complaints = complaints
    yield opened
    opened.close()
    server.pause = 0
    server.wait_until_idle()
    assert not complaints


def test_it_names_the_model_and_fits_its_positions(page) -> None:
    playwright.expect(page.locator("#model")).to_have_text(f"tiny, up to {POSITIONS} tokens")
    assert page.get_by_label("Tokens").get_attribute("max") == str(POSITIONS)


def test_text_appears_after_the_prompt_while_it_is_made(page, server: Server) -> None:
    page.get_by_label("Prompt").fill("<b>ab")
    page.get_by_label("Tokens").fill("60")
    page.get_by_label("Seed").fill("5")
    server.pause = 0.03
    page.get_by_role("button", name="Generate").click()
    playwright.expect(page.get_by_role("button", name="Generate")).to_be_disabled()
    playwright.expect(page.locator("#text span")).not_to_be_empty()
    assert server.worker.is_running
    playwright.expect(page.locator("#status")).to_have_text(re.compile("^60 tokens in .* s"))
    asked = {"prompt": "<b>ab", "max_tokens": 60, "seed": 5, "temperature": 0.8}
    _, answer = server.ask("POST", "/v1/completions", asked)
    shown = page.locator("#text").evaluate("node => node.textContent")
    assert shown == "<b>ab" + answer["choices"][0]["text"]
    assert page.locator("#text b").count() == 0  # it is text, not markup


def test_stop_by_key_and_by_button(page, server: Server) -> None:
    server.pause = 0.03
    page.get_by_label("Tokens").fill("200")
    for way in ("key", "button"):
        page.get_by_label("Prompt").press("Control+Enter")
        playwright.expect(page.locator("#text span")).not_to_be_empty()
        if way == "key":
            page.keyboard.press("Escape")
        else:
            page.get_by_role("button", name="Stop").click()
        playwright.expect(page.locator("#status")).to_have_text("Stopped.")
        server.wait_until_idle()
    assert server.steps < 250


def test_what_the_server_refuses_is_shown(page) -> None:
    page.get_by_label("Prompt").fill("a" * 300)
    page.get_by_role("button", name="Generate").click()
    playwright.expect(page.locator("#status.bad")).to_contain_text("256 positions")
    assert [line for line in page.complaints if "400" not in line] == []
    page.complaints.clear()  # the browser reports the refusal, too


def test_it_can_be_used_without_eyes_and_without_a_mouse(page) -> None:
    """Every field has a label of its own, and Tab goes through all of them in their order."""
    names = page.locator("textarea, input").evaluate_all(
        "fields => fields.map(field => field.labels.length === 1 && field.labels[0].innerText)"
    )
    assert all(names) and len(set(names)) == len(names) == 7
    page.locator("#prompt").focus()
    visited = []
    for _ in range(8):
        visited.append(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    assert visited == [
        "prompt", "max-tokens", "temperature", "top-p", "top-k", "seed", "stop-text", "go",
    ]  # fmt: skip
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.get_by_role("status").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(scheme: str, page) -> None:
    """Contrast of 4.5 or more (WCAG 2.1, AA) for every colour of text, in both schemes."""
    page.emulate_media(color_scheme=scheme)
    ratios = page.evaluate(
        """() => {
          const style = getComputedStyle(document.documentElement);
          const light = (name) => {
            const hex = style.getPropertyValue(name).trim().slice(1);
            const parts = [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
            const [r, g, b] = parts.map(
              (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const ratio = (a, b) => {
            const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
            return (high + 0.05) / (low + 0.05);
          };
          return [["--ink", "--paper"], ["--ink", "--card"], ["--faint", "--card"],
            ["--faint", "--paper"], ["--new", "--card"], ["--bad", "--card"],
            ["--accent", "--card"], ["--on-accent", "--accent"]].map(([a, b]) => ratio(a, b));
        }"""
    )
    assert len(ratios) == 8 and min(ratios) >= 4.5, ratios


def test_it_fits_a_narrow_screen(page) -> None:
    page.set_viewport_size({"width": 340, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 340


def test_nothing_is_fetched_from_elsewhere() -> None:
    assert not re.findall(r"(?:src|href)=\"(?!data:)|https?://|@import", PAGE.read_text())

"""The page, in a real browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from edged.api.page import PAGE_FOLDER
from edged.records import Caller, Feedback
from tests.edged.api.light_ports import an_adapter, an_update
from tests.edged.api.light_server import Light, serving, serving_in_thread

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic", "--no-first-run"]
PATIENCE_MS = 20_000  # a hang guard


@contextmanager
def page_of(light: Light, chromium: Path) -> Iterator[Page]:
    """The page in a fresh browser; anything that its console complains about fails the test."""
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(chromium), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1240, "height": 860})
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(light.url)
        yield page
        browser.close()
    # Chromium complains about every refusal, which the page itself shows.
    assert not [text for text in complaints if "Failed to load resource" not in text]


def learn_from_each_rating(light: Light) -> None:
    """What the daemon would do after enough ratings, after one."""

    def learn(row: Feedback) -> None:
        control = light.control
        control.learner["ratings_until_update"] -= 1
        control.update_rows.append(an_update(4, verdict="refused", reason="its answers lost their fluency"))
        control.lineage.append(an_adapter(4, state="refused", reason="its answers lost their fluency"))
        control.publish("feedback", {"id": row.id})
        control.publish("update", {"id": 4})

    light.book.on_feedback = learn


@pytest.mark.browser
def test_a_person_chats_rates_and_sees_what_was_learned(tmp_path: Path, require: Callable[[str], Path]) -> None:
    chromium = require("chromium")
    with serving_in_thread(tmp_path) as light, page_of(light, chromium) as page:
        learn_from_each_rating(light)
        expect(page.locator("#chart circle")).to_have_count(3)
        expect(page.get_by_text("5 more ratings until the next update")).to_be_visible()

        page.get_by_label("Your question").fill("Why is the sky blue?")
        page.keyboard.press("Enter")
        expect(page.get_by_text("Hello there.")).to_be_visible()
        page.get_by_role("button", name="Good answer").click()
        expect(page.get_by_text("Saved")).to_be_visible()
        expect(page.get_by_role("button", name="Good answer")).to_have_attribute("aria-pressed", "true")
        assert [row.rating for row in light.book.rows] == [1.0]

        expect(page.get_by_text("4 more ratings until the next update")).to_be_visible()
        expect(page.locator("#chart circle")).to_have_count(4)
        expect(page.locator("#updates li").first).to_contain_text("Update 4")
        expect(page.locator("#updates li").first).to_contain_text("its answers lost their fluency")
        expect(page.locator("#last-refusal")).to_contain_text("v4")
        expect(page.locator("#versions li").first).to_contain_text("refused")

        page.get_by_role("button", name="Correct it").click()
        page.get_by_label("A better answer").fill("Air scatters blue light.")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_text("Changed")).to_be_visible()
        assert (light.book.rows[-1].correction, light.book.rows[-1].rating) == ("Air scatters blue light.", 1.0)

        page.get_by_role("button", name="Promote v1").click()
        expect(page.locator("#live")).to_have_text("v1 live")
        page.get_by_role("button", name="Roll back").click()
        expect(page.locator("#live")).to_have_text("v0 live")
        assert [entry.action for entry in light.control.audits] == ["rolled_back", "promoted"]


@pytest.mark.browser
def test_the_page_asks_for_a_key_and_fits_a_phone(tmp_path: Path, require: Callable[[str], Path]) -> None:
    chromium = require("chromium")
    root = Caller(name="uid:0", scopes=frozenset())
    with serving_in_thread(tmp_path) as light:
        _, secret = asyncio.run(light.keys.create("page", frozenset({"infer", "feedback"}), caller=root))
        with page_of(light, chromium) as page:
            page.set_viewport_size({"width": 360, "height": 740})
            page.get_by_label("Key", exact=True).fill(secret)
            page.keyboard.press("Enter")
            expect(page.locator("#live")).to_have_text("v3 live")
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= 360
            page.get_by_role("button", name="Promote v1").click()
            expect(page.get_by_text("lacks the scope")).to_be_visible()


def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as light:
            index = await light.tcp.get("/")
            assert index.headers["content-type"] == "text/html; charset=utf-8"
            assert "default-src 'none'" in index.headers["content-security-policy"]
            names = re.findall(r'(?:src|href)="(/[^"]+)"', index.text)
            assert names
            for name in names:
                assert (await light.tcp.get(name)).status_code == 200
            again = await light.tcp.get("/", headers={"if-none-match": index.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")

    asyncio.run(run())
    for file in PAGE_FOLDER.iterdir():
        # The namespace of SVG is a name, not an address that is fetched.
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, file.name
        assert "https://" not in text, file.name

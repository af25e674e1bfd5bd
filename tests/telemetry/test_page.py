"""The live page in a headless Chromium, fed by a made-up overview."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support import overview
from support.page import OPERATOR_KEY, Source, page_app, serving

from gammaray.api.drain import Drain

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, which is not installed")
expect = playwright.expect
expect.set_options(timeout=20_000)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
HOSTILE = [
    "<img src=x onerror=document.title='owned'>",
    "\"><script>document.title='owned'</script>",
    "javascript:alert(1)",
    "\u202eevil",
    "a/../b?c#d",
    "${1}{{2}}",
    "x" * 300,
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs a chromium, which is not installed")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(FLAGS))
        yield browser
        browser.close()


class Visit:
    """One open page, what it asked for, and what it complained about."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._listen)
        page.goto(f"{url}/dashboard")

    def _listen(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def part(self, selector: str) -> Any:
        return self.page.locator(selector)


@pytest.fixture
def visit(browser) -> Iterator[Callable[..., Visit]]:
    """Opens the page over a source; its server ends after the test."""
    with ExitStack() as stack:

        def open_page(source: Source, *, size=WIDE, drain: Drain | None = None, **how: Any) -> Visit:
            url = stack.enter_context(serving(page_app(source, drain or Drain(), **how)))
            page = browser.new_page(viewport=size)
            stack.callback(page.close)
            page.set_default_timeout(30_000)
            return Visit(page, url)

        yield open_page


@pytest.fixture
def source() -> Source:
    return Source(overview.busy())


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_everything_is_there_and_nothing_complains(visit, source, size) -> None:
    seen = visit(source, size=size)
    expect(seen.part("#tenants tr")).to_have_count(6)
    for panel, text in {
        "#status": "live",
        "#tiles": "TPOT p99",
        "#detail": "30 s have passed since it was turned off",
        "#map": "Island of 4, joined by NVLink",
        "#decisions": "alpha 0.12 is under 0.20",
        "#heat": "depends on length",
        "#replicas": "2 connected, 1 resting",
        "#engine": "34 %",
        "#slowest": "hardly ever accepted",
    }.items():
        expect(seen.part(panel)).to_contain_text(text)
    assert seen.part("#tokens path.series, #latency path.series").count() == 2
    assert seen.part("#slowest tbody tr").count() == 10
    assert seen.complaints == []
    assert all(url.startswith(seen.url) for url in seen.asked)
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"


def test_a_row_has_the_numbers_of_its_tenant(visit, source) -> None:
    one = source.data["tenants"][0]
    row = visit(source).part("#tenants tr").filter(has_text="chat")
    expect(row).to_contain_text(f"{one['alpha']:.2f}")
    expect(row).to_contain_text(f"{one['S_low']:.2f}–{one['S_high']:.2f}")  # noqa: RUF001
    expect(row).to_contain_text(f"{100 * one['FR']:.1f} %")
    expect(row).to_contain_text("3–5 / 1–2")  # noqa: RUF001
    expect(row.locator(".badge")).to_have_text("on")
    assert row.locator(".badge path").count() == 1, "a state has a shape beside its colour"


def test_the_histogram_shows_both_peaks(visit, source) -> None:
    seen = visit(source)
    seen.part("#tenants tr").filter(has_text="chat").click()
    expect(seen.part("#detail h3")).to_contain_text("chat")
    chart = seen.part("#detail .histogram").first
    heights = [float(bar.get_attribute("height")) for bar in chart.locator("rect").all()]
    assert len(heights) == 25
    peaks = [i for i in range(1, 24) if heights[i - 1] < heights[i] > heights[i + 1]]
    assert [i / 25 <= 0.1 < (i + 1) / 25 or i / 25 <= 0.62 < (i + 1) / 25 for i in peaks] == [True, True]
    assert chart.locator("line.mark").count() == 2
    assert "peaks at 0.10 and 0.62" in chart.locator("svg").get_attribute("aria-label")
    expect(seen.part("#detail")).to_contain_text("two kinds of requests")


def test_updates_arrive_and_leave_what_a_reader_holds(visit, source) -> None:
    seen = visit(source)
    row = seen.part('#tenants tr[data-tenant="code"]')
    row.locator("button").focus()
    row.evaluate("element => { element.kept = true }")
    tenants = [overview.tenant("code", "off"), overview.tenant("new", "probe")]
    source.data = overview.busy() | {"tenants": tenants}
    expect(seen.part("#tenants tr")).to_have_count(2)
    expect(row).to_contain_text("off")
    assert seen.page.evaluate("document.activeElement.closest('tr').dataset.tenant") == "code"
    assert row.evaluate("element => element.kept")
    assert seen.complaints == []


def test_the_keyboard_reaches_a_tenant(visit, source) -> None:
    seen = visit(source)
    button = seen.part('#tenants tr[data-tenant="summaries"] button')
    button.focus()
    seen.page.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(seen.part("#detail h3")).to_contain_text("summaries")


def test_a_tenant_is_as_its_drafters_are(visit, source) -> None:
    """A tenant that is on may have a class that is off."""
    source.data["tenants"][1]["classes"][1]["state"] = "off"
    source.data["tenants"][2]["state"] = "emergency"
    seen = visit(source)
    expect(seen.part('tr[data-tenant="code"] td').first).to_have_text("off1 of 2 drafters")
    expect(seen.part('tr[data-tenant="summaries"] td').first).to_have_text("emergency")
    expect(seen.part("#tenants .name").first).to_have_text("code")
    expect(seen.part("#tiles")).to_contain_text("5 of 6")


def test_finding_and_ordering(visit, source) -> None:
    seen = visit(source)
    names = seen.part("#tenants .name")
    expect(names.first).to_have_text("default")  # probe is the worst state here
    seen.part("#order").select_option("tenant")
    expect(names.first).to_have_text("chat")
    seen.part("#find").fill("trans")
    expect(names).to_have_text(["translate"])
    seen.part("#find").fill("nobody")
    expect(seen.part("#tenants")).to_contain_text("No tenant has this in its name")


def test_hostile_names_stay_text(visit) -> None:
    data = overview.busy(HOSTILE)
    data["replicas"][0]["source"] = data["replicas"][0]["node"] = HOSTILE[0]
    data["placement"]["seats"][0] |= {"what": HOSTILE[1], "tenant": HOSTILE[0]}
    data["slowest"][0] |= {"request_id": HOSTILE[0], "diagnosis": HOSTILE[1]}
    data["decisions"][0] |= {"reason": HOSTILE[0], "rule": HOSTILE[1], "numbers": {HOSTILE[0]: HOSTILE[1]}}
    seen = visit(Source(data))
    expect(seen.part("#tenants tr")).to_have_count(len(HOSTILE))
    assert sorted(seen.part("#tenants .name").all_text_contents()) == sorted(HOSTILE)
    for name in HOSTILE:
        seen.part("#tenants .name").filter(has_text=name).first.click()
        expect(seen.part("#detail h3 bdi")).to_have_text(name)
    assert seen.part("main img, main script, main iframe, main a").count() == 0
    assert seen.page.title() == "gammaray"
    assert seen.complaints == []
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_empty_cluster_says_what_is_missing(visit) -> None:
    seen = visit(Source(overview.empty()))
    expect(seen.part("#tenants")).to_contain_text("No tenant has sent a request yet")
    for panel in ("#map", "#heat", "#decisions", "#slowest", "#replicas", "#engine", "#tokens"):
        expect(seen.part(panel)).not_to_be_empty()
    assert seen.complaints == []


def test_numbers_that_nobody_knows_are_dashes(visit) -> None:
    data = overview.busy()
    for one in data["tenants"]:
        one.update(
            dict.fromkeys(("alpha", "tau", "S", "S_low", "S_high", "FR", "SE", "KRR", "tpot_ms", "since"))
        )
        one["classes"][0]["keys"][0].update(dict.fromkeys(("S", "until", "histogram", "peaks", "quantiles")))
    data["heatmap"][0]["r"] = None
    seen = visit(Source(data | {"throughput": [], "phases": {"draft_s": None}}))
    expect(seen.part("#tenants tr").first).to_contain_text("no bounds")
    expect(seen.part("#status")).to_contain_text("live")
    assert "NaN" not in seen.page.content() and "undefined" not in seen.part("main").inner_text()
    assert seen.complaints == []


def test_alarms_and_their_end(visit, source) -> None:
    seen = visit(source)
    expect(seen.part("#status .alarm")).to_have_count(0)
    high = seen.part("#tenants-panel").bounding_box()
    source.data |= {"speculation": False, "controller": {"state": "silent", "age_s": 134.0}}
    expect(seen.part("#status")).to_contain_text("Kill switch is on")
    expect(seen.part("#status")).to_contain_text("Controller silent")
    expect(seen.part("#tiles")).to_contain_text("0 of 6")
    assert seen.part('#status [role="alert"]').count() == 2
    assert seen.page.title().startswith("⚠")
    assert seen.part("#tenants-panel").bounding_box() == high, "an alarm moves nothing"
    source.data |= {"speculation": True, "controller": {"state": "ok", "age_s": 1.0}}
    expect(seen.part("#status .alarm")).to_have_count(0)
    fell = [
        {"key": "chat/default/lookup", "text": "P50 fell"},
        {"key": "bank/default/lookup", "text": "P99 fell"},
    ]
    source.data |= {"alarms": fell}
    expect(seen.part("#status .alarm")).to_contain_text("chat/default/lookup: P50 fell; and 1 more")


def test_the_page_says_that_it_shows_only_the_busiest(visit) -> None:
    seen = visit(Source(overview.busy([f"t{i}" for i in range(130)])))
    expect(seen.part("#tenants tr")).to_have_count(100)
    expect(seen.part("#tenants-note")).to_contain_text("the 100 busiest")


def test_it_comes_back_when_the_server_ends_a_stream(visit, source) -> None:
    seen = visit(source, stream_s=0.35)
    while sum(url.endswith("/events") for url in seen.asked) < 3:
        seen.page.wait_for_event("request")
    source.data |= {"version": 77}
    expect(seen.part("#status")).to_contain_text("policy version 77")
    assert seen.complaints == []


def test_it_outlives_its_server(browser, source) -> None:
    page = browser.new_page()
    with serving(page_app(source, Drain())) as url:
        seen = Visit(page, url)
        expect(seen.part("#tenants tr")).to_have_count(6)
    expect(seen.part("#status .alarm")).to_contain_text("the server does not answer")
    expect(seen.part("#tenants tr")).to_have_count(6)
    source.data |= {"version": 78}
    with serving(page_app(source, Drain()), int(url.rpartition(":")[2])):
        expect(seen.part("#status")).to_contain_text("policy version 78", timeout=30_000)
        expect(seen.part("#status .alarm")).to_have_count(0)
        page.close()


def test_it_says_why_and_comes_back_after_a_failure(visit, source) -> None:
    drain = Drain()
    seen = visit(source, drain=drain)
    expect(seen.part("#status")).to_contain_text("live")
    drain.closed = True
    expect(seen.part("#status .alarm")).to_contain_text("the server is shutting down")
    expect(seen.part("#tenants tr")).to_have_count(6)
    drain.closed = False
    expect(seen.part("#status .alarm")).to_have_count(0)


def test_a_protected_server_is_asked_with_the_key(visit, source) -> None:
    seen = visit(source, protect=True)
    dialog = seen.part("#key-dialog")
    expect(dialog).to_be_visible()
    expect(seen.part("#tenants")).to_contain_text("Waiting for the server")
    seen.part("#key").fill("gr-wrong")
    seen.page.keyboard.press("Enter")
    expect(seen.part("#key-error")).to_have_text("nobody has this API key")
    seen.part("#key").fill(OPERATOR_KEY)
    seen.page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(seen.part("#tenants tr")).to_have_count(6)
    assert not [url for url in seen.asked if OPERATOR_KEY in url]
    assert seen.page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    assert OPERATOR_KEY not in seen.page.content()


def test_an_operator_applies_a_suggestion(visit, source) -> None:
    seen = visit(source)
    expect(seen.part("#heat")).to_contain_text("Enter the operator key to apply it")
    assert seen.part("[data-apply]").count() == 0
    seen.part("#key-button").click()
    seen.part("#key").fill(OPERATOR_KEY)
    seen.page.keyboard.press("Enter")
    seen.page.once("dialog", lambda dialog: dialog.dismiss())
    seen.part("[data-apply]").click()
    assert source.applied == []
    seen.page.once("dialog", lambda dialog: dialog.accept())
    seen.part("[data-apply]").click()
    expect(seen.part("#heat")).to_contain_text("applied; new requests use the class")
    assert source.applied == ["chat"]
    assert seen.complaints == []

"""The server's chat page in headless Chromium, against a server of its own."""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from serving import SERVING_PACKAGES, running_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request, Route

for name in SERVING_PACKAGES:
    pytest.importorskip(name, reason="serving needs it: pip install 'samir-vllm[serve]'")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed")

from samir_vllm.extras.serve.fake_model import SENTENCE  # noqa: E402

pytestmark = pytest.mark.slow

SAYING = SENTENCE.decode().strip()
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 20_000
SLOW_STEP_MS = 500
"""Of a step of the slow server: the sentence takes twice as long as ``WAIT_MS``, so whoever sees it cut off
within that has not just waited for its end."""

OpenPage = Callable[[str], "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        # As root there is no sandbox; in a container /dev/shm may be small.
        args = ["--no-sandbox", "--disable-dev-shm-usage"]
        opened = playwright.chromium.launch(executable_path=path, args=args)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running_server() as (url, _):
        yield url


@pytest.fixture(scope="module")
def slow_server() -> Iterator[str]:
    with running_server("--fake-step-ms", str(SLOW_STEP_MS)) as (url, _):
        yield url


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens the page of a server. At the test's end: nothing was asked of others, and no script failed."""
    context = browser.new_context()
    context.set_default_timeout(WAIT_MS)
    visits: list[tuple[str, list[str], list[str]]] = []

    def visit(url: str) -> Page:
        page, asked, wrong = context.new_page(), [], []
        visits.append((url, asked, wrong))
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if _is_wrong(message) else None)
        page.goto(url)
        sync_api.expect(page.locator("#pages")).to_contain_text("of")
        return page

    yield visit
    context.close()
    for url, asked, wrong in visits:
        assert asked
        assert [found for found in asked if not found.startswith((f"{url}/", "data:"))] == []
        assert wrong == []


def _is_wrong(message: Any) -> bool:
    """Violations of the content security policy, above all; a status of 400 is told there, too."""
    return message.type in ("error", "warning") and "Failed to load resource" not in message.text


def send(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def answers(page: Page) -> list[str]:
    return [found.strip() for found in page.locator(".assistant .text").all_text_contents()]


def wait_for_answers(page: Page, count: int) -> list[str]:
    """All of them, once so many are complete."""
    sync_api.expect(page.locator(".assistant .note")).to_have_count(count)
    return answers(page)


def wait_for_text(page: Page) -> None:
    """The last answer's first."""
    sync_api.expect(page.locator(".assistant .text").last).to_have_text(re.compile(r"\S"))


def asked(page: Page, text: str) -> dict[str, Any]:
    """Sends; what the page asked of the server."""
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, text)
    body: dict[str, Any] = request.value.post_data_json
    return body


def health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/health") as response:
        return dict(json.load(response))


def complete(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """A chat without the page."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return dict(json.load(response))


def wait_until_idle(url: str) -> None:
    deadline = time.monotonic() + WAIT_MS / 1000
    while (state := health(url))["running"] or state["waiting"]:
        assert time.monotonic() < deadline, state


def events(*chunks: dict[str, Any] | str) -> str:
    return "".join(f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n" for chunk in chunks)


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def answer_with(page: Page, body: str) -> None:
    """The next answers are these events, whatever the server would say."""

    def fulfil(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", fulfil)


# --- a chat -----------------------------------------------------------------------------------------------


def test_an_answer_is_shown(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    sync_api.expect(page.get_by_role("heading", name="fake", exact=True)).to_be_visible()
    send(page, "Hello")
    assert wait_for_answers(page, 1) == [SAYING]
    assert page.locator(".user .text").all_text_contents() == ["Hello"]
    note = page.locator(".assistant .note").inner_text()
    usage = complete(server, {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]})["usage"]
    assert f"{usage['prompt_tokens']} tokens in, {usage['completion_tokens']} out" in note
    assert "tokens/s" in note
    assert page.get_by_label("Message").input_value() == ""


def test_an_answer_in_one_piece_has_a_rate(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    answer_with(page, events(piece("All"), {"choices": [], "usage": usage}, "[DONE]"))
    send(page, "Hello")
    assert wait_for_answers(page, 1) == ["All"]
    assert re.fullmatch(
        r"3 tokens in, 2 out · \d+\.\d tokens/s · first after \d+\.\d\d s", page.locator(".note").inner_text()
    )


def test_an_answer_grows(open_page: OpenPage, slow_server: str) -> None:
    page = open_page(slow_server)
    send(page, "Hello")
    wait_for_text(page)
    (text,) = answers(page)
    assert SAYING.startswith(text)
    assert text != SAYING
    assert page.locator(".assistant .note").count() == 0
    page.get_by_role("button", name="Stop").click()
    wait_until_idle(slow_server)


def test_the_dialog_is_sent(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    first = asked(page, "One")
    assert first["messages"] == [{"role": "user", "content": "One"}]
    assert first["model"] == "fake"
    assert first["stream"] is True
    wait_for_answers(page, 1)
    second = asked(page, "Two")
    assert [(m["role"], m["content"].strip()) for m in second["messages"]] == [
        ("user", "One"),
        ("assistant", SAYING),
        ("user", "Two"),
    ]
    assert wait_for_answers(page, 2) == [SAYING, SAYING]


def test_settings_are_sent(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most new tokens").fill("7")
    page.get_by_label("System prompt").fill("Be brief.")
    body = asked(page, "Hello")
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"]) == (0, 7)
    assert "response_format" not in body
    assert wait_for_answers(page, 1) == [SENTENCE[:7].decode().strip()]
    assert "7 out" in page.locator(".note").inner_text()
    assert "cut off" in page.locator(".note").inner_text()


def test_json_mode(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    page.get_by_text("Settings").click()
    page.get_by_label("Answer in JSON").check()
    assert asked(page, "Hello")["response_format"] == {"type": "json_object"}
    (text,) = wait_for_answers(page, 1)
    assert isinstance(json.loads(text), dict)


def test_keys_of_the_message(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    message = page.get_by_label("Message")
    sync_api.expect(message).to_be_focused()
    message.fill("One")
    message.press("Shift+Enter")
    message.press_sequentially("line")
    assert message.input_value() == "One\nline"
    assert page.locator(".turn").count() == 0
    message.press("Enter")
    assert wait_for_answers(page, 1) == [SAYING]
    assert page.locator(".user .text").all_text_contents() == ["One\nline"]
    message.fill("  ")
    message.press("Enter")
    assert page.locator(".user").count() == 1
    sync_api.expect(message).to_be_focused()


def test_enter_of_an_input_method_sends_nothing(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    page.get_by_label("Message").fill("かな")
    page.evaluate(
        "document.getElementById('message').dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))"
    )
    assert page.locator(".turn").count() == 0
    assert page.get_by_label("Message").input_value() == "かな"


# --- an end before the end --------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["button", "escape"])
def test_stop_aborts(by: str, open_page: OpenPage, slow_server: str) -> None:
    page = open_page(slow_server)
    send(page, "Hello")
    wait_for_text(page)
    assert health(slow_server)["running"] == 1
    if by == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    wait_until_idle(slow_server)
    (text,) = wait_for_answers(page, 1)
    assert SAYING.startswith(text)
    assert text != SAYING
    assert "stopped" in page.locator(".assistant .note").inner_text()
    assert page.locator(".error").count() == 0
    assert [m["role"] for m in asked(page, "Go on")["messages"]] == ["user", "assistant", "user"]
    page.keyboard.press("Escape")
    wait_until_idle(slow_server)


def test_stop_before_the_answer_gives_the_message_back(open_page: OpenPage, slow_server: str) -> None:
    page = open_page(slow_server)
    held: list[Route] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    assert asked(page, "Hello")["messages"] == [{"role": "user", "content": "Hello"}]
    page.keyboard.press("Escape")
    sync_api.expect(page.get_by_label("Message")).to_have_value("Hello")
    assert page.locator(".turn").count() == 0
    assert asked(page, "Again")["messages"] == [{"role": "user", "content": "Again"}]


def test_a_new_chat_ends_the_old(open_page: OpenPage, slow_server: str) -> None:
    page = open_page(slow_server)
    send(page, "Old")
    wait_for_text(page)
    page.get_by_role("button", name="New chat").click()
    wait_until_idle(slow_server)
    assert page.locator(".turn").count() == 0
    assert asked(page, "New")["messages"] == [{"role": "user", "content": "New"}]
    wait_for_text(page)
    assert page.locator(".turn").count() == 2
    page.keyboard.press("Escape")
    wait_until_idle(slow_server)


def test_a_new_chat_knows_nothing_of_the_old(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    held: list[Route] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    asked(page, "Old")
    with page.expect_event("requestfailed"):
        page.get_by_role("button", name="New chat").click()
    page.evaluate("new Promise((done) => setTimeout(done))")  # by then the page has heard of it, too
    assert page.get_by_label("Message").input_value() == ""
    assert page.locator("#log *").count() == 0
    page.unroute_all()
    assert asked(page, "New")["messages"] == [{"role": "user", "content": "New"}]
    assert wait_for_answers(page, 1) == [SAYING]


# --- the load ---------------------------------------------------------------------------------------------


def test_the_pool_is_shown(open_page: OpenPage, slow_server: str) -> None:
    page = open_page(slow_server)
    meter = page.get_by_role("meter", name="KV pages in use")
    total = health(slow_server)["kv_pages"]["total"]
    sync_api.expect(meter).to_have_attribute("aria-valuemax", str(total))
    sync_api.expect(meter).to_have_attribute("aria-valuenow", "0")
    sync_api.expect(page.locator("#requests")).to_have_text("0 running, 0 waiting")
    send(page, "Hello")
    sync_api.expect(page.locator("#requests")).to_have_text("1 running, 0 waiting")
    used = health(slow_server)["kv_pages"]["used"]
    assert used > 0
    sync_api.expect(meter).to_have_attribute("aria-valuenow", str(used))
    sync_api.expect(page.locator("#pages")).to_have_text(f"KV pages: {used} of {total}")
    width = page.evaluate("parseFloat(document.querySelector('#pool div').style.width)")
    assert width == pytest.approx(100 * used / total, rel=1e-3)
    page.keyboard.press("Escape")
    sync_api.expect(meter).to_have_attribute("aria-valuenow", "0")
    sync_api.expect(page.locator("#requests")).to_have_text("0 running, 0 waiting")


def test_nobody_asks_for_the_load_of_a_hidden_page(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    page.clock.install()
    page.add_init_script("Object.defineProperty(document, 'hidden', {get: () => window.isHidden === true})")
    page.reload()
    sync_api.expect(page.locator("#pages")).to_contain_text("of")
    with page.expect_response("**/health"):
        page.clock.run_for(1000)
    asked: list[Request] = []
    change = "document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate(f"window.isHidden = true; {change}")
    page.on("request", lambda request: asked.append(request))
    for _ in range(5):
        page.clock.run_for(1000)
    assert asked == []
    with page.expect_response("**/health"):
        page.evaluate(f"window.isHidden = false; {change}")


# --- errors -----------------------------------------------------------------------------------------------


def test_a_refusal_is_shown_in_words(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("1000")
    send(page, "Hello")
    error = page.get_by_role("alert")
    sync_api.expect(error).to_have_text("temperature must be a number of 0 to 100, not 1000")
    assert page.locator(".turn").count() == 0
    sync_api.expect(page.get_by_label("Message")).to_have_value("Hello")
    assert page.get_by_label("API key").is_hidden()
    page.get_by_label("Temperature").fill("0")
    assert asked(page, "Hello")["messages"] == [{"role": "user", "content": "Hello"}]
    assert wait_for_answers(page, 1) == [SAYING]
    assert error.count() == 0


def test_an_error_within_a_stream(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    answer_with(
        page, events(piece("Half"), {"error": {"message": "the engine failed", "type": "server_error"}})
    )
    send(page, "Hello")
    assert wait_for_answers(page, 1) == ["Half"]
    sync_api.expect(page.get_by_role("alert")).to_have_text("the engine failed")


def test_a_stream_that_breaks_off(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    answer_with(page, events(piece("Half")))
    send(page, "Hello")
    sync_api.expect(page.get_by_role("alert")).to_contain_text("before the answer was complete")
    assert answers(page) == ["Half"]
    page.unroute_all()
    roles = [message["role"] for message in asked(page, "Go on")["messages"]]
    assert roles == ["user", "assistant", "user"]
    wait_for_answers(page, 2)
    assert page.get_by_role("alert").count() == 0


def test_what_is_no_event_ends_the_answer(open_page: OpenPage, slow_server: str) -> None:
    page = open_page(slow_server)
    page.evaluate("() => { JSON.parse = () => { throw new Error('no JSON') } }")
    send(page, "Hello")
    sync_api.expect(page.get_by_role("alert")).to_have_text("no JSON")
    wait_until_idle(slow_server)


def test_an_error_that_is_no_json(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=502, body="<h1>Bad gateway</h1>"))
    send(page, "Hello")
    sync_api.expect(page.get_by_role("alert")).to_have_text("The server answered with status 502.")


def test_a_server_that_has_gone(open_page: OpenPage) -> None:
    with running_server() as (url, process):
        page = open_page(url)
        process.terminate()
        process.wait()
        send(page, "Hello")
        sync_api.expect(page.get_by_role("alert")).to_contain_text("can’t be reached")
        sync_api.expect(page.locator("#requests")).to_have_text("server out of reach")
        sync_api.expect(page.get_by_label("Message")).to_have_value("Hello")


def test_a_server_that_dies_within_an_answer(open_page: OpenPage) -> None:
    with running_server("--fake-step-ms", str(SLOW_STEP_MS)) as (url, process):
        page = open_page(url)
        send(page, "Hello")
        wait_for_text(page)
        process.kill()
        sync_api.expect(page.get_by_role("alert")).to_contain_text("can’t be reached")
        (text,) = answers(page)
        assert SAYING.startswith(text)
        assert text


def test_a_server_that_is_not_ready(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    state = {**health(server), "status": "starting"}
    page.route("**/health", lambda route: route.fulfill(status=503, body=json.dumps(state)))
    sync_api.expect(page.locator("#requests")).to_have_text("server is starting")


def test_an_api_key(open_page: OpenPage) -> None:
    with running_server("--api-key", "open sesame") as (url, _):
        page = open_page(url)
        key = page.get_by_label("API key")
        sync_api.expect(key).to_be_visible()
        send(page, "Hello")
        sync_api.expect(page.get_by_role("alert")).to_contain_text("API key")
        key.fill("wrong")
        key.press("Enter")
        sync_api.expect(page.get_by_role("alert")).to_contain_text("API key")
        sync_api.expect(key).to_be_visible()
        key.fill("open sesame")
        key.press("Enter")
        sync_api.expect(page.get_by_role("heading", name="fake", exact=True)).to_be_visible()
        sync_api.expect(key).to_be_hidden()
        assert page.get_by_role("alert").count() == 0
        page.get_by_label("Message").press("Enter")
        assert wait_for_answers(page, 1) == [SAYING]
        page.reload()
        sync_api.expect(page.get_by_role("heading", name="fake", exact=True)).to_be_visible()
        sync_api.expect(key).to_be_hidden()


def test_no_key_is_asked_for_where_none_is_needed(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    send(page, "Hello")
    wait_for_answers(page, 1)
    sync_api.expect(page.get_by_label("API key")).to_be_hidden()


# --- text -------------------------------------------------------------------------------------------------


def test_markup_stays_text(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    markup = "<img src=x onerror='window.hurt = 1'><script>window.hurt = 1</script><b>&amp;</b>"
    answer_with(page, events(piece(markup), piece("</div><h1>"), "[DONE]"))
    send(page, markup)
    assert wait_for_answers(page, 1) == [f"{markup}</div><h1>"]
    assert page.locator(".user .text").all_text_contents() == [markup]
    assert page.locator("#log img, #log script, #log b, #log h1").count() == 0
    assert page.evaluate("window.hurt") is None


def test_markup_in_an_error_stays_text(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    answer_with(page, events({"error": {"message": "<b>no</b>"}}))
    send(page, "Hello")
    sync_api.expect(page.get_by_role("alert")).to_have_text("<b>no</b>")


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_in_any_pieces(size: int, end: str, open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    blocks = ["data: é€🙂", ": a comment", f"event: x{end}data: two{end}data: lines", "data: [DONE]"]
    stream = "".join(f"{block}{end}{end}" for block in blocks)
    found = page.evaluate(
        """async ([bytes, size]) => {
          const stream = new ReadableStream({
            start(to) {
              for (let i = 0; i < bytes.length; i += size)
                to.enqueue(new Uint8Array(bytes.slice(i, i + size)));
              to.close();
            },
          });
          const found = [];
          for await (const batch of events(stream)) found.push(...batch);
          return found;
        }""",
        [list(stream.encode()), size],
    )
    assert found == ["é€🙂", "two\nlines", "[DONE]"]


def test_light_and_dark(open_page: OpenPage, server: str) -> None:
    page = open_page(server)
    ground = "getComputedStyle(document.body).backgroundColor"
    shades = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        shades.append(sum(map(int, page.evaluate(ground)[4:-1].split(","))))
    assert shades[0] > 600 > 150 > shades[1]

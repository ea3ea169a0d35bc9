"""The server keeps to its OpenAPI document: schemathesis sends what that allows, and what it forbids.

Sources: schemathesis's documentation for its checks and phases.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import settings

from serving import SERVING_PACKAGES, running_server

for name in SERVING_PACKAGES:
    pytest.importorskip(name, reason="serving needs it: pip install 'samir-vllm[serve]'")
schemathesis = pytest.importorskip("schemathesis", reason="schemathesis isn't installed")

import requests  # noqa: E402
from jsonschema import Draft202012Validator  # noqa: E402
from schemathesis import Case  # noqa: E402
from schemathesis.core.failures import FailureGroup  # noqa: E402
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

from samir_vllm.extras.serve import bodies  # noqa: E402
from samir_vllm.extras.serve.app import App, AppOptions  # noqa: E402
from samir_vllm.extras.serve.fake_model import NAME, VOCAB_SIZE  # noqa: E402
from samir_vllm.extras.serve.metrics import Metrics  # noqa: E402
from samir_vllm.extras.serve.openapi import document  # noqa: E402

DOCUMENT = document(NAME)
SCHEMAS = DOCUMENT["components"]["schemas"]
SHORT = 8  # tokens of an answer here
UNENFORCEABLE = "can't be enforced"
"""What a grammar can't express is refused with these words; no document can say what that is."""

CONFIG = schemathesis.Config.from_dict({"generation": {"deterministic": True}})
API = schemathesis.openapi.from_dict(DOCUMENT, config=CONFIG)
DETERMINISTIC = settings(derandomize=True, database=None, deadline=None)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running_server() as (url, _):
        yield url


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as opened:
        yield opened


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def check_shape(name: str, value: Any) -> None:
    validator(SCHEMAS[name]).validate(value)


# --- generated requests -----------------------------------------------------------------------------------


def whole(value: Any) -> Any:
    """JSON Schema takes 1.0 for an integer, the server doesn't, nor does OpenAI's."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def known_ids(value: Any) -> Any:
    """Token ids brought into the vocabulary."""
    if isinstance(value, list):
        return [known_ids(item) for item in value]
    return value % VOCAB_SIZE if type(value) is int else value


def reconciled(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body as what the document can't say would have it: where fields contradict each other, one goes."""
    body = whole(body)
    for name in ("tokens", "prompt", "stop_token_ids"):
        if name in body:
            body[name] = known_ids(body[name])
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(key) % VOCAB_SIZE): bias for key, bias in body["logit_bias"].items()}
    if body.get("tools"):
        for number, tool in enumerate(body["tools"]):
            tool["function"]["name"] = f"f{number}"
        if all(message["role"] != "user" for message in body["messages"]):
            body["messages"].append({"role": "user", "content": ""})
    if body.get("messages"):
        body["messages"] = body["messages"][-SHORT:]  # the context holds no thousands
    if path.endswith("completions"):
        reconcile_answers(body)
    return body


def reconcile_answers(body: dict[str, Any]) -> None:
    if body.get("prompt_logprobs"):  # goes neither with events nor with an echo
        body["stream"] = body["stream_options"] = body["echo"] = None
    elif body.get("stream_options") is not None:
        body["stream"] = True
    body["prompt_logprobs"] = body.get("prompt_logprobs") or None
    body["n"] = min(body.get("n") or 1, 2)
    body["max_tokens"] = None if body.get("max_tokens") is None else min(body["max_tokens"], SHORT)
    if "prompt" in body:
        if body["max_tokens"] == 0 and not body.get("echo"):
            body["max_tokens"] = 1
        body["best_of"] = None if body.get("best_of") is None else body["n"]
        longest = SHORT if body["max_tokens"] is None else max(1, body["max_tokens"])
    else:
        body["max_completion_tokens"] = None
        body["max_tokens"] = longest = body["max_tokens"] or SHORT
        body["logprobs"] = body.get("logprobs") or bool(body.get("top_logprobs"))
        reconcile_form(body)
    body["min_tokens"] = min(body.get("min_tokens") or 0, longest)


def reconcile_form(body: dict[str, Any]) -> None:
    if body.get("response_format"):
        body["tools"] = None
    names = [tool["function"]["name"] for tool in body.get("tools") or ()]
    choice = body.get("tool_choice")
    if choice is not None and (not names or not isinstance(choice, str)):
        body["tool_choice"] = {"type": "function", "function": {"name": names[0]}} if names else None
    if names or body.get("response_format"):
        body["min_tokens"] = body["ignore_eos"] = None


def is_valid(case: Case) -> bool:
    return case.meta is not None and case.meta.generation.mode.is_positive


def check(case: Case, server: str, session: requests.Session) -> None:
    """All of schemathesis's checks. Of valid bodies it would take a refusal amiss: ours says more."""
    if is_valid(case) and isinstance(case.body, dict):
        case.body = reconciled(case.operation.path, case.body)
    response = case.call(base_url=server, session=session)
    case.validate_response(response, excluded_checks=[positive_data_acceptance])
    if is_valid(case) and response.status_code == 400:
        assert UNENFORCEABLE in response.json()["error"]["message"]


@pytest.mark.slow
@API.parametrize()
@settings(DETERMINISTIC, max_examples=5)
def test_the_server_keeps_to_the_document(case: Case, server: str, session: requests.Session) -> None:
    check(case, server, session)


@pytest.mark.slow
@API.include(method="POST").parametrize()
@settings(DETERMINISTIC, max_examples=500)
def test_the_server_keeps_to_the_document_at_length(
    case: Case, server: str, session: requests.Session
) -> None:
    check(case, server, session)


@pytest.mark.parametrize(
    "break_document",
    [
        lambda paths: paths["/v1/tokenize"]["post"]["responses"].pop("400"),
        lambda paths: paths["/v1/detokenize"]["post"]["responses"]["200"]["content"].update(
            {"application/json": {"schema": {"type": "object", "required": ["text"]}}}
        ),
        lambda paths: paths["/v1/models"]["get"]["responses"]["200"].update({"content": {"text/csv": {}}}),
    ],
    ids=["status", "shape", "content type"],
)
def test_a_wrong_document_is_found_out(break_document: Any, server: str, session: requests.Session) -> None:
    broken = copy.deepcopy(DOCUMENT)
    break_document(broken["paths"])
    api = schemathesis.openapi.from_dict(broken)
    cases = [
        api["/v1/tokenize"]["POST"].Case(body={}, media_type="application/json"),
        api["/v1/detokenize"]["POST"].Case(body={"tokens": []}, media_type="application/json"),
        api["/v1/models"]["GET"].Case(),
    ]
    found = []
    for case in cases:
        try:
            case.call_and_validate(base_url=server, session=session)
        except FailureGroup as exc:
            found.append(exc)
    assert len(found) == 1


@pytest.mark.parametrize("path", [path for path in DOCUMENT["paths"] if "post" in DOCUMENT["paths"][path]])
def test_refusals_that_no_json_brings_about(path: str, server: str) -> None:
    refused = {
        415: requests.post(server + path, data="{}", headers={"Content-Type": "text/plain"}),
        413: requests.post(
            server + path, data=b" " * ((8 << 20) + 1), headers={"Content-Type": "application/json"}
        ),
        400: requests.post(server + path, data="{", headers={"Content-Type": "application/json"}),
        405: requests.get(server + path),
    }
    for status, response in refused.items():
        assert response.status_code == status
        assert str(status) in DOCUMENT["paths"][path]["post"]["responses"]
        check_shape("Error", response.json())
    assert refused[405].headers["Allow"] == "POST"


# --- events -----------------------------------------------------------------------------------------------

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40, "stream": True}
COMPLETION = {"model": NAME, "prompt": ["One", "Two"], "max_tokens": 12, "stream": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {}}}}
STREAMED = {
    "chat": ("chat/completions", CHAT),
    "several chats": ("chat/completions", {**CHAT, "n": 3, "stop": "thoughts"}),
    "usage": ("chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "log-probabilities": ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3}),
    "JSON": ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
    "tools": ("chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
    "completion": ("completions", COMPLETION),
    "completion with usage": ("completions", {**COMPLETION, "stream_options": {"include_usage": True}}),
    "completion with log-probabilities": ("completions", {**COMPLETION, "logprobs": 2, "echo": True}),
}


@pytest.mark.parametrize("case", STREAMED)
def test_events_have_the_documented_shape(case: str, server: str) -> None:
    path, body = STREAMED[case]
    response = requests.post(f"{server}/v1/{path}", json=body)
    assert response.status_code == 200
    assert response.headers["Content-Type"].startswith("text/event-stream")
    *events, done, rest = response.content.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for chunk in chunks:
        check_shape("ChatCompletionChunk" if path.startswith("chat") else "CompletionChunk", chunk)
    assert any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("case", STREAMED)
def test_whole_answers_have_the_documented_shape(case: str, server: str) -> None:
    path, body = STREAMED[case]
    body = {name: value for name, value in body.items() if not name.startswith("stream")}
    response = requests.post(f"{server}/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    check_shape("ChatCompletion" if path.startswith("chat") else "Completion", response.json())


def test_answers_with_the_prompts_log_probabilities(server: str) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", COMPLETION)):
        asked = {**body, "stream": False, "prompt_logprobs": 2}
        answer = requests.post(f"{server}/v1/{path}", json=asked).json()
        assert "prompt_logprobs" in json.dumps(answer)
        check_shape("ChatCompletion" if path.startswith("chat") else "Completion", answer)


# --- keys -------------------------------------------------------------------------------------------------


def test_who_needs_a_key() -> None:
    keys = {"Authorization": "Bearer open sesame", "Content-Type": "application/json"}
    with running_server("--api-key", "open sesame") as (url, _):
        for path, operations in DOCUMENT["paths"].items():
            for method, operation in operations.items():
                if method == "parameters":
                    continue
                address = url + path.format(model=NAME)
                response = requests.request(method, address)
                if not operation["security"]:
                    assert response.status_code == 200, path
                    continue
                assert response.status_code == 401, path
                assert response.headers["WWW-Authenticate"] == "Bearer"
                check_shape("Error", response.json())
                keyed = requests.request(method, address, headers=keys)
                assert keyed.status_code == (200 if method == "get" else 400), path


# --- the document -----------------------------------------------------------------------------------------


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(target := value.get("$ref"), str):
            yield target
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


def test_the_document_hangs_together() -> None:
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)
    for target in references(DOCUMENT):
        _, _, kind, name = target.split("/")
        assert name in DOCUMENT["components"][kind], target
    operations = [op for path in DOCUMENT["paths"].values() for op in path.values() if isinstance(op, dict)]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT


def test_other_names_of_the_model() -> None:
    model = document(NAME, ["other"])["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    assert model["enum"] == [NAME, "other"]


def test_the_document_is_served(server: str) -> None:
    assert requests.get(f"{server}/openapi.json").json() == DOCUMENT


def test_every_route_is_documented() -> None:
    facts = bodies.ModelFacts(NAME, (), 1, 1, 1)
    nothing = cast(Any, None)
    app: Any = App(nothing, nothing, facts, Metrics(), nothing, AppOptions(1)).asgi()
    while not hasattr(app, "routes"):
        app = app._app
    served = {(route.path.replace(":path", ""), method) for route in app.routes for method in route.methods}
    documented = {
        (path, method.upper())
        for path, operations in DOCUMENT["paths"].items()
        for method in operations
        if method != "parameters"
    }
    assert served - {(path, "HEAD") for path, _ in served} == documented


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ("ChatRequest", {*bodies._CHAT, *bodies.HARMLESS, *bodies.UNSUPPORTED_IN_CHAT}),
        ("CompletionRequest", {*bodies._COMPLETION, *bodies.HARMLESS, *bodies.UNSUPPORTED_IN_COMPLETION}),
    ],
)
def test_every_field_is_documented(schema: str, names: set[str]) -> None:
    assert set(SCHEMAS[schema]["properties"]) == names

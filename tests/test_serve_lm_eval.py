"""lm-eval's own client against the server: its scores are what the engine says.

It asks for a prompt's log-probabilities by ``echo``, ``logprobs`` and one new token, and reads them by place.
Knows the demo model, and of lm-eval its class for servers of OpenAI's completions.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving import SERVING_PACKAGES, running_server

for name in SERVING_PACKAGES:
    pytest.importorskip(name, reason="serving needs it: pip install 'samir-vllm[serve]'")

from harness import GOLDEN  # noqa: E402
from samir_vllm import Engine, SamplingParams  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.demo]

DEMO = "smollm2-135m-instruct"
ENDS = json.loads((GOLDEN / "smollm2_greedy.json").read_text())["cases"][0]
"""Its answer is followed by a token that ends answers: one that must not be lost, for places are counted."""

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a small town in the mountains"),
    ("One two three four", " five six"),
    ("", "Once upon a time"),
]
ROLLING = ["A page is sixteen tokens of keys and values."]
CONTEXTS = ["The capital of France is", "One, two, three,"]
UNTIL = {"until": ["\n", "."], "max_gen_toks": 6}
PREFIX_TOKEN = 1
CLOSE = 1e-3  # between sums in FP32 whose order depends on what runs beside a request

_CLIENT = """
import json, sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.utils import RemoteTokenizer


class Tokenizer(RemoteTokenizer):
    def _validate_server(self):  # it wants /tokenizer_info, whose answers come as arguments here
        pass


asked = json.loads(sys.argv[1])
lm = LocalCompletionsAPI(
    model=asked["model"],
    base_url=asked["url"] + "/v1/completions",
    tokenizer_backend=None,
    custom_prefix_token_id=asked["prefix"],
    eos_string=asked["eos"],
    **asked["options"],
)
lm.tokenizer, lm.tokenizer_backend, lm.tokenized_requests = Tokenizer(asked["url"] + "/v1"), "remote", True


def instances(kind, arguments):
    return [Instance(kind, {}, tuple(given), i) for i, given in enumerate(arguments)]


print(json.dumps({
    "pairs": lm.loglikelihood(instances("loglikelihood", asked["pairs"])),
    "tokens": lm._loglikelihood_tokens([((None, None), *asked["ids"])]),
    "rolling": lm.loglikelihood_rolling(instances("loglikelihood_rolling", [[t] for t in asked["rolling"]])),
    "generated": lm.generate_until(
        instances("generate_until", [[context, dict(asked["until"])] for context in asked["contexts"]])
    ),
}))
"""


@pytest.fixture(scope="module")
def engine(demo_model_dir: Path) -> Engine:
    return Engine(demo_model_dir, device="cpu", dtype="float32")


def score(engine: Engine, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The continuation's log-likelihood, and whether it is the greedy one."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    told = engine.generate([*context, *continuation], params).prompt_logprobs
    assert told is not None
    tokens = [token for token in told[len(context) :] if token is not None]
    assert len(tokens) == len(continuation)
    return sum(token.logprob for token in tokens), all(token.token_id == token.top[0][0] for token in tokens)


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"num_concurrent": 4}], ids=str)
def test_scores_are_the_engine_s(demo_model_dir: Path, engine: Engine, options: dict[str, Any]) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval isn't installed: pip install 'lm-eval[api]'")
    answer = ENDS["greedy_ids"][:-1]
    with running_server("--model", str(demo_model_dir), "--device", "cpu", "--dtype", "float32") as server:
        asked = {
            "model": DEMO,
            "url": server.url,
            "options": options,
            "prefix": PREFIX_TOKEN,
            "eos": "<|im_end|>",
            "pairs": PAIRS,
            "ids": [ENDS["prompt_ids"], answer],
            "rolling": ROLLING,
            "contexts": CONTEXTS,
            "until": UNTIL,
        }
        command = [sys.executable, "-c", _CLIENT, json.dumps(asked)]
        told = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout.splitlines()[-1])

    encode = engine.tokenizer.encode
    for (context, continuation), (total, is_greedy) in zip(PAIRS, found["pairs"], strict=True):
        before = encode(context) if context else [PREFIX_TOKEN]
        whole = encode(context + continuation) if context else [PREFIX_TOKEN, *encode(continuation)]
        expected = score(engine, before, whole[len(before) :])
        assert (total, is_greedy) == (pytest.approx(expected[0], abs=CLOSE), expected[1])
    expected = score(engine, ENDS["prompt_ids"], answer)
    assert found["tokens"] == [[pytest.approx(expected[0], abs=CLOSE), True]]
    assert expected[1]
    for text, total in zip(ROLLING, found["rolling"], strict=True):
        assert total == pytest.approx(score(engine, [PREFIX_TOKEN], encode(text))[0], abs=CLOSE)
    params = SamplingParams(max_tokens=UNTIL["max_gen_toks"], stop=UNTIL["until"])
    assert found["generated"] == [engine.generate(context, params).text for context in CONTEXTS]

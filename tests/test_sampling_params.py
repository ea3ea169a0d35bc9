"""SamplingParams: each bound from both sides, each wrong type, unknown names, copies, and the messages."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samir_vllm.errors import RequestError
from samir_vllm.sampling import (
    MAX_ANSWERS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    SamplingParams,
    TokenSampling,
)

# name: (least, most, how the message gives the bounds)
WHOLE: dict[str, tuple[int, int | None, str]] = {
    "max_tokens": (1, None, "a whole number of at least 1"),
    "top_k": (0, None, "a whole number of at least 0"),
    "n": (1, MAX_ANSWERS, f"a whole number of 1 to {MAX_ANSWERS}"),
    "min_tokens": (0, 128, r"a whole number of 0 to 128 \(max_tokens\)"),
    "seed": (0, 2**64 - 1, f"None or a whole number of 0 to {2**64 - 1}"),
    "logprobs": (0, MAX_LOGPROBS, f"None or a whole number of 0 to {MAX_LOGPROBS}"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"None or a whole number of 0 to {MAX_LOGPROBS}"),
}
NUMBERS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 100, "a number of 0 to 100"),
    "top_p": (0, 1, "a number of 0 to 1"),
    "min_p": (0, 1, "a number of 0 to 1"),
    "repetition_penalty": (0.01, 100, "a number of 0.01 to 100"),
    "presence_penalty": (-2, 2, "a number of -2 to 2"),
    "frequency_penalty": (-2, 2, "a number of -2 to 2"),
}
OPTIONAL = {"seed", "logprobs", "prompt_logprobs"}
NAMES = [f.name for f in dataclasses.fields(SamplingParams)]
NO_NUMBER = [True, False, np.True_, "1", "", b"1", [1], (1,), {}, 1j, ..., np.array([1]), Decimal(1)]
NO_NUMBER += [Fraction(1), np.ones((3, 3)), np.timedelta64(1, "s"), np.complex64(1)]
NO_FINITE = [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf"), np.float16("-inf")]
EVERYTHING: dict[str, Any] = {
    "max_tokens": 77,
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {5: -100.0, 128_255: 2.5},
    "seed": 2**64 - 1,
    "min_tokens": 3,
    "stop": ("\n\n", "END"),
    "stop_token_ids": (9, 128_009),
    "ignore_eos": True,
    "n": 4,
    "logprobs": 20,
    "prompt_logprobs": 0,
}


def refusal(**wishes: Any) -> str:
    """The message for these wishes: one printable line."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wishes)
    message = str(caught.value)
    assert message.isprintable(), repr(message)
    assert len(message) < 400
    return message


def test_every_field_has_a_test_here() -> None:
    others = {"logit_bias", "stop", "stop_token_ids", "ignore_eos"}
    assert WHOLE.keys() | NUMBERS.keys() | others == set(NAMES) == EVERYTHING.keys()


def test_the_defaults_are_greedy_and_everything_else_is_off() -> None:
    params = SamplingParams()
    assert TokenSampling(params, seed=0).is_argmax
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0, 0, 1, 0)
    assert (params.n, params.seed, params.logprobs, params.prompt_logprobs) == (1, None, None, None)
    assert params.stop == params.stop_token_ids == ()
    assert params.logit_bias == {}
    assert not params.ignore_eos


# Whole numbers


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_at_their_bounds(name: str) -> None:
    least, most, _ = WHOLE[name]
    for value in (least, 10**30 if most is None else most):
        found = getattr(SamplingParams(**{name: value}), name)
        assert found == value
        assert type(found) is int


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_beyond_their_bounds(name: str) -> None:
    least, most, bounds = WHOLE[name]
    wrong = [least - 1, -(10**30), *([] if most is None else [most + 1, 10**30])]
    for value in wrong:
        assert re.fullmatch(f"{name} must be {bounds}, not .*", refusal(**{name: value}))
    assert refusal(**{name: wrong[0]}).endswith(f"not {wrong[0]}")


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [*NO_NUMBER, *NO_FINITE, 1.0, np.float32(1)], ids=repr)
def test_what_is_no_whole_number(name: str, value: object) -> None:
    assert re.fullmatch(f"{name} must be {WHOLE[name][2]}, not .*", refusal(**{name: value}))


@pytest.mark.parametrize("name", [*WHOLE, *NUMBERS])
def test_none_only_where_it_means_off(name: str) -> None:
    if name in OPTIONAL:
        assert getattr(SamplingParams(**{name: None}), name) is None
    else:
        assert refusal(**{name: None}).endswith("not None")


def test_min_tokens_reaches_up_to_max_tokens() -> None:
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    message = refusal(max_tokens=5, min_tokens=6)
    assert message == "min_tokens must be a whole number of 0 to 5 (max_tokens), not 6"


def test_integers_of_thousands_of_digits() -> None:
    huge = 10**5000  # Python itself refuses to print it
    assert SamplingParams(max_tokens=huge, top_k=huge, min_tokens=huge).top_k == huge
    for name in ("seed", "n", "temperature", "stop", "ignore_eos"):
        assert "huge int" in refusal(**{name: huge})
    assert "huge int" in refusal(max_tokens=huge, min_tokens=-1)
    assert "huge int" in refusal(logit_bias={huge: math.nan})


# Numbers


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_at_their_bounds(name: str) -> None:
    least, most, _ = NUMBERS[name]
    for value in (least, most, math.nextafter(least, most), math.nextafter(most, least), 1):
        found = getattr(SamplingParams(**{name: value}), name)
        assert found == value
        assert type(found) is float


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_beyond_their_bounds(name: str) -> None:
    least, most, bounds = NUMBERS[name]
    wrong = [math.nextafter(least, -math.inf), math.nextafter(most, math.inf), -(10**400), 10**400, -1e308]
    for value in [*wrong, *NO_FINITE]:
        assert re.fullmatch(f"{name} must be {bounds}, not .*", refusal(**{name: value}))
    assert refusal(**{name: wrong[1]}).endswith(f"not {wrong[1]!r}")
    assert refusal(**{name: math.nan}).endswith("not nan")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", NO_NUMBER, ids=repr)
def test_what_is_no_number(name: str, value: object) -> None:
    assert re.fullmatch(f"{name} must be {NUMBERS[name][2]}, not .*", refusal(**{name: value}))


@pytest.mark.parametrize("value", [1e-45, 5e-324, np.float32(1e-45), np.float16(6e-8)])
def test_a_tiny_temperature_is_not_zero(value: float) -> None:
    params = SamplingParams(temperature=value)
    assert 0 < params.temperature == float(value)
    assert not TokenSampling(params, seed=1).is_argmax


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.uint64, np.int64])
def test_numpy_integers(kind: type) -> None:
    params = SamplingParams(
        max_tokens=kind(9),
        top_k=kind(3),
        seed=kind(7),
        n=kind(2),
        logprobs=kind(1),
        temperature=kind(2),
        stop_token_ids=[kind(4)],
        logit_bias={kind(5): kind(6)},
    )
    assert params == SamplingParams(
        max_tokens=9,
        top_k=3,
        seed=7,
        n=2,
        logprobs=1,
        temperature=2.0,
        stop_token_ids=(4,),
        logit_bias={5: 6.0},
    )
    numbers = [params.max_tokens, params.top_k, params.seed, params.n, params.logprobs]
    assert {type(x) for x in [*numbers, *params.stop_token_ids, *params.logit_bias]} == {int}
    assert {type(x) for x in [params.temperature, *params.logit_bias.values()]} == {float}


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble])
def test_numpy_floats(kind: type) -> None:
    for name in NUMBERS:
        value = getattr(SamplingParams(**{name: kind(0.5)}), name)
        assert value == 0.5
        assert type(value) is float


# Biases


def test_logit_bias_at_its_bounds() -> None:
    bias = {0: -100, 7: 100.0, 10**9: 0}
    params = SamplingParams(logit_bias=bias)
    assert params.logit_bias == bias
    assert type(params.logit_bias) is dict
    bias[8] = 1
    assert 8 not in params.logit_bias


@pytest.mark.parametrize("value", [-100.0001, 100.0001, *NO_NUMBER, *NO_FINITE, None], ids=repr)
def test_a_bias_out_of_bounds(value: object) -> None:
    message = refusal(logit_bias={3: 1.0, 7: value})
    assert message.startswith("logit_bias of token 7 must be a number of -100 to 100, not ")


@pytest.mark.parametrize("token_id", [-1, 1.0, "1", True, None, math.nan, (1,)], ids=repr)
def test_a_bias_of_no_token(token_id: object) -> None:
    message = refusal(logit_bias={token_id: 1.0})
    assert message == f"a token id of logit_bias must be a whole number of at least 0, not {token_id!r}"


@pytest.mark.parametrize("bias", [None, [], [(1, 2.0)], "1=2", 3], ids=repr)
def test_biases_that_are_no_mapping(bias: object) -> None:
    assert refusal(logit_bias=bias) == f"logit_bias must map token ids to numbers, not be {bias!r}"


def test_number_of_biases() -> None:
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)).logit_bias) == 1024
    message = refusal(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0))
    assert message == "logit_bias must have at most 1024 tokens, not 1025"


# What ends an answer


@pytest.mark.parametrize(
    ("stop", "kept"),
    [("a b", ("a b",)), (["x", "yz"], ("x", "yz")), (("é\n", "🦙"), ("é\n", "🦙")), ([], ()), ((), ())],
)
def test_stop_strings(stop: Any, kept: tuple[str, ...]) -> None:
    params = SamplingParams(stop=stop)
    assert params.stop == kept
    assert type(params.stop) is tuple


def test_stop_strings_at_their_bounds() -> None:
    longest = "x" * MAX_STOP_CHARS
    assert SamplingParams(stop=[longest] * MAX_STOPS).stop == (longest,) * MAX_STOPS
    assert refusal(stop=["x"] * (MAX_STOPS + 1)) == "stop must hold at most 64 strings, not 65"
    length = "a stop string must have 1 to 1024 characters, not "
    assert refusal(stop=longest + "x") == refusal(stop=["x", longest + "x"]) == length + "1025"
    assert refusal(stop="") == refusal(stop=["x", ""]) == length + "0"


@pytest.mark.parametrize("stop", [None, 1, True, b"x", {"x"}, {"x": 1}, range(3), math.nan], ids=repr)
def test_stops_that_are_no_strings(stop: object) -> None:
    assert refusal(stop=stop).startswith("stop must be a string or a list of strings, not ")
    assert refusal(stop=["x", stop]).startswith("stop must be a string or a list of strings, not hold ")


@pytest.mark.parametrize("ids", [[], (), [0], (3, 5), {3}, frozenset({5}), [7, 7]], ids=repr)
def test_stop_token_ids(ids: Any) -> None:
    assert SamplingParams(stop_token_ids=ids).stop_token_ids == tuple(ids)


@pytest.mark.parametrize("ids", [None, 3, "3", {3: 4}, b"3", range(3), np.array([3])], ids=repr)
def test_stop_token_ids_that_are_no_list(ids: object) -> None:
    assert refusal(stop_token_ids=ids).startswith("stop_token_ids must be a list of token ids, not ")


@pytest.mark.parametrize("token_id", [-1, 1.0, "1", True, None, math.nan, [1]], ids=repr)
def test_a_stop_token_id_that_is_no_id(token_id: object) -> None:
    message = refusal(stop_token_ids=[3, token_id])
    assert message == f"an id of stop_token_ids must be a whole number of at least 0, not {token_id!r}"


@pytest.mark.parametrize("value", [None, 0, 1, "True", math.nan, []], ids=repr)
def test_ignore_eos_is_a_bool(value: object) -> None:
    assert refusal(ignore_eos=value) == f"ignore_eos must be True or False, not {value!r}"
    assert SamplingParams(ignore_eos=np.True_).ignore_eos is True  # type: ignore[arg-type]


# Names


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("max_new_tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("top_P", "top_p"),
        ("stop_tokens_ids", "stop_token_ids"),
        ("repetition_penality", "repetition_penalty"),
        ("stops", "stop"),
        ("logprob", "logprobs"),
        ("N", None),
        ("x\ny", None),
        ("beam_width", None),
    ],
)
def test_unknown_names(wrong: str, meant: str | None) -> None:
    message = refusal(**{wrong: 1})
    remedy = f"did you mean {meant}?" if meant else f"there are {', '.join(NAMES)}"
    assert message == f"unknown sampling parameter {wrong!r}: {remedy}"
    with pytest.raises(RequestError, match="unknown sampling parameter"):
        dataclasses.replace(SamplingParams(), **{wrong: 1})


def test_an_unknown_name_counts_before_a_wrong_value() -> None:
    assert "unknown" in refusal(max_tokens=0, foo=1)


# Copies


def test_replace_checks_again() -> None:
    params = SamplingParams(**EVERYTHING)
    assert dataclasses.replace(params) == params
    assert dataclasses.replace(params, seed=1) == SamplingParams(**EVERYTHING | {"seed": 1})
    with pytest.raises(RequestError, match="top_p must be"):
        dataclasses.replace(params, top_p=2)
    with pytest.raises(RequestError, match="min_tokens must be a whole number of 0 to 2"):
        dataclasses.replace(params, max_tokens=2)


@pytest.mark.parametrize("wishes", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_copies_and_pickles(wishes: dict[str, Any]) -> None:
    params = SamplingParams(**wishes)
    copies = [copy.copy(params), copy.deepcopy(params), SamplingParams(**dataclasses.asdict(params))]
    copies += [pickle.loads(pickle.dumps(params, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)]
    for twin in copies:
        assert twin == params
        assert hash(twin) == hash(params)
        assert repr(twin) == repr(params)
    for name, value in wishes.items():
        assert getattr(params, name) == value


def test_frozen_and_without_room_for_more() -> None:
    params = SamplingParams()
    for name in NAMES:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, name, 1)
    assert not hasattr(params, "__dict__")
    SamplingParams(logit_bias={1: 1.0})
    assert SamplingParams().logit_bias == {}


# What they mean together


@pytest.mark.parametrize(
    ("wishes", "adjusts"),
    [
        ({}, False),
        ({"temperature": 1, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 3}, False),
        ({"stop": "x", "stop_token_ids": [3], "n": 2, "logprobs": 3}, False),
        ({"repetition_penalty": 1, "presence_penalty": -0.0, "frequency_penalty": 0}, False),
        ({"logit_bias": {3: 1}}, True),
        ({"min_tokens": 1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 1e-9}, True),
    ],
)
def test_what_adjusts_logits(wishes: dict[str, Any], adjusts: bool) -> None:
    params = SamplingParams(**wishes)
    assert params.adjusts_logits is adjusts
    assert TokenSampling(params, seed=0).is_argmax is (not adjusts and params.temperature == 0)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.sampled_from([np.float32(3), np.int64(-3), np.array([[1, 2], [3, 4]]), np.datetime64("2020-01-01")]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=4))
def test_anything_is_taken_or_refused_in_one_line(wishes: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**wishes)
    except RequestError:
        message = refusal(**wishes)
        assert any(name in message for name in wishes)
        return
    for name, (least, most, _) in (WHOLE | NUMBERS).items():
        value = getattr(params, name)
        assert value is None or least <= value <= (math.inf if most is None else most)

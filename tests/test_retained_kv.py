"""K and V that outlive their request, rule by rule; ``test_scheduler`` mixes them all."""

from __future__ import annotations

import itertools

import pytest
from written_pages import WrittenPages

from samir_vllm.config import NAN_TOKEN
from samir_vllm.page_pool import PagePool
from samir_vllm.scheduler import Scheduler
from samir_vllm.sequence import ScheduledStep, Sequence

NUM_LAYERS = 3


class Desk:
    """A scheduler, pages that remember what was written to them, and an endless supply of words."""

    def __init__(self, pages_per_layer: int = 64, **options: object) -> None:
        sizes = {"num_layers": NUM_LAYERS, "max_num_seqs": 4, "max_batched_tokens": 1000, **options}
        self.scheduler = Scheduler(PagePool(pages_per_layer * NUM_LAYERS), **sizes)  # type: ignore[arg-type]
        self.pages = WrittenPages(self.scheduler)
        self._words = itertools.count(1)
        self._names = (f"request-{i}" for i in itertools.count())

    def words(self, count: int) -> list[int]:
        """Tokens that nobody has said before."""
        return list(itertools.islice(self._words, count))

    def add(self, prompt: list[int], new: int = 1, *, retain: bool = True, reuse: bool = True) -> Sequence:
        seq = Sequence(next(self._names), prompt, max_tokens=new, retain_kv=retain, reuse_kv=reuse)
        self.scheduler.add(seq)
        return seq

    def schedule(self) -> ScheduledStep:
        """A step that runs, and isn't committed."""
        step = self.scheduler.schedule()
        assert not step.is_empty
        self.pages.run(step)
        self.scheduler.pool.check_integrity()
        return step

    def step(self) -> ScheduledStep:
        step = self.schedule()
        self.scheduler.launched(step)
        self.scheduler.commit(step, self.words(len(step.sampled())))
        self.scheduler.pool.check_integrity()
        self.pages.check_retained()
        return step

    def finish(self, prompt: list[int], new: int = 1, *, retain: bool = True, reuse: bool = True) -> Sequence:
        """A request from its arrival to its end."""
        seq = self.add(prompt, new, retain=retain, reuse=reuse)
        while not seq.is_finished:
            self.step()
        return seq

    @property
    def retained(self) -> list[list[int]]:
        """The token ids of all that is retained, the least recent first."""
        return [retained.token_ids.tolist() for retained in self.scheduler._retained]


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // 16) * NUM_LAYERS


def test_a_dialog_runs_only_what_is_new() -> None:
    desk = Desk()
    prompt = desk.words(20)
    written = 0
    for turn in range(5):
        seq = desk.add(prompt, new=7 + turn)
        [(_, chunk)] = desk.step().prefills
        assert (seq.num_cached_tokens, chunk) == (written, len(prompt) - written)
        while not seq.is_finished:
            desk.step()
        written = len(seq.token_ids) - 1  # the last token was never an input
        assert desk.retained == [seq.token_ids[:written]]
        assert desk.scheduler.num_retained_pages == desk.scheduler.pool.num_used == pages_for(written)
        prompt = seq.token_ids + desk.words(11)


@pytest.mark.parametrize("common", [16, 17, 23, 31, 32, 33, 40])
def test_divergence_anywhere_in_a_page(common: int) -> None:
    """What stands in the page behind the common beginning is overwritten; ``WrittenPages`` reads it back."""
    desk = Desk()
    old = desk.finish(desk.words(24), new=9).token_ids
    seq = desk.finish(old[:common] + desk.words(30), new=4)
    # Of 33 tokens the last has no K and V, so at 33 in common it is 32.
    assert seq.num_cached_tokens == min(common, 32)
    assert len(desk.retained) == 1


def test_less_than_a_page_is_not_worth_it() -> None:
    desk = Desk()
    old = desk.finish(desk.words(20)).token_ids
    seq = desk.finish(old[:15] + desk.words(20))
    assert seq.num_cached_tokens == 0
    assert desk.retained == [old[:20], seq.token_ids[:35]]


@pytest.mark.parametrize("length", [20, 25, 31, 32, 33, 39])
def test_a_prompt_shorter_than_what_is_retained(length: int) -> None:
    """Its last token runs again, for the logits; pages that it can't use are free."""
    desk = Desk()
    old = desk.finish(desk.words(30), new=11).token_ids[:40]
    seq = desk.add(old[:length])
    step = desk.schedule()
    assert step.prefills == [(seq, 1)]
    assert seq.num_cached_tokens == length - 1
    assert desk.scheduler.pool.num_used == pages_for(length)
    desk.scheduler.launched(step)
    desk.scheduler.commit(step, desk.words(1))
    assert desk.retained == [old[:length]]


@pytest.mark.parametrize("new", [1, 17])
def test_a_prompt_equal_to_what_is_retained(new: int) -> None:
    desk = Desk()
    old = desk.finish(desk.words(30), new=11).token_ids[:40]
    seq = desk.finish(old, new=new)
    assert seq.num_cached_tokens == 39
    assert desk.retained == [seq.token_ids[:-1]]


def test_a_long_conversation_is_not_given_for_a_short_beginning() -> None:
    """20 tokens in common: of 41 retained more would be lost than saved, of 40 not."""
    desk = Desk()
    system = desk.words(20)
    long = desk.finish(system + desk.words(21)).token_ids[:41]
    assert desk.finish(system + desk.words(5), retain=False).num_cached_tokens == 0
    assert desk.retained == [long]
    desk.finish(system + desk.words(20), reuse=False)
    assert desk.finish(system + desk.words(5), retain=False).num_cached_tokens == 20
    assert desk.retained == [long]


def test_two_conversations_take_turns() -> None:
    """Each gets its own back, though both begin with the same system prompt."""
    desk = Desk()
    system = desk.words(18)
    prompts = [system + desk.words(30), system + desk.words(40)]
    written = [0, 0]
    for _ in range(4):
        for i in range(2):
            seq = desk.finish(prompts[i], new=9)
            assert seq.num_cached_tokens == written[i]
            written[i] = len(seq.token_ids) - 1
            prompts[i] = seq.token_ids + desk.words(5)
    assert desk.scheduler.num_retained_pages == sum(map(pages_for, written))


def test_the_longest_beginning_then_the_latest() -> None:
    desk = Desk()
    start = desk.words(60)
    for length in (20, 40, 40, 30):
        desk.finish(start[:length] + desk.words(2), reuse=False)
    first, longer, _, last = desk.retained
    desk.finish(start[:50], retain=False)
    assert desk.retained == [first, longer, last]
    desk.finish(start[:50], retain=False)
    assert desk.retained == [first, last]


def test_pages_that_were_reserved_and_not_written_come_back() -> None:
    desk = Desk()
    seq = desk.add(desk.words(20), new=500)
    desk.step()
    assert desk.scheduler.pool.num_used == pages_for(519)
    desk.scheduler.abort(seq)
    assert desk.scheduler.pool.num_used == desk.scheduler.num_retained_pages == pages_for(20)


def test_what_is_retained_goes_when_pages_are_needed_the_oldest_first() -> None:
    desk = Desk(pages_per_layer=6)
    olds = [desk.finish(desk.words(32)).token_ids[:32] for _ in range(3)]
    desk.finish(desk.words(16), retain=False)
    assert desk.retained == olds[1:]
    desk.finish(desk.words(48), retain=False)
    assert desk.retained == olds[2:]
    desk.finish(desk.words(96), retain=False)
    assert desk.retained == []
    assert desk.scheduler.pool.num_used == 0


def test_what_is_taken_over_is_not_dropped_to_make_room_for_the_rest() -> None:
    desk = Desk(pages_per_layer=6)
    oldest, middle, newest = (desk.finish(desk.words(32)).token_ids[:32] for _ in range(3))
    seq = desk.finish(oldest + desk.words(10), new=20)
    assert seq.num_cached_tokens == 32
    assert desk.retained == [newest, seq.token_ids[:-1]]
    seq = desk.finish(seq.token_ids + desk.words(10), new=10)
    assert seq.num_cached_tokens == 61
    assert desk.retained == [seq.token_ids[:-1]]
    assert middle not in desk.retained


def test_a_pool_too_small_to_retain() -> None:
    """Two conversations, and pages for one."""
    desk = Desk(pages_per_layer=3)
    first, second = desk.words(33), desk.words(33)
    for _ in range(3):
        for prompt in (first, second):
            assert desk.finish(prompt).num_cached_tokens == 0
            assert desk.retained == [prompt]


def test_who_waits_loses_nothing() -> None:
    desk = Desk(pages_per_layer=8)
    old = desk.finish(desk.words(32)).token_ids[:32]
    running = desk.add(desk.words(64), new=20, retain=False)
    desk.step()
    waiting = desk.add(old + desk.words(8), new=9)
    while not running.is_finished:
        assert desk.step().admitted == []
        assert desk.retained == [old]
    desk.step()
    assert waiting.num_cached_tokens == 32


def test_who_wants_every_row_takes_nothing_over() -> None:
    desk = Desk()
    old = desk.finish(desk.words(32)).token_ids[:32]
    seq = desk.add(old + desk.words(1), reuse=False)
    assert desk.step().prefills == [(seq, 33)]
    assert seq.num_cached_tokens == 0
    assert desk.retained[0] == old


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_abort_in_the_middle_of_a_prompt(steps: int) -> None:
    desk = Desk(max_batched_tokens=17)
    prompt = desk.words(60)
    seq = desk.add(prompt, new=40)
    for _ in range(steps):
        desk.step()
    desk.scheduler.abort(seq)
    assert desk.retained == [prompt[: 17 * steps]]
    assert desk.finish(prompt).num_cached_tokens == 17 * steps


@pytest.mark.parametrize("is_committed", [False, True])
def test_abort_before_the_results_are_in(is_committed: bool) -> None:
    """Only what an earlier step has written is certain."""
    desk = Desk(max_batched_tokens=20)
    prompt = desk.words(60)
    seq = desk.add(prompt)
    desk.step()
    step = desk.schedule()
    desk.scheduler.abort(seq)
    if is_committed:
        desk.scheduler.launched(step)
        desk.scheduler.commit(step, [])
    assert desk.retained == [prompt[:20]]
    assert desk.finish(prompt).num_cached_tokens == 20


def test_an_interrupted_step_after_a_takeover_comes_again() -> None:
    desk = Desk()
    old = desk.finish(desk.words(40)).token_ids[:40]
    seq = desk.add(old + desk.words(9), new=30)
    lost, again = desk.schedule(), desk.schedule()
    assert (again.admitted[0][1] == lost.admitted[0][1]).all()
    assert again.prefills == lost.prefills == [(seq, 9)]
    desk.scheduler.abort(seq)
    assert desk.retained == [old]


@pytest.mark.parametrize("how", ["NaN", "failed step"])
def test_after_an_error_nothing_is_retained(how: str) -> None:
    desk = Desk()
    old = desk.finish(desk.words(40)).token_ids[:40]
    seq = desk.add(old + desk.words(3), new=3)
    step = desk.schedule()
    if how == "NaN":
        desk.scheduler.launched(step)
        desk.scheduler.commit(step, [NAN_TOKEN])
    else:
        desk.scheduler.abort(seq, "error", "the device is gone")
    assert seq.finish_reason == "error"
    assert desk.scheduler.pool.num_used == desk.scheduler.num_retained_pages == 0


@pytest.mark.parametrize("num_tokens", [15, 16])
def test_less_than_a_page_is_not_retained(num_tokens: int) -> None:
    desk = Desk()
    desk.finish(desk.words(num_tokens))
    assert desk.scheduler.num_retained_pages == (NUM_LAYERS if num_tokens == 16 else 0)


def test_nobody_retains_unasked() -> None:
    desk = Desk()
    old = desk.finish(desk.words(40)).token_ids
    desk.finish(old, retain=False)
    assert desk.scheduler.pool.num_used == desk.scheduler.num_retained_pages == 0


def test_dropping_what_is_retained() -> None:
    desk = Desk()
    for _ in range(3):
        desk.finish(desk.words(40))
    running = desk.add(desk.words(40), new=2)
    desk.step()
    desk.scheduler.drop_retained()
    assert desk.scheduler.num_retained_pages == 0
    assert desk.scheduler.pool.num_used == pages_for(41)
    desk.step()
    assert desk.retained == [running.token_ids[:41]]


def test_what_is_retained_holds_no_slot_and_no_static_group_up() -> None:
    desk = Desk(max_num_seqs=1, batching="static")
    first = desk.finish(desk.words(40))
    assert not desk.scheduler.has_work
    assert desk.scheduler.num_running == 0
    assert desk.finish(first.token_ids).num_cached_tokens == 40


def test_a_request_id_may_come_again_while_its_pages_are_retained() -> None:
    desk = Desk()
    desk._names = itertools.repeat("chat")
    prompt = desk.words(20)
    for _ in range(3):
        prompt = desk.finish(prompt, new=5).token_ids
    assert desk.retained == [prompt[:-1]]

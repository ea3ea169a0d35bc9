"""K and V that outlive their request, rule by rule; ``test_scheduler`` mixes them all.

Where steps run ahead, those of a sequence that has ended may still be under way: only what was booked before
the end is retained, and what they write behind it does no harm.
"""

from __future__ import annotations

import itertools
from collections import deque

import pytest
from written_pages import NOBODY, WrittenPages

from fake_model import STEPS_AHEAD
from samir_vllm.config import NAN_TOKEN
from samir_vllm.page_pool import PagePool
from samir_vllm.scheduler import Scheduler
from samir_vllm.sequence import ScheduledStep, Sequence

NUM_LAYERS = 3


class Desk:
    """A scheduler, pages that remember what was written to them, and an endless supply of words."""

    def __init__(self, pages_per_layer: int = 64, *, steps_ahead: int = 0, **options: object) -> None:
        sizes = {"num_layers": NUM_LAYERS, "max_num_seqs": 4, "max_batched_tokens": 1000, **options}
        self.scheduler = Scheduler(PagePool(pages_per_layer * NUM_LAYERS), **sizes)  # type: ignore[arg-type]
        self.pages = WrittenPages(self.scheduler)
        self.steps_ahead = steps_ahead
        self._under_way: deque[tuple[ScheduledStep, list[int]]] = deque()  # with the words to come
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
        """A step that runs, and isn't launched as far as the scheduler knows."""
        step = self.scheduler.schedule()
        assert not step.is_empty
        self._run(step)
        return step

    def _run(self, step: ScheduledStep) -> list[int]:
        said = self.words(len(step.sampled()))
        self.pages.run(step, said)
        self.scheduler.pool.check_integrity()
        return said

    def launch(self) -> None:
        """As many steps as may be under way."""
        while len(self._under_way) <= self.steps_ahead:
            step = self.scheduler.schedule()
            if step.is_empty:
                break
            said = self._run(step)
            self.scheduler.launched(step)
            self._under_way.append((step, said))

    def commit(self) -> ScheduledStep:
        """The oldest step under way."""
        step, said = self._under_way.popleft()
        self.scheduler.commit(step, said)
        self.scheduler.pool.check_integrity()
        self.pages.check_retained()
        return step

    def step(self) -> ScheduledStep:
        """The step that is booked."""
        self.launch()
        return self.commit()

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


@STEPS_AHEAD
def test_a_dialog_runs_only_what_is_new(steps_ahead: int) -> None:
    desk = Desk(steps_ahead=steps_ahead)
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


@STEPS_AHEAD
@pytest.mark.parametrize("common", [16, 17, 23, 31, 32, 33, 40])
def test_divergence_anywhere_in_a_page(common: int, steps_ahead: int) -> None:
    """What stands in the page behind the common beginning is overwritten; ``WrittenPages`` reads it back."""
    desk = Desk(steps_ahead=steps_ahead)
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
    desk.step()
    assert desk.retained == [old[:length]]


@STEPS_AHEAD
@pytest.mark.parametrize("new", [1, 17])
def test_a_prompt_equal_to_what_is_retained(new: int, steps_ahead: int) -> None:
    desk = Desk(steps_ahead=steps_ahead)
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


@STEPS_AHEAD
def test_two_conversations_take_turns(steps_ahead: int) -> None:
    """Each gets its own back, though both begin with the same system prompt."""
    desk = Desk(steps_ahead=steps_ahead)
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


@STEPS_AHEAD
def test_pages_that_were_reserved_and_not_written_come_back(steps_ahead: int) -> None:
    desk = Desk(steps_ahead=steps_ahead)
    seq = desk.add(desk.words(20), new=500)
    desk.step()
    assert desk.scheduler.pool.num_used == pages_for(519)
    desk.scheduler.abort(seq)
    assert desk.scheduler.pool.num_used == desk.scheduler.num_retained_pages == pages_for(20)


@STEPS_AHEAD
def test_what_is_retained_goes_when_pages_are_needed_the_oldest_first(steps_ahead: int) -> None:
    desk = Desk(pages_per_layer=6, steps_ahead=steps_ahead)
    olds = [desk.finish(desk.words(32)).token_ids[:32] for _ in range(3)]
    desk.finish(desk.words(16), retain=False)
    assert desk.retained == olds[1:]
    desk.finish(desk.words(48), retain=False)
    assert desk.retained == olds[2:]
    desk.finish(desk.words(96), retain=False)
    assert desk.retained == []
    assert desk.scheduler.pool.num_used == 0


@STEPS_AHEAD
def test_what_is_taken_over_is_not_dropped_to_make_room_for_the_rest(steps_ahead: int) -> None:
    desk = Desk(pages_per_layer=6, steps_ahead=steps_ahead)
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


@STEPS_AHEAD
def test_who_waits_loses_nothing(steps_ahead: int) -> None:
    desk = Desk(pages_per_layer=8, steps_ahead=steps_ahead)
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


@STEPS_AHEAD
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_abort_in_the_middle_of_a_prompt(steps: int, steps_ahead: int) -> None:
    """Or while the last steps of the prompt, or the first of the answer, are under way."""
    desk = Desk(max_batched_tokens=17, steps_ahead=steps_ahead)
    prompt = desk.words(60)
    seq = desk.add(prompt, new=40)
    for _ in range(steps):
        desk.step()
    desk.scheduler.abort(seq)
    assert desk.retained == [prompt[: 17 * steps]]
    assert desk.finish(prompt).num_cached_tokens == 17 * steps


@STEPS_AHEAD
@pytest.mark.parametrize("how", ["interrupted", "under way", "committed"])
def test_abort_before_the_results_are_in(how: str, steps_ahead: int) -> None:
    """Only what an earlier step has written is certain."""
    desk = Desk(max_batched_tokens=20, steps_ahead=0)
    prompt = desk.words(60)
    seq = desk.add(prompt)
    desk.step()
    desk.steps_ahead = steps_ahead
    if how == "interrupted":
        desk.schedule()
    else:
        desk.launch()
    desk.scheduler.abort(seq)
    if how == "committed":
        for _ in range(min(steps_ahead, 1) + 1):  # two are all that was left of the prompt
            desk.commit()
    assert desk.retained == [prompt[:20]]
    assert desk.finish(prompt).num_cached_tokens == 20


@STEPS_AHEAD
def test_abort_while_decodes_are_under_way(steps_ahead: int) -> None:
    """What they write behind the booked tokens is the next one's to overwrite, in the same page."""
    desk = Desk(steps_ahead=steps_ahead)
    seq = desk.add(desk.words(20), new=40)
    for _ in range(5):
        desk.step()
    desk.launch()
    assert seq.num_launched_tokens == 20 + 4 + 1 + steps_ahead
    desk.scheduler.abort(seq)
    written = seq.token_ids[:-1]
    assert len(written) == 24
    assert desk.retained == [written]
    heir = desk.add([*written, *desk.words(3)], new=20)
    assert desk.finish(desk.words(60), new=20, retain=False).num_cached_tokens == 0  # into pages it gave back
    while not heir.is_finished:
        desk.step()
    assert heir.num_cached_tokens == 24
    assert desk.retained == [heir.token_ids[:-1]]


@STEPS_AHEAD
@pytest.mark.parametrize("end", [21, 31, 32, 33])
def test_a_stop_id_while_decodes_are_under_way(end: int, steps_ahead: int) -> None:
    """The id itself is never an input, and what was launched after it writes nothing."""
    desk = Desk(steps_ahead=steps_ahead)
    seq = desk.add(desk.words(20), new=40)
    seq.stop_ids = frozenset([end])  # words are numbers, in order
    while not seq.is_finished:
        desk.step()
    assert seq.finish_reason == "stop"
    assert seq.token_ids[-1] == end
    assert desk.retained == [seq.token_ids[:-1]]
    pages = desk.pages.tables[seq][0]
    behind = desk.pages.places[pages].ravel()[len(seq.token_ids) - 1 :]
    assert (behind == NOBODY).all()
    again = desk.finish(seq.token_ids + desk.words(2), new=20)
    assert again.num_cached_tokens == len(seq.token_ids) - 1


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
        under_way = desk.schedule()
        desk.scheduler.launched(under_way)
        desk.scheduler.commit(step, [NAN_TOKEN])
        assert desk.scheduler.commit(under_way, desk.words(1)) == []
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


@STEPS_AHEAD
def test_dropping_what_is_retained(steps_ahead: int) -> None:
    desk = Desk(steps_ahead=steps_ahead)
    for _ in range(3):
        desk.finish(desk.words(40))
    running = desk.add(desk.words(40), new=2)
    desk.step()
    desk.scheduler.drop_retained()
    assert desk.scheduler.num_retained_pages == 0
    assert desk.scheduler.pool.num_used == pages_for(41)
    desk.step()
    assert desk.retained == [running.token_ids[:41]]


@STEPS_AHEAD
def test_what_is_retained_holds_no_slot_and_no_static_group_up(steps_ahead: int) -> None:
    desk = Desk(max_num_seqs=1, batching="static", steps_ahead=steps_ahead)
    first = desk.finish(desk.words(40))
    assert not desk.scheduler.has_work
    assert desk.scheduler.num_running == 0
    assert desk.finish(first.token_ids).num_cached_tokens == 40


@STEPS_AHEAD
def test_a_request_id_may_come_again_while_its_pages_are_retained(steps_ahead: int) -> None:
    desk = Desk(steps_ahead=steps_ahead)
    desk._names = itertools.repeat("chat")
    prompt = desk.words(20)
    for _ in range(3):
        prompt = desk.finish(prompt, new=5).token_ids
    assert desk.retained == [prompt[:-1]]

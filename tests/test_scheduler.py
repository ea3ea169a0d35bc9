"""The scheduler against a slow simulator that shares no code with it, and the rules one by one.

Steps may be launched before the results of earlier ones are booked: up to two of them here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_pages import WrittenPages

from samir_vllm.errors import InvariantError, RequestError
from samir_vllm.page_pool import PagePool
from samir_vllm.scheduler import Scheduler
from samir_vllm.sequence import ScheduledStep, Sequence, SequenceStatus

STOP, NAN, WORD = 7, -1, 1  # token ids
UNSAID = 999_999
"""What a step gives for a sequence that has ended before it."""


@dataclass
class Job:
    """A request of the simulator, which knows all it will say, and that then it ends as ``ending``."""

    name: str
    prompt_ids: list[int]
    max_tokens: int
    answer: list[int]
    ending: str  # of "stop", "error", "length"
    retains: bool
    reuses: bool
    launched: int = 0  # prompt tokens that were taken over or are in steps launched so far
    asked: int = 0  # new tokens that steps launched so far make
    done: int = 0  # prompt tokens computed for certain
    cached: int = 0  # of those, taken over
    said: int = 0  # new tokens booked, the NaN included
    state: str = "waiting"  # then running, then its finish reason

    @property
    def prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def written(self) -> list[int]:
        """The tokens whose K and V are computed for certain."""
        if self.said == 0:
            return self.prompt_ids[: self.done]
        return self.prompt_ids + self.answer[: self.said - 1]

    def pages(self, num_layers: int) -> int:
        """Every position that is ever an input, counted page by page."""
        return num_layers * len({position // 16 for position in range(self.prompt + self.max_tokens - 1)})

    def next_token(self) -> int:
        """That of the step to be launched."""
        return self.answer[self.asked] if self.asked < len(self.answer) else UNSAID


@dataclass
class Plan:
    decodes: list[str]
    prefills: list[tuple[str, int]]
    admitted: list[str]
    sampled: list[str]


@dataclass
class Simulator:
    """One list of jobs in order of arrival, gone through again and again."""

    num_pages: int
    num_layers: int
    max_num_seqs: int
    max_batched_tokens: int
    batching: str
    jobs: dict[str, Job] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)  # admitted since the last launch
    retained: list[list[int]] = field(default_factory=list)  # token ids; the oldest first

    def having(self, state: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.state == state]

    @property
    def reserved(self) -> int:
        return sum(job.pages(self.num_layers) for job in self.having("running"))

    @property
    def num_retained_pages(self) -> int:
        return sum(self.num_layers * len({i // 16 for i in range(len(ids))}) for ids in self.retained)

    def add(self, job: Job) -> bool:
        if job.pages(self.num_layers) > self.num_pages:
            return False
        self.jobs[job.name] = job
        return True

    def plan(self) -> Plan:
        group_runs = self.batching == "static" and self.having("running") != []
        for job in [] if group_runs else self.having("waiting"):
            fits = self.reserved + job.pages(self.num_layers) <= self.num_pages
            if not fits or len(self.having("running")) == self.max_num_seqs:
                break
            job.state = "running"
            self.new.append(job.name)
            if job.reuses:
                self.take_over(job)
            while self.reserved + self.num_retained_pages > self.num_pages:
                self.retained.pop(0)
        # As jobs are admitted in order and prefilled in order, they also start to decode in order.
        plan = Plan([], [], list(self.new), [])
        tokens_left = self.max_batched_tokens
        for job in self.having("running"):
            if job.launched == job.prompt:
                if job.asked < job.max_tokens:
                    plan.decodes.append(job.name)
                continue
            chunk = 0
            while tokens_left > 0 and job.launched + chunk < job.prompt:
                chunk += 1
                tokens_left -= 1
            if chunk:
                plan.prefills.append((job.name, chunk))
        jobs = self.jobs
        ends = [name for name, chunk in plan.prefills if jobs[name].launched + chunk == jobs[name].prompt]
        plan.sampled = plan.decodes + ends
        return plan

    def take_over(self, job: Job) -> None:
        best, most = None, 15
        for ids in reversed(self.retained):
            common = 0
            while common < min(len(ids), job.prompt) and ids[common] == job.prompt_ids[common]:
                common += 1
            if common > most and common >= len(ids) - common:
                best, most = ids, common
        if best is not None:
            self.retained = [ids for ids in self.retained if ids is not best]
            job.launched = job.done = job.cached = most if most < job.prompt else job.prompt - 1

    def end(self, job: Job, state: str) -> None:
        if job.state == "running" and job.retains and state != "error" and len(job.written) >= 16:
            self.retained.append(job.written)
        job.state = state

    def launch(self, plan: Plan) -> None:
        self.new = []
        for name, chunk in plan.prefills:
            self.jobs[name].launched += chunk
        for name in plan.sampled:
            self.jobs[name].asked += 1

    def commit(self, plan: Plan) -> list[str]:
        for name, chunk in plan.prefills:
            self.jobs[name].done += chunk
        booked = [name for name in plan.sampled if self.jobs[name].state == "running"]
        for job in (self.jobs[name] for name in booked):
            job.said += 1
            if job.said == len(job.answer):
                self.end(job, job.ending)
        return booked

    def abort(self, name: str) -> bool:
        job = self.jobs[name]
        if job.state not in ("waiting", "running"):
            return False
        self.end(job, "abort")
        if name in self.new:
            self.new.remove(name)
        return True


@dataclass(frozen=True)
class Schedule:
    """A scheduler's sizes, and what happens to it in which order."""

    num_pages: int
    num_layers: int
    max_num_seqs: int
    max_batched_tokens: int
    batching: str
    steps_ahead: int
    actions: list[tuple]


WHICH = st.integers(0, 30)
ADD = st.tuples(
    st.just("add"),
    st.one_of(st.integers(0, 5), st.integers(0, 50)),  # prompt tokens of its own
    st.integers(1, 40),  # new tokens at most
    st.sampled_from(["length", "length", "stop", "error"]),
    st.integers(0, 39),  # an early ending after so many tokens, modulo
    st.one_of(st.none(), st.integers(0, 3)),  # whose tokens come before its own: the last request's (0) ...
    st.one_of(st.just(1000), st.integers(14, 18), st.integers(0, 90)),  # so many of them at most
    st.sampled_from([True, True, False]),  # retains
    st.sampled_from([True, True, True, False]),  # reuses
)
STEP = st.one_of(
    st.tuples(st.just("step")),
    st.tuples(st.just("steps"), st.integers(2, 40)),
    st.tuples(st.just("launch")),
    st.tuples(st.just("commit")),
)
SELDOM = st.one_of(
    st.tuples(st.just("interrupted launch")),
    st.tuples(st.just("interrupted launch"), WHICH),  # and somebody is aborted before it comes again
    st.tuples(st.just("step"), WHICH),  # with an abort before its results are in
    st.tuples(st.just("abort"), WHICH),
    st.tuples(st.just("add again"), WHICH),
    st.tuples(st.just("drop retained")),
)
ACTION = st.sampled_from([ADD] * 4 + [STEP] * 4 + [SELDOM] * 2).flatmap(lambda kind: kind)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Sizes small enough, and actions enough (left alone, Hypothesis draws about five), that limits bind."""
    num_layers = draw(st.integers(1, 3))
    return Schedule(
        num_pages=draw(st.one_of(st.integers(1, 14), st.integers(5, 40))) * num_layers
        + draw(st.integers(0, num_layers - 1)),
        num_layers=num_layers,
        max_num_seqs=draw(st.integers(1, 5)),
        max_batched_tokens=draw(st.one_of(st.integers(1, 20), st.integers(21, 120))),
        batching=draw(st.sampled_from(["continuous", "static"])),
        steps_ahead=draw(st.integers(0, 2)),
        actions=draw(st.lists(ACTION, min_size=draw(st.integers(0, 30)), max_size=40)),
    )


class Duel:
    """Does each action to the scheduler and to the simulator, and compares everything that shows."""

    def __init__(self, schedule: Schedule, *, retention: bool) -> None:
        self.retention = retention
        self.pool = PagePool(schedule.num_pages)
        sizes = {
            "num_layers": schedule.num_layers,
            "max_num_seqs": schedule.max_num_seqs,
            "max_batched_tokens": schedule.max_batched_tokens,
            "batching": schedule.batching,
        }
        self.real = Scheduler(self.pool, **sizes, clock=itertools.count(1).__next__)
        self.sim = Simulator(schedule.num_pages, **sizes)
        self.pages = WrittenPages(self.real)
        self.steps_ahead = schedule.steps_ahead
        self.under_way: deque[tuple[ScheduledStep, Plan, list[int]]] = deque()  # with the tokens to come
        self.seqs: dict[str, Sequence] = {}
        self.moment = 0  # goes on with whatever runs something
        self.admitted_at: dict[str, int] = {}  # name -> moment

    def some(self, index: int) -> str | None:
        names = list(self.seqs)
        return names[index % len(names)] if names else None

    def add(
        self,
        own: int,
        max_tokens: int,
        ending: str,
        early: int,
        parent: int | None,
        shared: int,
        retains: bool,
        reuses: bool,
    ) -> None:
        length = max_tokens if ending == "length" else early % max_tokens + 1
        words = itertools.count(1000 * (len(self.seqs) + 1))  # nobody else's
        prompt = self.begin_like(parent, shared)
        prompt += itertools.islice(words, own if prompt else max(1, own))
        answer = [*itertools.islice(words, length - 1), {"stop": STOP, "error": NAN}.get(ending, WORD)]
        retains &= self.retention
        job = Job(f"job-{len(self.seqs)}", prompt, max_tokens, answer, ending, retains, reuses)
        seq = Sequence(
            job.name,
            prompt,
            max_tokens=max_tokens,
            stop_ids=frozenset([STOP]),
            retain_kv=retains,
            reuse_kv=reuses,
        )
        if self.sim.add(job):
            self.real.add(seq)
            self.seqs[job.name] = seq
        else:
            with pytest.raises(RequestError, match=rf"{job.pages(self.sim.num_layers)} KV pages"):
                self.real.add(seq)

    def begin_like(self, parent: int | None, count: int) -> list[int]:
        """The first tokens of another's prompt and (whole) answer."""
        if parent is None or not self.sim.jobs:
            return []
        jobs = list(self.sim.jobs.values())
        job = jobs[-1 - parent % len(jobs)]
        return [i for i in job.prompt_ids + job.answer if i != NAN][:count]

    def add_again(self, name: str) -> None:
        if self.sim.jobs[name].state in ("waiting", "running"):
            with pytest.raises(RequestError, match="already live"):
                self.real.add(Sequence(name, [WORD], max_tokens=1))

    def drop_retained(self) -> None:
        self.real.drop_retained()
        self.sim.retained = []
        self.check()

    def abort(self, name: str) -> None:
        assert self.real.abort(self.seqs[name]) == self.sim.abort(name)

    def step(self, victim: str | None = None) -> bool:
        """As the engine does it: launches what it may, and books the oldest; tells if there was anything."""
        self.moment += 1
        while self.launch():
            pass
        if victim is not None:
            self.abort(victim)
        return self.commit()

    def launch(self, *, interrupted: bool = False, victim: str | None = None) -> bool:
        """Tells if there was something to launch, and it may be under way beside the others."""
        if len(self.under_way) > self.steps_ahead:
            return False
        step, plan = self.real.schedule(), self.sim.plan()
        assert [s.request_id for s in step.decodes] == plan.decodes
        assert [(s.request_id, chunk) for s, chunk in step.prefills] == plan.prefills
        assert [s.request_id for s, _ in step.admitted] == plan.admitted
        assert [s.request_id for s in step.sampled()] == plan.sampled
        assert step.is_empty == (plan.decodes == plan.prefills == [])
        assert sum(chunk for _, chunk in step.prefills) <= self.real.max_batched_tokens
        for name in plan.admitted:
            self.admitted_at.setdefault(name, self.moment)
        if step.is_empty:
            assert plan.admitted == []
            return False
        tokens = [self.sim.jobs[name].next_token() for name in plan.sampled]
        self.pages.run(step, tokens)
        self.check()
        if victim is not None:
            self.abort(victim)
        if not interrupted:
            self.real.launched(step)
            self.sim.launch(plan)
            self.under_way.append((step, plan, tokens))
            self.check()
        return not interrupted

    def commit(self) -> bool:
        """Books the oldest step under way; tells if there is one."""
        if not self.under_way:
            return False
        step, plan, tokens = self.under_way.popleft()
        assert [s.request_id for s in self.real.commit(step, tokens)] == self.sim.commit(plan)
        self.check()
        return True

    def check(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == self.sim.reserved + self.sim.num_retained_pages
        assert self.real.num_retained_pages == self.sim.num_retained_pages
        assert [retained.token_ids.tolist() for retained in self.real._retained] == self.sim.retained
        self.pages.check_retained()
        running = self.sim.having("running")
        assert sorted(s.request_id for s in self.real.running()) == sorted(job.name for job in running)
        assert self.real.num_running == len(running)
        assert list(self.real.waiting) == [job.name for job in self.sim.having("waiting")]
        slots = [s.slot for s in self.real.running()]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(self.real.max_num_seqs))
        for name, job in self.sim.jobs.items():
            self.check_sequence(self.seqs[name], job)

    def check_sequence(self, seq: Sequence, job: Job) -> None:
        if job.state == "waiting":
            assert seq.status is SequenceStatus.WAITING
        elif job.state == "running":
            decoding = job.launched == job.prompt
            assert seq.status is (SequenceStatus.DECODE if decoding else SequenceStatus.PREFILL)
            assert seq.num_computed_tokens == (len(seq.token_ids) - 1 if job.said else job.done)
            assert seq.num_launched_tokens == job.launched + max(0, job.asked - 1)
        else:
            assert seq.status is SequenceStatus.FINISHED
            assert seq.finish_reason == job.state
            assert seq.finished_time is not None
            assert (seq.error is not None) == (job.state == "error")
            assert seq.slot == -1
        assert seq.token_ids == job.prompt_ids + job.answer[: job.said - (job.state == "error")]
        assert seq.num_cached_tokens == job.cached
        assert self.pool.is_owner(seq.request_id) == (job.state == "running")

    def drain(self) -> None:
        """Runs to the end: every step does something, so it must come after as many steps as tokens."""
        while self.sim.having("waiting") or self.sim.having("running"):
            assert self.real.has_work
            assert self.step()
        assert not self.real.has_work
        assert self.real.schedule().is_empty
        while self.commit():  # what is under way for nobody
            pass
        self.drop_retained()
        assert self.pool.num_free == self.pool.num_pages
        assert sorted(self.real._free_slots) == list(range(self.real.max_num_seqs))


def fight(schedule: Schedule, *, retention: bool = True) -> Duel:
    duel = Duel(schedule, retention=retention)
    for kind, *details in schedule.actions:
        if kind == "add":
            duel.add(*details)
        elif kind == "step":
            duel.step(duel.some(*details) if details else None)
        elif kind == "interrupted launch":
            duel.launch(interrupted=True, victim=duel.some(*details) if details else None)
        elif kind in ("launch", "commit"):
            duel.moment += 1
            {"launch": duel.launch, "commit": duel.commit}[kind]()
        elif kind == "steps":
            for _ in range(*details):
                if not duel.step():
                    break
        elif kind == "drop retained":
            duel.drop_retained()
        elif (name := duel.some(details[0])) is not None:
            {"abort": duel.abort, "add again": duel.add_again}[kind](name)
    duel.drain()
    return duel


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_equals_the_simulator(schedule: Schedule) -> None:
    fight(schedule)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None)
@given(schedules())
def test_equals_the_simulator_for_thousands_of_schedules(schedule: Schedule) -> None:
    fight(schedule)


def compare_with_nothing_retained(schedule: Schedule) -> None:
    """Continuous batching alone: a static group that ends sooner may set out without the next request."""
    schedule = replace(schedule, batching="continuous")
    admitted = fight(schedule).admitted_at
    for name, at in fight(schedule, retention=False).admitted_at.items():
        assert admitted[name] <= at, name


@settings(max_examples=50, deadline=None)
@given(schedules())
def test_what_is_retained_keeps_nobody_waiting(schedule: Schedule) -> None:
    compare_with_nothing_retained(schedule)


@pytest.mark.slow
@settings(max_examples=1_000, deadline=None)
@given(schedules())
def test_what_is_retained_keeps_nobody_waiting_in_thousands_of_schedules(schedule: Schedule) -> None:
    compare_with_nothing_retained(schedule)


# One by one


def make(
    num_pages: int,
    *,
    num_layers: int = 1,
    max_num_seqs: int = 8,
    max_batched_tokens: int = 64,
    batching: str = "continuous",
    kv_cache_mib_for: Callable[[int], int] | None = None,
) -> Scheduler:
    return Scheduler(
        PagePool(num_pages),
        num_layers=num_layers,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        batching=batching,
        kv_cache_mib_for=kv_cache_mib_for,
    )


def add(scheduler: Scheduler, name: str, prompt: int, new: int) -> Sequence:
    seq = Sequence(name, [WORD] * prompt, max_tokens=new)
    scheduler.add(seq)
    return seq


def step(scheduler: Scheduler) -> ScheduledStep:
    """One step in which everybody says the same word."""
    scheduled = scheduler.schedule()
    scheduler.launched(scheduled)
    scheduler.commit(scheduled, [WORD] * len(scheduled.sampled()))
    scheduler.pool.check_integrity()
    return scheduled


def finish_all(scheduler: Scheduler) -> list[str]:
    """Request ids in the order of their ends."""
    ended = []
    while scheduler.has_work:
        running = scheduler.schedule()
        assert not running.is_empty
        scheduler.launched(running)
        for seq in scheduler.commit(running, [WORD] * len(running.sampled())):
            if seq.is_finished:
                ended.append(seq.request_id)
    return ended


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_last_token_needs_no_page(num_layers: int) -> None:
    scheduler = make(2 * num_layers, num_layers=num_layers, kv_cache_mib_for=lambda pages: 100 * pages)
    fits = add(scheduler, "fits", 16, 17)
    with pytest.raises(RequestError) as refusal:
        add(scheduler, "too long", 17, 17)
    for number in (3 * num_layers, 2 * num_layers, f"--kv-cache-mib {300 * num_layers}"):
        assert str(number) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    add(scheduler, "next", 1, 1)
    assert finish_all(scheduler) == ["fits", "next"]
    assert fits.num_output_tokens == 17
    assert scheduler.pool.num_used == 0


def test_nobody_overtakes() -> None:
    """Wanting 1, 2, 1 pages of 2: the third would fit beside the first, but came after the second."""
    scheduler = make(2)
    add(scheduler, "first", 8, 8)
    add(scheduler, "second", 16, 8)
    add(scheduler, "third", 4, 2)
    assert [s.request_id for s, _ in step(scheduler).admitted] == ["first"]
    assert finish_all(scheduler) == ["first", "second", "third"]
    assert scheduler.pool.num_used == 0


def test_a_long_prompt_holds_no_decode_up() -> None:
    scheduler = make(64, max_batched_tokens=10)
    short = add(scheduler, "short", 4, 20)
    step(scheduler)
    add(scheduler, "long", 35, 2)
    add(scheduler, "after", 3, 2)
    chunks = []
    for _ in range(5):
        before = short.num_output_tokens
        scheduled = step(scheduler)
        assert short.num_output_tokens == before + 1
        chunks.append([(s.request_id, n) for s, n in scheduled.prefills])
    assert chunks == [[("long", 10)], [("long", 10)], [("long", 10)], [("long", 5), ("after", 3)], []]


def test_static_finishes_a_group_before_the_next() -> None:
    scheduler = make(64, max_num_seqs=2, batching="static")
    for name, new in [("a", 2), ("b", 5), ("c", 1), ("d", 1)]:
        add(scheduler, name, 3, new)
    groups = []
    while scheduler.has_work:
        groups.append([s.request_id for s, _ in step(scheduler).admitted])
    assert groups == [["a", "b"], [], [], [], [], ["c", "d"]]


def test_continuous_fills_a_place_at_once() -> None:
    scheduler = make(64, max_num_seqs=2)
    for name, new in [("a", 2), ("b", 5), ("c", 1), ("d", 1)]:
        add(scheduler, name, 3, new)
    groups = []
    while scheduler.has_work:
        groups.append([s.request_id for s, _ in step(scheduler).admitted])
    assert groups == [["a", "b"], [], ["c"], ["d"], []]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_in_each_state(steps: int) -> None:
    """Waiting, in the middle of the prompt, decoding; then a second time."""
    scheduler = make(64, max_batched_tokens=8)
    seq = add(scheduler, "victim", 10, 20)
    for _ in range(steps):
        step(scheduler)
    expected = {0: SequenceStatus.WAITING, 1: SequenceStatus.PREFILL, 3: SequenceStatus.DECODE}
    assert seq.status is expected[steps]
    assert scheduler.abort(seq)
    assert scheduler.pool.num_used == 0
    assert not scheduler.has_work
    assert not scheduler.abort(seq)
    assert seq.finish_reason == "abort"


def test_abort_after_the_end_changes_nothing() -> None:
    scheduler = make(64)
    seq = add(scheduler, "done", 3, 1)
    step(scheduler)
    assert not scheduler.abort(seq)
    assert seq.finish_reason == "length"


def test_an_interrupted_step_comes_again() -> None:
    scheduler = make(64, max_batched_tokens=8)
    add(scheduler, "a", 10, 2)
    lost = scheduler.schedule()
    add(scheduler, "b", 3, 2)
    again = scheduler.schedule()
    assert [s.request_id for s, _ in again.admitted] == ["a", "b"]
    assert again.prefills == lost.prefills
    assert (again.admitted[0][1] == lost.admitted[0][1]).all()
    assert [s.request_id for s, _ in lost.admitted] == ["a"]
    scheduler.launched(again)
    scheduler.commit(again, [])
    assert scheduler.schedule().admitted == []


def test_one_of_an_interrupted_step_is_aborted() -> None:
    scheduler = make(64)
    a, b = add(scheduler, "a", 10, 2), add(scheduler, "b", 3, 2)
    scheduler.schedule()
    scheduler.abort(a)
    assert [s for s, _ in scheduler.schedule().admitted] == [b]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_live_id_is_refused(steps: int) -> None:
    scheduler = make(64, max_batched_tokens=8)
    seq = add(scheduler, "name", 10, 20)
    for _ in range(steps):
        step(scheduler)
    with pytest.raises(ValueError, match="'name' is already live"):
        add(scheduler, "name", 1, 1)
    scheduler.abort(seq)
    add(scheduler, "name", 1, 1)
    assert finish_all(scheduler) == ["name"]


def test_a_wrong_number_of_tokens_books_nothing() -> None:
    scheduler = make(64)
    seq = add(scheduler, "a", 3, 3)
    scheduled = scheduler.schedule()
    for tokens in ([], [WORD, WORD]):
        with pytest.raises(InvariantError, match=f"{len(tokens)} tokens for 1 "):
            scheduler.commit(scheduled, tokens)
    assert seq.num_computed_tokens == 0
    assert finish_all(scheduler) == ["a"]


def test_times_come_in_order() -> None:
    scheduler = make(64)
    scheduler._clock = itertools.count(1).__next__
    seq = add(scheduler, "a", 3, 3)
    finish_all(scheduler)
    times = (seq.arrival_time, seq.admitted_time, seq.first_token_time, seq.finished_time)
    assert list(times) == sorted(times)
    assert len(set(times)) == len(times)


# Steps ahead of the results, one by one


def launch(scheduler: Scheduler) -> ScheduledStep:
    """A step whose results are to come."""
    scheduled = scheduler.schedule()
    assert not scheduled.is_empty
    scheduler.launched(scheduled)
    scheduler.pool.check_integrity()
    return scheduled


def names_of(sequences: list[Sequence]) -> list[str]:
    return [seq.request_id for seq in sequences]


def test_launches_go_as_far_as_max_tokens_without_a_result() -> None:
    """Two chunks of prompt, of which the second gives a token, and two decodes; then nothing but results."""
    scheduler = make(64, max_batched_tokens=8)
    seq = add(scheduler, "a", 10, 3)
    steps = [launch(scheduler) for _ in range(4)]
    assert [[n for _, n in s.prefills] for s in steps] == [[8], [2], [], []]
    assert [names_of(s.sampled()) for s in steps] == [[], ["a"], ["a"], ["a"]]
    assert (seq.num_launched_tokens, seq.num_computed_tokens, seq.num_output_tokens) == (12, 0, 0)
    assert scheduler.schedule().is_empty
    assert scheduler.has_work
    for scheduled, computed in zip(steps, [8, 10, 11, 12], strict=True):
        scheduler.commit(scheduled, [WORD] * len(scheduled.sampled()))
        assert seq.num_computed_tokens == computed
    assert seq.finish_reason == "length"
    assert not scheduler.has_work
    assert scheduler.pool.num_used == 0


def test_who_waits_for_its_last_result_keeps_slot_and_pages() -> None:
    scheduler = make(2, max_num_seqs=1)
    add(scheduler, "first", 3, 1)
    add(scheduler, "second", 3, 1)
    last = launch(scheduler)
    assert scheduler.num_running == 1
    assert names_of(scheduler.running()) == ["first"]
    assert scheduler.schedule().is_empty
    assert scheduler.pool.num_used == 1
    scheduler.commit(last, [WORD])
    assert names_of([seq for seq, _ in launch(scheduler).admitted]) == ["second"]


def test_a_static_group_ends_with_its_last_result() -> None:
    scheduler = make(64, batching="static")
    add(scheduler, "a", 3, 1)
    last = launch(scheduler)
    add(scheduler, "b", 3, 1)
    assert scheduler.schedule().is_empty
    scheduler.commit(last, [WORD])
    assert names_of([seq for seq, _ in launch(scheduler).admitted]) == ["b"]


@pytest.mark.parametrize(("token", "reason"), [(STOP, "stop"), (NAN, "error")])
def test_what_is_under_way_after_the_end_is_dropped(token: int, reason: str) -> None:
    scheduler = make(64)
    seq = Sequence("ends", [WORD] * 3, max_tokens=9, stop_ids=frozenset([STOP]))
    scheduler.add(seq)
    other = add(scheduler, "goes on", 3, 9)
    steps = [launch(scheduler) for _ in range(3)]
    assert scheduler.commit(steps[0], [token, WORD]) == [seq, other]
    assert seq.finish_reason == reason
    said = seq.output_token_ids
    assert scheduler.commit(steps[1], [UNSAID, WORD]) == [other]
    assert names_of(launch(scheduler).decodes) == ["goes on"]
    assert scheduler.commit(steps[2], [UNSAID, WORD]) == [other]
    assert seq.output_token_ids == said == [token] * (token != NAN)
    assert other.num_output_tokens == 3


@pytest.mark.parametrize("launches", [1, 2, 4])
def test_abort_with_steps_under_way(launches: int) -> None:
    """In the middle of the prompt, at its end, decoding; the name and the slot may be taken at once."""
    scheduler = make(64, max_num_seqs=1, max_batched_tokens=8)
    victim = add(scheduler, "name", 10, 20)
    steps = [launch(scheduler) for _ in range(launches)]
    slot = victim.slot
    assert scheduler.abort(victim)
    assert not scheduler.has_work
    assert scheduler.pool.num_used == 0
    heir = add(scheduler, "name", 3, 2)
    steps.append(launch(scheduler))
    assert heir.slot == slot
    booked = [scheduler.commit(s, [WORD] * len(s.sampled())) for s in steps]
    assert booked == [[]] * launches + [[heir]]
    assert victim.output_token_ids == []
    assert victim.num_computed_tokens == 0


def test_an_interrupted_step_comes_again_above_others() -> None:
    """What was committed in between counts: who ended by it is no longer there."""
    scheduler = make(64)
    ends = Sequence("ends", [WORD] * 3, max_tokens=9, stop_ids=frozenset([STOP]))
    scheduler.add(ends)
    add(scheduler, "goes on", 3, 9)
    first = launch(scheduler)
    add(scheduler, "late", 2, 9)
    lost, again = scheduler.schedule(), scheduler.schedule()
    assert names_of(lost.decodes) == names_of(again.decodes) == ["ends", "goes on"]
    assert again.prefills == lost.prefills
    assert (again.admitted[0][1] == lost.admitted[0][1]).all()
    scheduler.commit(first, [STOP, WORD])
    at_last = launch(scheduler)
    assert names_of(at_last.decodes) == ["goes on"]
    assert names_of(at_last.sampled()) == ["goes on", "late"]
    assert [seq.request_id for seq, _ in at_last.admitted] == ["late"]


def test_the_same_decodes_are_the_same_list() -> None:
    """A device that keeps their rows need not be told again; a list that it was given never changes."""
    scheduler = make(64)
    a, b = add(scheduler, "a", 3, 9), add(scheduler, "b", 3, 4)
    steps = [launch(scheduler) for _ in range(4)]
    decodes = steps[1].decodes
    assert steps[2].decodes is steps[3].decodes is decodes
    assert decodes == [a, b]
    assert names_of(launch(scheduler).decodes) == ["a"]
    scheduler.commit(steps[0], [WORD, WORD])
    same = launch(scheduler).decodes
    add(scheduler, "c", 3, 4)
    assert launch(scheduler).decodes is same
    assert names_of(launch(scheduler).decodes) == ["a", "c"]
    assert decodes == [a, b]
    assert same == [a]

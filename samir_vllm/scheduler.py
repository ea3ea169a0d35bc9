"""Decides what runs: the waiting and running queues, admission by page credit, the two batching modes.

A request's whole credit (every page it can ever need, in every layer) is reserved at admission and comes
back whole at its end. That rules out preemption and deadlock: whatever runs can run to its end.
Steps may be scheduled and launched before the results of earlier ones are known: how far a step brings a
sequence needs no result; that a token has ended it comes to light when the step is committed.
K and V of a sequence that has ended may be retained, until a sequence that begins with the same tokens takes
them over or their pages are needed: they stand in nobody's way.
Knows no device, no text and no clock but the one it is given.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from samir_vllm.config import NAN_TOKEN, PAGE_SIZE
from samir_vllm.errors import InvariantError, RequestError
from samir_vllm.page_pool import FRESH, PagePool
from samir_vllm.sequence import FinishReason, ScheduledStep, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True, eq=False)
class _Retained:
    """K and V that outlived their sequence. Owns its pages itself: no request's id can equal it."""

    token_ids: np.ndarray  # int32 [n]: whose K and V they are
    pages_per_layer: int


class Scheduler:
    """FIFO admission over one page pool, then chunks of prefill beside every decode."""

    def __init__(
        self,
        pool: PagePool,
        *,
        num_layers: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        batching: str = "continuous",
        kv_cache_mib_for: Callable[[int], int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """A scheduler with nothing to do.

        Args:
            pool: shared by all sequences and layers.
            num_layers: pages are taken for each layer.
            max_num_seqs: sequences that run together at most.
            max_batched_tokens: prompt tokens that one step prefills at most.
            batching: ``continuous`` admits whenever there is room; ``static`` admits a group, runs it to
                its end, then admits the next.
            kv_cache_mib_for: pages -> MiB, for the remedy in an error.
            clock: seconds.
        """
        self.pool = pool
        self.num_layers = num_layers
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.batching = batching
        self._kv_cache_mib_for = kv_cache_mib_for
        self._clock = clock
        # Ordered, not a plain dict: the front leaves in constant time however often that happens, and an
        # abort leaves from anywhere.
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []  # a new list at every change: steps refer to the old one
        self._steps_to_end = 0  # so many leave `_decoding` as it is, but for ends by a token
        self._ending: list[Sequence] = []  # their last step is under way
        # Until `launched`: a step that was interrupted is scheduled again, block tables included.
        self._admitted: list[tuple[Sequence, np.ndarray]] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._retained: OrderedDict[_Retained, None] = OrderedDict()  # the least recent first
        self.num_retained_pages = 0  # over all layers; used pages to the pool, free ones to admission

    @property
    def num_running(self) -> int:
        """Admitted and not finished."""
        return len(self._prefilling) + len(self._decoding) + len(self._ending)

    @property
    def num_waiting(self) -> int:
        """Not admitted yet."""
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        """Something is waiting or running."""
        return bool(self.waiting or self._prefilling or self._decoding or self._ending)

    def running(self) -> list[Sequence]:
        """The admitted sequences."""
        return self._decoding + self._ending + self._prefilling

    def credit_of(self, seq: Sequence) -> int:
        """Pages, over all layers, that ``seq`` reserves at admission."""
        return seq.pages_per_layer * self.num_layers

    def add(self, seq: Sequence) -> None:
        """Queue ``seq``.

        Raises:
            RequestError: its id is live, or it could not run even alone in the whole pool. Nothing else is
                touched.
        """
        if seq.request_id in self.waiting or self.pool.is_owner(seq.request_id):
            raise RequestError(
                f"request id {seq.request_id!r} is already live: wait for its end or take another id"
            )
        needed = self.credit_of(seq)
        if needed > self.pool.num_pages:
            remedy = "shorten it"
            if self._kv_cache_mib_for is not None:
                remedy += f" or give --kv-cache-mib {self._kv_cache_mib_for(needed)}"
            raise RequestError(
                f"the request needs {needed} KV pages ({seq.num_prompt_tokens} prompt + {seq.max_tokens} new "
                f"tokens, {self.num_layers} layers) but the pool has {self.pool.num_pages} in all: {remedy}"
            )
        self.waiting[seq.request_id] = seq

    def schedule(self) -> ScheduledStep:
        """Admit what fits, then choose the next step's tokens: every decode, and prefill up to the bound.

        It is the same step again until ``launched`` is called, unless something was added or aborted.
        """
        self._admit()
        prefills: list[tuple[Sequence, int]] = []
        budget = self.max_batched_tokens
        for seq in self._prefilling:
            if budget == 0:
                break
            chunk = min(budget, seq.num_prompt_tokens - seq.num_launched_tokens)
            prefills.append((seq, chunk))
            budget -= chunk
        # Copies of what later grows in place; `_decoding` never does.
        return ScheduledStep(self._decoding, prefills, self._admitted.copy())

    def _admit(self) -> None:
        """Move waiting sequences to prefill, in order, while there are slots and credit for the next."""
        if self.batching == "static" and self.num_running:
            return
        while self.waiting and self._free_slots:
            seq = next(iter(self.waiting.values()))
            credit = self.credit_of(seq)
            # What it would take over counts as retained, too, so whether it fits needs no search.
            if credit > self.pool.num_free + self.num_retained_pages:
                break  # FIFO: nothing behind it overtakes
            del self.waiting[seq.request_id]
            pages = self._reserve(seq, credit)
            seq.slot = self._free_slots.pop()
            seq.status = SequenceStatus.PREFILL
            seq.admitted_time = self._clock()
            self._prefilling.append(seq)
            self._admitted.append((seq, pages.reshape(self.num_layers, -1)))

    def _reserve(self, seq: Sequence, credit: int) -> np.ndarray:
        """``credit`` pages for ``seq``, taken over or free, int32 [credit], layer by layer."""
        taken, common = self._find_retained(seq) if self._retained and seq.reuse_kv else (None, 0)
        if taken is None:
            self._make_room(credit)
            return self.pool.allocate(seq.request_id, credit)
        self._forget(taken)  # out of the way of `_make_room`, while the pages stay its own
        self._make_room(credit - taken.pages_per_layer * self.num_layers)
        # One token at least must run, to give logits.
        seq.num_cached_tokens = min(common, seq.num_prompt_tokens - 1)
        seq.num_computed_tokens = seq.num_launched_tokens = seq.num_cached_tokens
        source = _page_sources(self.num_layers, taken.pages_per_layer, seq.pages_per_layer)
        return self.pool.transfer(taken, seq.request_id, source)

    def _find_retained(self, seq: Sequence) -> tuple[_Retained | None, int]:
        """What ``seq`` should take over, and how many tokens both begin with: the most, then the latest.

        A page at least must be saved. And no more may be lost than saved: else a short beginning that all
        prompts share (the system's) would cost one conversation after the other its K and V.
        """
        prompt = np.array(seq.token_ids, np.int32)
        best, most = None, PAGE_SIZE - 1
        for retained in reversed(self._retained):
            common = _common_length(prompt, retained.token_ids)
            if common > most and common >= len(retained.token_ids) - common:
                best, most = retained, common
        return best, most

    def _make_room(self, num_pages: int) -> None:
        """Drop what is retained, the least recent first, until so many pages are free."""
        while self.pool.num_free < num_pages:
            self._drop(next(iter(self._retained)))

    def drop_retained(self) -> None:
        """Free every retained page."""
        while self._retained:
            self._drop(next(iter(self._retained)))

    def _drop(self, retained: _Retained) -> None:
        self._forget(retained)
        self.pool.free(retained)

    def _forget(self, retained: _Retained) -> None:
        del self._retained[retained]
        self.num_retained_pages -= retained.pages_per_layer * self.num_layers

    def _retain(self, seq: Sequence) -> None:
        """Keep the pages that ``seq``, which ends, has written, and free the rest."""
        token_ids = np.array(seq.token_ids[: seq.num_computed_tokens], np.int32)
        retained = _Retained(token_ids, -(-len(token_ids) // PAGE_SIZE))
        source = _page_sources(self.num_layers, seq.pages_per_layer, retained.pages_per_layer)
        self.pool.transfer(seq.request_id, retained, source)
        self._retained[retained] = None
        self.num_retained_pages += retained.pages_per_layer * self.num_layers

    def launched(self, step: ScheduledStep) -> None:
        """Book that a step is under way, so that the next one can be scheduled.

        Args:
            step: what ``schedule`` returned last.
        """
        self._admitted = []
        for seq, chunk in step.prefills:
            seq.num_launched_tokens += chunk
        for seq in step.decodes:
            seq.num_launched_tokens += 1
        self._steps_to_end -= 1
        if step.prefills or self._steps_to_end <= 0:
            self._regroup()

    def commit(self, step: ScheduledStep, token_ids: list[int]) -> list[Sequence]:
        """Book the results of a step. Steps are committed in the order in which they were launched.

        Args:
            step: what ``schedule`` returned, and ``launched`` was told.
            token_ids: one for each of ``step.sampled()``, in that order; ``NAN_TOKEN`` for a row without
                a usable maximum.

        Returns:
            The sequences that got a token or ended by an error, in the same order. One that had ended already
            (aborted after ``schedule``, or by a token of the step before) is not among them; its token is
            dropped.

        Raises:
            InvariantError: the number of token ids is wrong. Nothing is booked.
        """
        sampled = step.sampled()
        if len(token_ids) != len(sampled):
            raise InvariantError(f"the runner gave {len(token_ids)} tokens for {len(sampled)} sequences")
        for seq, chunk in step.prefills:
            if not seq.is_finished:
                seq.num_computed_tokens += chunk
        for seq in step.decodes:
            if not seq.is_finished:
                seq.num_computed_tokens += 1
        booked: list[Sequence] = []
        ended = False
        now = self._clock()
        for seq, token in zip(sampled, token_ids, strict=True):
            if seq.is_finished:
                continue
            booked.append(seq)
            if token == NAN_TOKEN:
                self._end(seq, "error", "NaN in the logits: the weights may be damaged, get them again")
                ended = True
                continue
            seq.token_ids.append(token)
            if seq.first_token_time is None:
                seq.first_token_time = now
            if token in seq.stop_ids:
                self._end(seq, "stop")
                ended = True
            elif seq.num_output_tokens >= seq.max_tokens:
                self._end(seq, "length")
                ended = True
        if ended:
            self._regroup()
        return booked

    def _regroup(self) -> None:
        """Drop what ended, move whole prompts on to decode, and out of it what needs no more steps."""
        if self._ending:
            self._ending = [seq for seq in self._ending if not seq.is_finished]
        decoding = [seq for seq in self._decoding if seq.num_needed_steps and not seq.is_finished]
        if len(decoding) < len(self._decoding):
            self._ending += [s for s in self._decoding if not (s.num_needed_steps or s.is_finished)]
        prefilling: list[Sequence] = []
        for seq in self._prefilling:
            if seq.is_finished:
                continue
            if seq.num_launched_tokens < seq.num_prompt_tokens:
                prefilling.append(seq)
                continue
            seq.status = SequenceStatus.DECODE
            (decoding if seq.num_needed_steps else self._ending).append(seq)
        self._prefilling = prefilling
        if decoding != self._decoding:
            self._decoding = decoding
            self._steps_to_end = min([seq.num_needed_steps for seq in decoding], default=0)

    def abort(self, seq: Sequence, reason: FinishReason = "abort", error: str | None = None) -> bool:
        """End ``seq`` now, wherever it is, even while a step of its is under way.

        Its pages are free, or retained as far as committed steps have written them.

        Returns:
            False if it had ended already.
        """
        if seq.is_finished:
            return False
        was_running = seq.slot >= 0
        self._end(seq, reason, error)
        if was_running:
            self._regroup()
        return True

    def _end(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Give back what ``seq`` holds. A running one stays in its list until ``_regroup``."""
        if seq.status is SequenceStatus.WAITING:
            del self.waiting[seq.request_id]
        else:
            # After an error K and V may themselves be what is wrong. Less than a page is never taken over.
            if seq.retain_kv and reason != "error" and seq.num_computed_tokens >= PAGE_SIZE:
                self._retain(seq)
            else:
                self.pool.free(seq.request_id)
            self._free_slots.append(seq.slot)
            self._admitted = [(s, pages) for s, pages in self._admitted if s is not seq]
        seq.slot = -1
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.error = error
        seq.finished_time = self._clock()


def _page_sources(num_layers: int, num_old: int, num_new: int) -> np.ndarray:
    """For ``PagePool.transfer``: each layer keeps the first of its old pages, and gets fresh ones behind.

    Returns:
        int64 [num_layers * num_new].
    """
    source = np.full((num_layers, num_new), FRESH)
    kept = min(num_old, num_new)
    source[:, :kept] = np.arange(num_layers * num_old).reshape(num_layers, num_old)[:, :kept]
    return source.ravel()


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many elements two arrays [>= 1] have in common from the start."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    first = int(differs.argmax())
    return first if differs[first] else shorter

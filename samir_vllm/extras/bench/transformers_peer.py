"""The child of ``--peers transformers``: the bench's work on a model of the same shape, in transformers.

A program, run by its path in a process of its own, so that torch's memory and failures stay away from the
bench. One JSON object comes on standard input: ``config`` (the fields of our ModelConfig), ``device``, and
``works``, each with the keys that ``peers`` lists. Standard output gets a JSON object a line, as soon as it
is known:

    {"name": ..., "seconds": ..., "how": ...}    a measurement; of several for one name the best counts
    {"notice": ...}                              a line for the user

Weights are random, in BF16, made on the device; prompts are random ids; tokens are chosen by argmax; no text.
Caches are static; the forward is compiled on a GPU, and eager on a CPU, as transformers itself has it. Knows
nothing of the package around it.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch._dynamo.utils import counters
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StaticCache

COMPILE_MODES = ("reduce-overhead", "max-autotune-no-cudagraphs")
COMPILED_DEVICES = ("cuda",)
WARM_UP = 4  # compiled code is traced, recorded and replayed for the first time in the first three calls
PREFILL_RUNS = 5
CACHE_MULTIPLE = 16  # tokens: attention's kernels like masks whose rows are aligned
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""Its name among the arguments, which transformers 5.x has changed."""

Call = Callable[..., Any]


class Peer:
    """A model on its device, and how the works run on it."""

    def __init__(self, config: dict[str, Any], device: str, say: Call) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device("cuda:0" if device == "cuda" else device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.compiled = self.device.type in COMPILED_DEVICES
        self.say = say
        torch.set_default_dtype(torch.bfloat16)
        torch.manual_seed(0)
        with self.device:
            self.model = LlamaForCausalLM(llama_config(config)).eval()
        self.vocab_size = config["vocab_size"]
        # Those that haven't failed; None is eager.
        self.modes: list[str | None] = [*(COMPILE_MODES if self.compiled else ()), None]

    def about(self) -> str:
        """What runs on what."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return f"version {transformers.__version__}, torch {torch.__version__}, {device}"

    def free_memory(self) -> None:
        """Give back what ended works and failed attempts held."""
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def random_ids(self, batch: int, tokens: int) -> Any:
        """int64 [batch, tokens]."""
        return torch.randint(0, self.vocab_size, (batch, tokens), device=self.device)

    def make_cache(self, tokens: int) -> Any:
        """For so many tokens of each sequence; a batch's first forward allocates it."""
        return StaticCache(config=self.model.config, max_cache_len=tokens)

    def forward(self, ids: Any, cache: Any, mask: Any = None, positions: Any = None) -> Any:
        """The next token of each sequence, int64 [batch, 1]; ids [batch, tokens] follow the cached ones."""
        logits = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{CACHE: cache},
        ).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def try_modes(
        self, name: str, run: Callable[[Call], float], *, eager: bool = True
    ) -> tuple[float, str] | None:
        """Seconds of ``run(forward)`` with the best compiled forward that works, and how it was compiled.

        A mode that fails isn't tried again. ``eager``: take the forward as it is where none works.
        """
        for mode in list(self.modes):
            if mode is None and not eager:
                return None
            torch._dynamo.reset()
            counters.clear()
            try:
                if mode is None:
                    seconds = run(self.forward)
                else:
                    seconds = run(torch.compile(self.forward, mode=mode, fullgraph=True, dynamic=False))
            except torch.OutOfMemoryError:
                raise
            except Exception as exc:
                if mode is None:
                    raise
                self.modes.remove(mode)
                then = self.modes[0] or "eager"
                self.say(notice=f"{name}: mode {mode} failed ({one_line(exc)}); {then} from here on")
            else:
                skipped = counters["inductor"].get("cudagraph_skips", 0) if mode == "reduce-overhead" else 0
                how = f"compiled, {mode}" if mode else "eager"
                return seconds, how + (", but without CUDA graphs" if skipped else "")
        raise AssertionError("eager is always left")


def llama_config(config: dict[str, Any]) -> LlamaConfig:
    """Transformers' words for the same model; no end of text, so that nothing stops early."""
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    if config["rope_scaling"] is not None:
        rope |= {"rope_type": "llama3", **config["rope_scaling"]}
    return LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_layers"],
        num_attention_heads=config["num_heads"],
        num_key_value_heads=config["num_kv_heads"],
        head_dim=config["head_dim"],
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters=rope,
        tie_word_embeddings=config["tie_word_embeddings"],
        bos_token_id=None,
        eos_token_id=None,
        dtype=torch.bfloat16,
    )


def decode_step(forward: Call, token: Any, *rest: Any) -> Any:
    """One step; the token outlives the next replay of the CUDA graph that made it."""
    torch.compiler.cudagraph_mark_step_begin()
    return forward(token, *rest).clone()


def run_decode(peer: Peer, name: str, work: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Mean seconds of a decode step, over the steps from the first new token to the last."""
    batch, prompt, new = work["batch"], work["prompt"], work["new"]
    ids = peer.random_ids(batch, prompt)
    cache = peer.make_cache(round_up(prompt + max(new, WARM_UP + 1)))

    def steps(forward: Call, count: int) -> float:
        cache.reset()
        token = peer.forward(ids, cache)  # as in `generate`, prefill isn't compiled
        peer.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            token = decode_step(forward, token, cache)
        peer.synchronize()
        return time.perf_counter() - start

    def run(forward: Call) -> float:
        steps(forward, WARM_UP)
        count = max(new - 1, 1)
        return steps(forward, count) / count

    if (found := peer.try_modes(name, run)) is not None:
        yield found


def run_prefill(peer: Peer, name: str, work: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Median seconds of one prompt's forward to its token: eager, as in ``generate``, and compiled."""
    ids = peer.random_ids(1, work["tokens"])
    cache = peer.make_cache(work["tokens"])

    def run(forward: Call) -> float:
        times = []
        for _ in range(WARM_UP + PREFILL_RUNS):
            cache.reset()
            peer.synchronize()
            start = time.perf_counter()
            decode_step(forward, ids, cache)
            peer.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[WARM_UP:])

    yield run(peer.forward), "eager"
    if peer.compiled and (found := peer.try_modes(name, run, eager=False)) is not None:
        yield found


def run_throughput(peer: Peer, name: str, work: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Seconds of all requests: in static batches of several sizes, and by continuous batching."""
    requests = [(prompt, new) for prompt, new in work["requests"]]
    sizes = sorted({min(size, len(requests)) for size in work["batches"]}, reverse=True)
    for turn, size in enumerate(sizes):
        try:
            if (found := peer.try_modes(name, StaticBatches(peer, requests, size).run)) is not None:
                yield found[0], f"static batches of {size}, {found[1]}"
        except torch.OutOfMemoryError:
            peer.say(notice=f"{name}: static batches of {size} don't fit the GPU's memory")
        peer.free_memory()
        if turn == 0:  # before the smaller batches, which time may not suffice for
            try:
                yield run_continuous(peer, requests), "continuous batching"
            except Exception as exc:  # a young part of transformers that wants much of its surroundings
                peer.say(notice=f"{name}: transformers' continuous batching failed ({one_line(exc)})")
            peer.free_memory()


class StaticBatches:
    """Requests in batches of one size, in their order: padded on the left, run until the longest ends."""

    def __init__(self, peer: Peer, requests: list[tuple[int, int]], size: int) -> None:
        self.peer = peer
        self.groups = [requests[i : i + size] for i in range(0, len(requests), size)]
        # One shape for all groups, so that the decode step is compiled once; rows of a short last group idle.
        self.size = size
        longest = max(prompt for prompt, _ in requests), max(WARM_UP + 1, *(new for _, new in requests))
        self.capacity = round_up(sum(longest))
        self.cache = peer.make_cache(self.capacity)

    def run(self, forward: Call) -> float:
        """Seconds of all groups, warm."""
        self.run_group(forward, self.groups[0], WARM_UP)
        self.peer.synchronize()
        start = time.perf_counter()
        for group in self.groups:
            self.run_group(forward, group, max(new for _, new in group) - 1)
        self.peer.synchronize()
        return time.perf_counter() - start

    def run_group(self, forward: Call, group: list[tuple[int, int]], steps: int) -> None:
        """Prefill, then so many decode steps."""
        peer = self.peer
        lengths = torch.tensor(
            [prompt for prompt, _ in group] + [1] * (self.size - len(group)), device=peer.device
        )
        width = max(prompt for prompt, _ in group)
        ids = peer.random_ids(self.size, width)
        # Of the whole cache, True but for the padding; what isn't written yet, causality hides.
        mask = torch.arange(self.capacity, device=peer.device) >= (width - lengths)[:, None]
        positions = (torch.arange(width, device=peer.device) - (width - lengths)[:, None]).clamp(min=0)
        self.cache.reset()
        token = peer.forward(ids, self.cache, mask[:, :width], positions)
        positions = lengths[:, None].clone()
        for _ in range(steps):
            token = decode_step(forward, token, self.cache, mask, positions)
            positions += 1


def run_continuous(peer: Peer, requests: list[tuple[int, int]]) -> float:
    """Seconds of all requests through ``transformers``' own continuous batching, its settings left alone."""
    prompts = [peer.random_ids(1, prompt)[0].tolist() for prompt, _ in requests]
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max(new for _, new in requests), eos_token_id=-1
    )
    with peer.model.continuous_batching_context_manager(generation_config=config) as manager:
        finish(manager, [peer.random_ids(1, 16)[0].tolist()], [WARM_UP])
        start = time.perf_counter()
        finish(manager, prompts, [new for _, new in requests])
        peer.synchronize()
        return time.perf_counter() - start


def finish(manager: Any, prompts: list[list[int]], new: list[int]) -> None:
    """Run requests to their end."""
    for ids, count in zip(prompts, new, strict=True):
        manager.add_request(ids, max_new_tokens=count)
    left = len(prompts)
    while left:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("its thread ended")
        elif result.is_finished():
            if result.error is not None:
                raise RuntimeError(result.error)
            left -= 1


def round_up(tokens: int) -> int:
    """To whole multiples of CACHE_MULTIPLE."""
    return -(-tokens // CACHE_MULTIPLE) * CACHE_MULTIPLE


RUNS = {"decode": run_decode, "prefill": run_prefill, "throughput": run_throughput}


def one_line(exc: BaseException) -> str:
    """Kind and first line of an exception."""
    return f"{type(exc).__name__}: {str(exc).strip().partition(chr(10))[0]}"[:160]


def main() -> int:
    """Read the works, run them, print what they give."""
    # Whatever libraries print must not meet the results.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**fields: object) -> None:
        print(json.dumps(fields), file=results, flush=True)

    if int(transformers.__version__.split(".")[0]) < 5:
        print(f"transformers is {transformers.__version__}: 5 or newer is needed", file=sys.stderr)
        return 1
    task = json.load(sys.stdin)
    with torch.no_grad():
        peer = Peer(task["config"], task["device"], say)
        say(notice=peer.about())
        for work in task["works"]:
            try:
                for seconds, how in RUNS[work["kind"]](peer, work["name"], work):
                    say(name=work["name"], seconds=seconds, how=how)
            except Exception as exc:  # the other works may still run
                say(notice=f"{work['name']}: {one_line(exc)}")
            peer.free_memory()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What commands share: option groups, loading an engine, Ctrl-C, notices, tables of log-probabilities.

Light to import: the engine and rich come when something needs them. Knows no command.
"""

from __future__ import annotations

import argparse
import gc
import re
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from samir_vllm.config import EngineConfig
from samir_vllm.errors import OptionError, RequestError, SamirVllmError
from samir_vllm.sampling import MAX_ANSWERS, MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from samir_vllm.engine import Engine
    from samir_vllm.sequence import TokenLogprobs
    from samir_vllm.tokenizer import Tokenizer

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PICTURES = (".png", ".svg")


# The engine


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options that every command with an engine shares; defaults are those of ``EngineConfig``."""
    default = EngineConfig()
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", metavar="DIR|NAME", help="model folder, or a name under models/ (else $SAMIR_VLLM_MODEL)"
    )
    group.add_argument(
        "--device", default=default.device, help="auto, cpu, cuda or cuda:N (default: %(default)s)"
    )
    group.add_argument(
        "--kv-cache-mib",
        default=str(default.kv_cache_mib),
        metavar="N|auto",
        help="size of the KV page pool (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=default.max_num_seqs,
        metavar="N",
        help="running at once (%(default)s)",
    )
    group.add_argument(
        "--max-batched-tokens",
        type=int,
        default=default.max_batched_tokens,
        metavar="N",
        help="prompt tokens prefilled in one step (%(default)s)",
    )
    group.add_argument("--max-model-len", type=int, metavar="N", help="context shorter than the model's")
    group.add_argument(
        "--batching", default=default.batching, help="continuous or static (default: %(default)s)"
    )
    group.add_argument(
        "--dtype",
        default=default.dtype,
        help="bfloat16, or float32: no rounding, NumPy only (default: %(default)s)",
    )
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the same numbers in any company, whatever that costs (NumPy: much; a GPU: mostly nothing)",
    )


def engine_options(args: argparse.Namespace) -> dict[str, object]:
    """Keyword options of ``Engine`` from parsed arguments; raises OptionError."""
    kv: object = args.kv_cache_mib
    if args.kv_cache_mib != "auto":
        try:
            kv = int(args.kv_cache_mib)
        except ValueError:
            raise OptionError(
                f"--kv-cache-mib must be a whole number or auto, not {args.kv_cache_mib!r}"
            ) from None
    return {
        "device": args.device,
        "kv_cache_mib": kv,
        "max_num_seqs": args.max_num_seqs,
        "max_batched_tokens": args.max_batched_tokens,
        "max_model_len": args.max_model_len,
        "batching": args.batching,
        "dtype": args.dtype,
        "batch_invariant": args.batch_invariant,
    }


def error_console() -> Console:
    """Standard error, for everything that is no answer."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def load_engine(args: argparse.Namespace, console: Console, *, quiet: bool) -> Engine:
    """An engine by the arguments, with a progress bar on a terminal and its notices on standard error."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from samir_vllm.engine import Engine

    columns = (
        TextColumn("loading"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} layers"),
        TimeElapsedColumn(),
    )
    options = engine_options(args)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)
        engine = Engine(
            args.model, progress=lambda done, total: bar.update(task, completed=done, total=total), **options
        )
    # What has been loaded stays. Else the garbage collector goes through all of it now and then, for longer
    # than the steps under way take.
    gc.freeze()
    for notice in engine.notices:
        print_notice(console, notice)
    return engine


def print_notice(console: Console, notice: str) -> None:
    """One line that the user should know, and that stops nothing."""
    console.print(f"samir_vllm: {notice}", style="yellow")


# Sampling


@dataclass(frozen=True, slots=True)
class _SamplingOption:
    field: str  # of SamplingParams
    help: str
    flag: str = ""  # other than the field's name
    keywords: Mapping[str, Any] | None = None  # of add_argument


def _sampling_options() -> list[_SamplingOption]:
    """Every field of ``SamplingParams`` but ``max_tokens``, which commands treat in their own ways."""
    option = _SamplingOption
    real, whole = {"type": float, "metavar": "X"}, {"type": int, "metavar": "N"}
    return [
        option("temperature", "0: the likeliest token; 1: the model's probabilities as they are", "", real),
        option("top_k", "only the N likeliest tokens; 0: off", "", whole),
        option("top_p", "only the likeliest tokens that reach this probability together; 1: off", "", real),
        option("min_p", "only tokens so many times as likely as the likeliest; 0: off", "", real),
        option("repetition_penalty", "for tokens of prompt and answer; 1: off", "", real),
        option("presence_penalty", "for tokens of the answer; 0: off", "", real),
        option("frequency_penalty", "the same for each time they occur; 0: off", "", real),
        option(
            "logit_bias",
            "added to tokens' logits; repeatable",
            keywords={"type": _biases, "action": "extend", "metavar": "ID=X[,ID=X...]"},
        ),
        option("seed", "the same seed, the same answer; else one is drawn, and told", "", whole),
        option("min_tokens", "nothing ends the answer before so many new tokens", "", whole),
        option(
            "stop",
            r"ends the answer, outside of it; repeatable; \n, \t, \r, \uXXXX and \\ are read as escapes",
            keywords={"type": _unescaped, "action": "append", "metavar": "TEXT"},
        ),
        option(
            "stop_token_ids",
            "these tokens end the answer; repeatable",
            "--stop-token-id",
            {"type": _ids, "action": "extend", "metavar": "ID[,ID...]"},
        ),
        option(
            "ignore_eos",
            "go on past the end-of-sequence token",
            keywords={"action": "store_true", "default": None},
        ),
        option("n", f"so many answers, {MAX_ANSWERS} at most", "", whole),
        option(
            "logprobs",
            f"log-probabilities of the answer's tokens, and of the N likeliest ({MAX_LOGPROBS} at most)",
            "",
            whole,
        ),
        option("prompt_logprobs", "the same for the prompt's tokens", "", whole),
    ]


def add_sampling_options(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """An option for each field of ``SamplingParams`` but ``max_tokens`` and those to leave out."""
    group = parser.add_argument_group("sampling", "How tokens are chosen, and what ends an answer.")
    default = SamplingParams()
    for option in _sampling_options():
        if option.field in leave_out:
            continue
        flag = option.flag or "--" + option.field.replace("_", "-")
        value = getattr(default, option.field)
        shown = f" (default: {value:g})" if isinstance(value, int | float) and value is not False else ""
        group.add_argument(flag, dest=option.field, help=option.help + shown, **option.keywords or {})


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that the arguments give; the others keep their defaults."""
    found = {f.name: getattr(args, f.name, None) for f in fields(SamplingParams)}
    given = {name: value for name, value in found.items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def json_sampling_options(item: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a JSON object, whose keys can't be numbers: those of ``logit_bias`` are made so.

    Raises:
        RequestError: one of them is no token id. What else is wrong ``SamplingParams`` says.
    """
    given = dict(item)
    if isinstance(biases := given.get("logit_bias"), dict):
        for key in biases:
            if not re.fullmatch(r"[0-9]{1,18}", key):
                raise RequestError(f"logit_bias: {key[:40]!r} is no token id")
        given["logit_bias"] = {int(key): value for key, value in biases.items()}
    return given


def sampling_notices(params: Iterable[SamplingParams]) -> list[str]:
    """What was asked for in vain."""
    default, greedy = SamplingParams(), [p for p in params if p.temperature == 0]
    vain = [
        name
        for name in ("top_k", "top_p", "min_p", "seed")
        if any(getattr(p, name) != getattr(default, name) for p in greedy)
    ]
    notices = []
    if vain:
        verb = "have" if len(vain) > 1 else "has"
        notices.append(
            f"{', '.join(vain)} {verb} no effect at temperature 0, the default: give --temperature"
        )
    if any(p.n > 1 for p in greedy):
        notices.append("the n answers are the same at temperature 0, the default: give --temperature")
    return notices


def _biases(text: str) -> list[tuple[int, float]]:
    biases = []
    for word in text.split(","):
        token_id, equals, value = word.partition("=")
        try:
            if not equals or not re.fullmatch(r"\s*[0-9]{1,18}\s*", token_id):
                raise ValueError
            biases.append((int(token_id), float(value)))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{word[:40]!r} should be ID=X, a token id and a number, such as 50=-2.5"
            ) from None
    return biases


def _ids(text: str) -> list[int]:
    words = text.split(",")
    for word in words:
        if not re.fullmatch(r"\s*[0-9]{1,18}\s*", word):
            raise argparse.ArgumentTypeError(f"{word[:40]!r} is no token id")
    return [int(word) for word in words]


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


def _unescaped(text: str) -> str:
    """Shells make it hard to write a line feed; so these escapes are read as in JSON."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if len(name) == 5:
            return chr(int(name[1:], 16))
        if name not in _ESCAPES:
            raise argparse.ArgumentTypeError(
                rf"'\{name}' is no escape: there are \n, \t, \r, \uXXXX and \\ (a backslash)"
            )
        return _ESCAPES[name]

    found = re.sub(r"\\(u[0-9a-fA-F]{4}|.|$)", replace, text, flags=re.DOTALL)
    try:  # two \uXXXX may be one character
        return found.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"half a character: {text}") from None


# Ctrl-C


class Interrupts:
    """Ctrl-C as a wish that is looked at between steps, so that no step is torn apart.

    Within the context the first SIGINT sets ``requested``; a second one raises KeyboardInterrupt wherever
    the program is, as does any SIGINT within ``immediate``. Afterwards SIGINT does what it did before.
    Outside the main thread, and where SIGINT is ignored, nothing changes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._immediate = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._immediate or self.requested:
            raise KeyboardInterrupt
        self.requested = True

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Forgets a wish that came too late; in the block SIGINT raises KeyboardInterrupt at once."""
        self.requested = False
        self._immediate = True
        try:
            yield
        finally:
            self._immediate = False


# Tokens and their log-probabilities


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text, U+FFFD for what isn't UTF-8; of an id beyond the tokenizer's nothing."""
    return tokenizer.decode([token_id]) if token_id < tokenizer.vocab_size else ""


def logprobs_table(tokens: Sequence[TokenLogprobs | None], ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """A line for each token: number, id, text, log-probability, and the likeliest tokens with theirs.

    Args:
        tokens: one for each of ``ids``; None where there is none.
        ids: the tokens.
        tokenizer: gives their texts.
    """
    encoding = sys.stdout.encoding
    rows = [["#", "id", "token", "logprob", "likeliest"]]
    for i, (token_id, token) in enumerate(zip(ids, tokens, strict=True)):
        row = [str(i), str(token_id), quoted(token_text(tokenizer, token_id), encoding)]
        if token is None:
            row += ["", ""]
        else:
            row.append(f"{token.logprob:.4f}")
            row.append(
                "  ".join(f"{quoted(token_text(tokenizer, i), encoding)} {p:.4f}" for i, p in token.top)
            )
        rows.append(row)
    return _aligned(rows, right=(0, 1, 3))


def quoted(text: str, encoding: str) -> str:
    """A token's text to look at: escapes for what can't be seen or printed."""
    visible = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f"'{visible.encode(encoding, errors='backslashreplace').decode(encoding)}'"


def _aligned(rows: Sequence[Sequence[str]], *, right: Collection[int]) -> str:
    """Rows in columns; ``right`` are those aligned to the right. Not rich's, which folds lines in a pipe."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            space = " " * (widths[i] - cell_len(cell))
            cells.append(space + cell if i in right else cell + space)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def user_error(exc: SamirVllmError | str) -> None:
    """One line on standard error."""
    print(f"samir_vllm: {exc}", file=sys.stderr, flush=True)


def save_figure(plt: Any, figure: Any, path: Path) -> None:
    """Writes and closes a figure of ``load_pyplot``'s; raises OptionError where that can't be."""
    try:
        figure.savefig(path, dpi=120)
    except OSError as exc:
        raise OptionError(f"can't write the picture {path}: {exc.strerror}") from None
    finally:
        plt.close(figure)


def load_pyplot(path: Path) -> Any:
    """``matplotlib.pyplot`` on a backend without a screen, for a picture at ``path``."""
    if path.suffix.lower() not in PICTURES:
        raise OptionError(f"{path}: a picture's name must end in {' or '.join(PICTURES)}")
    try:
        import matplotlib
    except ImportError:
        raise OptionError("drawing needs matplotlib: pip install 'samir-vllm[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt

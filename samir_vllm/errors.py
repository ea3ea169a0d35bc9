"""Exceptions a user may meet; each message is one line that names the cause and the remedy.

The command line prints that line of a ``SamirVllmError`` and exits with status 2. Knows nothing of the rest
of the package.
"""


class SamirVllmError(Exception):
    """Base of every error that a user can cause or repair."""


class ConfigError(SamirVllmError):
    """A ``config.json`` that is broken, contradictory or describes a model we don't run."""


class OptionError(SamirVllmError, ValueError):
    """An engine or command-line option outside its bounds, or unknown."""


class WeightsError(SamirVllmError):
    """Weights that are missing, damaged, or of another shape or dtype than the config says."""


class TokenizerError(SamirVllmError):
    """A damaged or unsupported tokenizer file, or an id outside the vocabulary."""


class ChatError(SamirVllmError, ValueError):
    """A dialog the model's chat format refuses, or a chat template that can't be rendered."""


class ModelNotFoundError(SamirVllmError):
    """No model folder under the name given; the message says how to get one."""


class RequestError(SamirVllmError, ValueError):
    """A request that can't be served: empty, too long, or with sampling values out of bounds."""


class DeviceError(SamirVllmError):
    """The device asked for can't be used: no GPU, no driver, too little memory."""


class DownloadError(SamirVllmError):
    """A model that couldn't be fetched or converted."""


class InvariantError(AssertionError):
    """An internal audit failed (a leaked or doubly owned page): a bug of ours, never the user's.

    No ``SamirVllmError``, so that nobody takes it for a mistake of the user's: it keeps its traceback.
    """


def one_line(message: object, limit: int = 240) -> str:
    """A foreign message, often of several lines, as one short line (an exception without one: its type)."""
    line = " ".join(str(message).split())
    if not line and isinstance(message, BaseException):
        line = type(message).__name__
    return line if len(line) <= limit else line[: limit - 3] + "..."

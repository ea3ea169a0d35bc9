"""A folder of small files that take long to make: machine code of kernels, results of self-checks.

An entry is the file ``<name>-<digest of its key>-<digest of its content>.<suffix>`` and holds its content
alone, so any tool can read it (``cuobjdump`` a kernel), its name proves it, and processes that make it at
once write the same. Nothing here raises: where the folder is of no use, reads miss, writes do nothing, and
`Cache.notices` says so. Knows neither CUDA nor what its keys mean.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

MAX_ENTRIES = 512
RENEW_SECONDS = 24 * 3600.0  # how stale an entry's time of last use may be
ABANDONED_SECONDS = 3600.0  # a temporary file this old has no writer any more
TEMPORARY = ".tmp-"
# Another process removed the entry, or it is another user's, or we are short of something.
NOT_ITS_FAULT = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
ENTRY = re.compile(r"(?P<of_key>[\w.-]+-[0-9a-f]{32})-(?P<content>[0-9a-f]{32})(?P<suffix>\.\w+)")


class Cache:
    """One folder of entries; see the module's opening.

    Names are of letters, digits and ``_.-``, suffixes of letters and digits.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: None for `default_folder`. It is made when the first entry is written."""
        self.folder = default_folder() if folder is None else folder
        self._damaged: list[str] = []
        self._unwritable = ""

    @property
    def notices(self) -> list[str]:
        """What the user should know, up to now: a line on damaged entries, a line on a folder not written."""
        found = []
        if self._damaged:
            files = "a damaged file" if len(self._damaged) == 1 else f"{len(self._damaged)} damaged files"
            found.append(f"the kernel cache {self.folder} had {files}, now made anew: {self._damaged[0]}")
        if self._unwritable:
            where = "" if self.folder is None else f" {self.folder}"
            found.append(
                f"the kernel cache{where} can't be written ({self._unwritable}): "
                "each start compiles the kernels; set SAMIR_VLLM_CACHE_DIR to a folder that can"
            )
        return found

    def read(self, name: str, key: str, suffix: str) -> bytes | None:
        """The content that was written under the key; None if there is none, or none whole."""
        slot = (_of_key(name, key), f".{suffix}")
        found = [e for e in self._scan() if (m := ENTRY.fullmatch(e.name)) and _slot(m) == slot]
        for entry in found:
            content = self._verified(Path(entry.path))
            if content is not None:
                _renew(entry)
                return content
        return None

    def write(self, name: str, key: str, suffix: str, content: bytes) -> Path | None:
        """Keep ``content`` under the key, in place of what was there; its file, or None if that can't be."""
        if self.folder is None:
            self._unwritable = "there is no home folder"
            return None
        path = self.folder / f"{_of_key(name, key)}-{_digest(content)}.{suffix}"
        try:
            # Ours alone where we make it, and never in /tmp: what lies here will be run, and a digest doesn't
            # say who wrote it. A folder that the user names is the user's to guard.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_whole(path, content)
        except OSError as exc:
            self._unwritable = self._unwritable or _reason(exc)
            return None
        self._tidy(path)
        return path

    def contents(self) -> tuple[int, int]:
        """Number of entries, and their bytes together."""
        sizes = []
        for entry in self._scan():
            with suppress(OSError):  # another process removed it
                if ENTRY.fullmatch(entry.name):
                    sizes.append(entry.stat().st_size)
        return len(sizes), sum(sizes)

    def why_unwritable(self) -> str:
        """Why no entry could be written now; "" if one could. Leaves no trace."""
        if self.folder is None:
            return "there is no home folder"
        folder = self.folder
        while not os.path.lexists(folder) and folder != folder.parent:
            folder = folder.parent  # the one that the missing folders would be made in
        try:
            with tempfile.TemporaryFile(dir=folder):
                return ""
        except OSError as exc:
            return _reason(exc)

    def _scan(self) -> list[os.DirEntry[str]]:
        if self.folder is None:
            return []
        try:
            with os.scandir(self.folder) as entries:
                return list(entries)
        except OSError:  # most often: it is not there yet
            return []

    def _verified(self, path: Path) -> bytes | None:
        """The file's content if its name says so, else None; then the file goes."""
        try:
            content = _read_whole(path)
            if path.stem.endswith(_digest(content)):
                return content
        except OSError as exc:
            if exc.errno in NOT_ITS_FAULT and not path.is_symlink():
                return None
        self._damaged.append(path.name)
        _remove(path)
        return None

    def _tidy(self, written: Path) -> None:
        """Removes what the new entry replaces, the longest unused of too many, and abandoned temporaries."""
        new, kept = ENTRY.fullmatch(written.name), []
        for entry in self._scan():
            found = ENTRY.fullmatch(entry.name)
            if found and new and entry.name != written.name and _slot(found) == _slot(new):
                _remove(Path(entry.path))
            elif found:
                kept.append(entry)
            elif entry.name.startswith(TEMPORARY) and time.time() - _last_used(entry) > ABANDONED_SECONDS:
                _remove(Path(entry.path))
        for entry in sorted(kept, key=_last_used)[:-MAX_ENTRIES]:
            _remove(Path(entry.path))


def default_folder() -> Path | None:
    """``$SAMIR_VLLM_CACHE_DIR``, else ``samir_vllm`` in the user's cache folder; None if there is no home."""
    if given := os.environ.get("SAMIR_VLLM_CACHE_DIR"):
        folder = Path(os.path.expanduser(given))
        with suppress(OSError):  # the working folder may be gone
            folder = folder.absolute()
        return folder
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: a relative value is invalid and must be ignored.
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base) / "samir_vllm" if os.path.isabs(base) else None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _of_key(name: str, key: str) -> str:
    return f"{name}-{_digest(key.encode())}"


def _reason(exc: OSError) -> str:
    return exc.strerror or type(exc).__name__


def _slot(entry: re.Match[str]) -> tuple[str, str]:
    """What the entries of one key have in common."""
    return entry["of_key"], entry["suffix"]


def _last_used(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat().st_mtime
    except OSError:
        return 0.0


def _renew(entry: os.DirEntry[str]) -> None:
    if time.time() - _last_used(entry) > RENEW_SECONDS:
        with suppress(OSError):  # a folder of somebody else's: it is their time of use that counts
            os.utime(entry.path)


def _read_whole(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else a pipe would keep us waiting
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _write_whole(path: Path, content: bytes) -> None:
    """So that a reader sees the whole file or none, whoever else writes it."""
    descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

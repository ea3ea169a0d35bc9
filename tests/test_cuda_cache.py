"""The cache of kernels: whatever happens to its folder, it gives what was written, or nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from samir_vllm.backends import cuda_cache
from samir_vllm.backends.cuda_cache import MAX_ENTRIES, Cache, default_folder

CONTENT = bytes(range(256)) * 40
DAY = 24 * 3600


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


# Hit and miss


def test_what_was_written_is_found(folder: Path) -> None:
    path = Cache(folder).write("linear", "key", "cubin", CONTENT)
    assert path is not None
    assert path.read_bytes() == CONTENT  # the content alone, for other tools
    assert (path.parent, path.name[:7], path.suffix) == (folder, "linear-", ".cubin")
    cache = Cache(folder)
    assert cache.read("linear", "key", "cubin") == CONTENT
    assert cache.notices == []


@pytest.mark.parametrize(
    ("name", "key", "suffix"),
    [("argmax", "key", "cubin"), ("linear", "Key", "cubin"), ("linear", "key", "json"), ("", "key", "cubin")],
)
def test_anything_else_misses(folder: Path, name: str, key: str, suffix: str) -> None:
    cache = Cache(folder)
    assert cache.read("linear", "key", "cubin") is None  # no folder yet
    cache.write("linear", "key", "cubin", CONTENT)
    assert cache.read(name, key, suffix) is None
    assert cache.notices == []


def test_names_may_begin_alike(folder: Path) -> None:
    cache = Cache(folder)
    for name in ("gemm", "gemm-order", "gemm-order-2"):
        cache.write(name, "key", "json", name.encode())
    for name in ("gemm", "gemm-order", "gemm-order-2"):
        assert cache.read(name, "key", "json") == name.encode()


def test_a_later_value_takes_the_place(folder: Path) -> None:
    cache = Cache(folder)
    for value in (b"[1]", b"[2]", b"[]", b"[1]"):
        path = cache.write("gemm-order", "key", "json", value)
        assert cache.read("gemm-order", "key", "json") == value
        assert files(folder) == [path]


def test_an_empty_value_is_a_value(folder: Path) -> None:
    cache = Cache(folder)
    cache.write("x", "key", "json", b"")
    assert cache.read("x", "key", "json") == b""


def test_the_folder_is_the_users_alone(folder: Path) -> None:
    path = Cache(folder).write("x", "key", "cubin", CONTENT)
    assert path is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o077 == 0


# Damage


def truncate(path: Path) -> None:
    path.write_bytes(CONTENT[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    path.write_bytes(CONTENT[:999] + bytes([CONTENT[999] ^ 1]) + CONTENT[1000:])


def lengthen(path: Path) -> None:
    path.write_bytes(CONTENT + b"\0")


def make_it_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").touch()


def make_it_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_it_a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def make_it_a_ring(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGE = [
    *(truncate, empty, flip_a_bit, lengthen),
    *(make_it_a_folder, make_it_a_pipe, make_it_a_dangling_link, make_it_a_ring),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_goes_and_comes_again(folder: Path, damage: Callable[[Path], None]) -> None:
    path = Cache(folder).write("linear", "key", "cubin", CONTENT)
    assert path is not None
    damage(path)
    cache = Cache(folder)
    assert cache.read("linear", "key", "cubin") is None
    assert files(folder) == []
    [notice] = cache.notices
    assert "\n" not in notice
    assert str(folder) in notice
    assert path.name in notice
    assert cache.write("linear", "key", "cubin", CONTENT) == path
    assert cache.read("linear", "key", "cubin") == CONTENT
    assert len(cache.notices) == 1
    assert Cache(folder).read("linear", "key", "cubin") == CONTENT


def test_an_entry_that_can_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(folder).write("linear", "key", "cubin", CONTENT)

    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(cuda_cache, "_read_whole", fail)
        cache = Cache(folder)
        assert cache.read("linear", "key", "cubin") is None
    assert len(cache.notices) == 1
    assert files(folder) == []


def test_many_damaged_entries_are_one_notice(folder: Path) -> None:
    cache = Cache(folder)
    for name in "abc":
        path = cache.write(name, "key", "cubin", CONTENT)
        assert path is not None
        truncate(path)
    for name in "abc":
        assert cache.read(name, "key", "cubin") is None
    [notice] = cache.notices
    assert "3 damaged files" in notice


def test_a_renamed_entry_is_no_other_keys(folder: Path) -> None:
    """Content under another digest of content is damage, whoever put it there."""
    cache = Cache(folder)
    first = cache.write("a", "key", "cubin", CONTENT)
    second = cache.write("b", "key", "cubin", CONTENT[::-1])
    assert first is not None
    assert second is not None
    first.replace(second)
    assert cache.read("b", "key", "cubin") is None
    assert len(cache.notices) == 1


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_an_entry_that_can_not_be_read_now_is_a_miss(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Another process pruned it, or it is another user's, or we are short of something: it isn't damaged."""
    cache = Cache(folder)
    path = cache.write("a", "key", "cubin", CONTENT)
    assert path is not None

    def fail(path: Path) -> bytes:
        raise OSError(code, "not now", path)

    with monkeypatch.context() as patch:
        patch.setattr(cuda_cache, "_read_whole", fail)
        assert cache.read("a", "key", "cubin") is None
    assert cache.notices == []
    assert cache.read("a", "key", "cubin") == CONTENT


# A folder that can't be written


def assert_goes_on_without(cache: Cache, reason: str) -> None:
    for name in "ab":
        assert cache.read(name, "key", "cubin") is None
        assert cache.write(name, "key", "cubin", CONTENT) is None
    assert cache.contents() == (0, 0)
    [notice] = cache.notices
    assert "\n" not in notice
    for word in (reason, "SAMIR_VLLM_CACHE_DIR"):
        assert word in notice
    assert reason in cache.why_unwritable()


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "below")
    assert_goes_on_without(cache, "Not a directory")
    assert str(cache.folder) in cache.notices[0]
    assert Cache(tmp_path / "file").write("a", "key", "cubin", CONTENT) is None
    assert Cache(tmp_path / "file").why_unwritable() == "Not a directory"


def test_a_file_system_that_takes_nothing() -> None:
    cache = Cache(Path("/proc/samir_vllm"))
    assert_goes_on_without(cache, "No such file or directory")
    assert cache.why_unwritable()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert_goes_on_without(Cache(tmp_path / "cache"), "Permission denied")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_writing_fails(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """What is there is still read, nothing half-written stays, and the notice has the reason."""
    cache = Cache(folder)
    kept = cache.write("kept", "key", "cubin", CONTENT)

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    for place, function in ((tempfile, "mkstemp"), (os, "replace")):
        with monkeypatch.context() as broken:
            broken.setattr(place, function, fail)
            cache = Cache(folder)
            assert cache.write("new", "key", "cubin", CONTENT) is None
            assert cache.write("other", "key", "cubin", CONTENT) is None
            assert cache.read("kept", "key", "cubin") == CONTENT
        assert files(folder) == [kept]
        [notice] = cache.notices
        assert os.strerror(code) in notice


def test_looking_leaves_no_trace(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "a" / "b")
    assert cache.why_unwritable() == ""
    assert cache.contents() == (0, 0)
    assert list(tmp_path.iterdir()) == []


# The default folder


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"SAMIR_VLLM_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"SAMIR_VLLM_CACHE_DIR": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/samir_vllm"),
        ({"SAMIR_VLLM_CACHE_DIR": "~/x", "HOME": "/c"}, "/c/x"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/samir_vllm"),
        ({"HOME": "/c"}, "/c/.cache/samir_vllm"),
    ],
)
def test_default_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: str) -> None:
    for name in ("SAMIR_VLLM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_folder() == Path(wanted)
    assert Cache().folder == Path(wanted)


def test_a_relative_folder_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMIR_VLLM_CACHE_DIR", "cache")
    monkeypatch.chdir(tmp_path)
    assert default_folder() == tmp_path / "cache"


def test_no_home_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME, and a user that the system doesn't know: ``~`` stays as it is."""
    for name in ("SAMIR_VLLM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert default_folder() is None
    assert_goes_on_without(Cache(), "no home folder")


# Bounds


def test_the_longest_unused_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 20
    assert most < MAX_ENTRIES <= 1000
    monkeypatch.setattr(cuda_cache, "MAX_ENTRIES", most)
    cache = Cache(folder)
    now = time.time()
    for index in range(most):
        path = cache.write("x", str(index), "cubin", b"%d" % index)
        assert path is not None
        os.utime(path, (now, now - 1000 + index))
    assert cache.contents() == (most, sum(len(str(i)) for i in range(most)))
    for index in range(3):
        cache.write("new", str(index), "cubin", CONTENT)
    assert cache.contents()[0] == most
    assert [cache.read("x", str(i), "cubin") for i in range(4)] == [None, None, None, b"3"]


def test_use_is_noted_once_a_day(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(folder)
    path = cache.write("x", "key", "cubin", CONTENT)
    assert path is not None
    now = time.time()
    os.utime(path, (now, now - DAY / 2))
    cache.read("x", "key", "cubin")
    assert path.stat().st_mtime == pytest.approx(now - DAY / 2, abs=1)
    os.utime(path, (now, now - 2 * DAY))
    cache.read("x", "key", "cubin")
    assert path.stat().st_mtime >= now - 1

    def fail(*_: object) -> None:
        raise PermissionError

    os.utime(path, (now, now - 2 * DAY))
    monkeypatch.setattr(os, "utime", fail)
    assert cache.read("x", "key", "cubin") == CONTENT
    assert cache.notices == []


def test_nothing_foreign_is_touched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be the user's own, full of other things."""
    monkeypatch.setattr(cuda_cache, "MAX_ENTRIES", 1)
    folder.mkdir(parents=True)
    long_ago = time.time() - 1000 * DAY
    foreign = [folder / "notes-of-mine.txt", folder / "linear.cubin", folder / f"linear-{'0' * 32}.cubin"]
    for path in (*foreign, folder / ".tmp-abandoned"):
        path.write_bytes(CONTENT)
        os.utime(path, (long_ago, long_ago))
    (folder / ".tmp-being-written").touch()
    cache = Cache(folder)
    written = [cache.write("linear", str(i), "cubin", CONTENT) for i in range(3)]
    assert {p.name for p in files(folder)} >= {p.name for p in foreign}
    left = {p.name for p in files(folder)} - {p.name for p in foreign}
    assert len(left) == 2
    assert ".tmp-being-written" in left
    assert left & {p.name for p in written if p}
    assert cache.contents() == (1, len(CONTENT))


# Several processes

ROUNDS = 120

WRITER = """
import sys
from pathlib import Path
from samir_vllm.backends.cuda_cache import Cache

folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
sys.stdin.readline()  # all begin together
for i in range(rounds):
    cache = Cache(folder)
    content = bytes(str(i), "ascii") * 5000
    found = cache.read("same", str(i), "cubin")
    assert found in (None, content), i
    path = cache.write("same", str(i), "cubin", content)
    assert path is not None and path.read_bytes() == content, (i, cache.notices)
    assert cache.read("same", str(i), "cubin") == content, i
    # One key, and a content of each process: whose it is may vary, a mixture must not be.
    cache.write("own", "key", "json", bytes(seed, "ascii") * 3000)
    found = cache.read("own", "key", "json")
    assert found is None or (len(found) == 3000 and len(set(found)) == 1), found
    assert cache.notices == [], cache.notices
"""


def test_processes_that_write_at_once(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "cache"), str(ROUNDS), seed],
            env=os.environ | {"PYTHONPATH": str(root)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in "abc"
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    errors = [process.communicate()[1] for process in processes]
    assert errors == ["", "", ""]
    names = [path.name for path in files(tmp_path / "cache")]
    assert sum(name.startswith("same-") for name in names) == ROUNDS
    assert not any(name.startswith(".tmp-") for name in names)

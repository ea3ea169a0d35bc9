"""How much memory this machine has, a container's limit counted in. Knows nothing of devices or models."""

from __future__ import annotations

from pathlib import Path


def host_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """(available, total) bytes, a container's limit (cgroup v2) counted in; None where Linux doesn't tell.

    ``root`` holds proc and sys.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        info = dict(line.split(":", 1) for line in lines)
        available, total = (int(info[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    except (OSError, ValueError, KeyError):
        return None
    try:
        limit = int((root / "sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        limit = total
    return min(available, limit), min(total, limit)

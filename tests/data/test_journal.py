"""A journal keeps what it was given: through kills, writes cut short and full disks; damage is an error, not a loss."""

from __future__ import annotations

import contextlib
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blockdraft.data.journal import Journal, Written
from blockdraft.errors import BlockdraftError, InputError

WRITER = """
import itertools, sys
from pathlib import Path
from blockdraft.data.journal import Journal, Written
journal = Journal(Path(sys.argv[1]))
for number in itertools.count():
    journal.add([Written("a", number, [number] * 50)])
    print(number, flush=True)
"""


def reply(number: int) -> Written:
    return Written("a", number, [number] * 50)


def kept(path: Path) -> list[int]:
    """Numbers of the replies in a journal, each checked to be whole."""
    with contextlib.closing(Journal(path)) as journal:
        numbers = [number for number in range(len(journal) + 9) if journal.get("a", number) is not None]
        assert [journal.get("a", number) for number in numbers] == [reply(number) for number in numbers]
        assert len(numbers) == len(journal)
    return numbers


def test_a_kill_loses_nothing_that_was_kept(tmp_path: Path) -> None:
    path, last = tmp_path / "journal", -1
    for wanted in (1, 40, 41):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            while last < wanted:
                last = int(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            last = max([last, *(int(line) for line in child.stdout.read().split())])
        found = kept(path)
        assert found == list(range(len(found))) and len(found) in (last + 1, last + 2)  # kept, and not yet told
        last = -1


def test_a_write_cut_short_anywhere_leaves_the_replies_before_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with contextlib.closing(Journal(path)) as journal:
        for number in range(6):
            journal.add([reply(number)])
        shutil.copy(path, tmp_path / "main")
        log = (tmp_path / "journal-wal").read_bytes()
    found = []
    for length in range(0, len(log) + 1, 509):
        for file in tmp_path.glob("copy*"):
            file.unlink()
        shutil.copy(tmp_path / "main", tmp_path / "copy")
        (tmp_path / "copy-wal").write_bytes(log[:length])
        found.append(kept(tmp_path / "copy"))
        assert found[-1] == list(range(len(found[-1])))
    assert sorted(found, key=len) == found and len(found[0]) == 0 and len(found[-1]) >= 5


def test_damage_is_one_line_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with contextlib.closing(Journal(path)) as journal:
        journal.add(reply(number) for number in range(400))
    whole = path.read_bytes()
    middle = len(whole) // 2
    for damaged in (
        b"not a database" * 999, whole[:middle], whole[:-1], bytes(100) + whole[100:],
        whole[:middle] + bytes(9000) + whole[middle + 9000 :],
    ):  # fmt: skip
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"--save-path: .*journal: .* are damaged .*; delete this file") as found:
            kept(path)
        assert "\n" not in str(found.value)
        assert path.read_bytes() == damaged


def test_a_full_disk_is_one_line_and_what_came_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.closing(Journal(path)) as journal:
        journal.add(reply(number) for number in range(3))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(BlockdraftError, match=r"journal: cannot be written \(.+\)$") as found:
                journal.add(reply(number) for number in range(3, 9000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert found.value.exit_code == 1
    assert kept(path) == [0, 1, 2]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BlockdraftError, match="cannot be written"):
        Journal(tmp_path / "file" / "journal")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BlockdraftError, match="folder: cannot be written"):
        Journal(tmp_path / "folder")

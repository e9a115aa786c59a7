"""Process groups end together: real processes, with a launcher between them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from sluice.engine.process.process_group import kill_session, session_members
from tests.waiting import wait_until

LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2], sys.argv[3]], process_group=0)
"""
WORKER = """
import os, subprocess, sys, time
from pathlib import Path
from sluice.engine.process.process_group import end_with
end_with(int(sys.argv[1]), Path(sys.argv[2]).touch)
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], process_group=0)
print(os.getpid(), rank.pid, flush=True)
time.sleep(100)
"""


def wait_for_end(pids: list[int]) -> None:
    wait_until(
        lambda: (
            not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
        ),
        lambda: f"some of {pids} live on",
    )


def test_ranks_in_groups_of_their_own_end_with_the_session() -> None:
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], process_group=0)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    leader = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stdout=subprocess.PIPE, text=True)
    with leader:
        assert leader.stdout is not None
        rank = int(leader.stdout.readline())
        assert session_members(leader.pid) == {leader.pid, rank}
        os.kill(leader.pid, signal.SIGKILL)
        leader.wait()
        kill_session(leader.pid)
        wait_for_end([rank])
    assert session_members(leader.pid) == set()
    kill_session(leader.pid)


def test_an_engine_that_leads_its_session_ends_with_all_of_it(tmp_path: Path) -> None:
    """If it killed its own process group, it would end before it had found the others."""
    cleaned = tmp_path / "cleaned"
    gateway = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    command = [sys.executable, "-c", WORKER, str(gateway.pid), str(cleaned)]
    engine = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    with engine:
        assert engine.stdout is not None
        pids = [int(each) for each in engine.stdout.readline().split()]
        assert pids[0] == engine.pid and session_members(engine.pid) == set(pids)
        try:
            gateway.kill()
            gateway.wait()
            wait_for_end(pids)
        finally:
            kill_session(engine.pid)
    assert cleaned.exists()


def test_an_engine_behind_a_launcher_ends_with_the_gateway(tmp_path: Path) -> None:
    cleaned = tmp_path / "cleaned"
    gateway = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, WORKER, str(gateway.pid), str(cleaned)],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    with launcher:
        assert launcher.stdout is not None
        pids = [int(each) for each in launcher.stdout.readline().split()]
        assert session_members(launcher.pid) == {launcher.pid, *pids}
        gateway.kill()
        gateway.wait()
        wait_for_end([launcher.pid, *pids])
    assert cleaned.exists()

"""A command that ends with the process that started it."""

import subprocess
import sys

import psutil

from tests.paths import ROOT

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "sluice.cli.fleet.leash", str(os.getpid()), "sleep", "600"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_command_on_the_leash_ends_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        while "sleep" not in child.name():
            assert child.is_running()
        parent.kill()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_parent_that_has_ended_already_starts_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sluice.cli.fleet.leash", "1", "echo", "hello"], cwd=ROOT, capture_output=True
    )
    assert (done.returncode, done.stdout) == (1, b"")

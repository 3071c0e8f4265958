# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command share: a list of cases, and a few things to say about processes and texts."""
import os
import pathlib
import signal
import sys
import time

TUTTI = os.path.join(os.environ["TEST_BUILD"], "bin", "tutti")
LIMIT = 60 * max(1, min(20, os.getloadavg()[0] / os.cpu_count()))  # seconds; a busy machine gets more
CASES = []
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` and nohup leave it ignored, and ranks would inherit that


def test(case):
    """Makes a function a case. It fails by any exception and is skipped when it returns why."""
    CASES.append(case)
    return case


def wait_for(condition, what, limit=LIMIT):
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"waited {limit} s for: {what}")


def processes_with(marker):
    """Pids whose command line contains the marker, but for this process."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if marker.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def children_of(parent):
    """Pids of its child processes. Not every kernel has /proc/PID/task/TID/children."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[1]) == parent:
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def equal(got, wanted):
    assert got == wanted, f"got {got!r}, not {wanted!r}"


def contains(text, part):
    assert part in text, f"{part!r} is not in:\n{text}"


def main():
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in CASES:
        if chosen not in case.__name__:
            continue
        begin = time.monotonic()
        try:
            why = case()
            kind, note = ("skipped", f": {why}") if why else ("passed", "")
        except Exception as error:
            kind, note = "failed", f"\n    {type(error).__name__}: {error}"
        counts[kind] += 1
        print(f"{kind:8}{case.__name__} ({time.monotonic() - begin:.2f} s){note}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    sys.exit(1 if counts["failed"] else 0 if counts["passed"] else 77)

# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command share: a list of cases, and a few things to say about processes and texts."""
import concurrent.futures
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time

TUTTI = os.path.join(os.environ["TEST_BUILD"], "bin", "tutti")
LIMIT = 60 * max(1, min(20, os.getloadavg()[0] / os.cpu_count()))  # seconds; a busy machine gets more
CASES = []


def patience():
    """How many times longer something may take now: by how many want the processors at this moment. The load, an average of a
    minute, counts for a quarter: a test with many ranks that has just ended is a part of it."""
    most = 0
    for _ in range(8):
        with open("/proc/loadavg") as file:
            most = max(most, int(file.read().split()[3].split("/")[0]) - 1)
        time.sleep(0.002)
    return max(1, min(20, max(most, os.getloadavg()[0] / 4) / os.cpu_count()))


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


def run(case):
    """Runs one case, tells how it went, and returns that in a word."""
    begin = time.monotonic()
    try:
        why = case()
        kind, note = ("skipped", f": {why}") if why else ("passed", "")
    except Exception as error:
        kind, note = "failed", f"\n    {type(error).__name__}: {error}"
    print(f"{kind:8}{case.__name__} ({time.monotonic() - begin:.2f} s){note}", flush=True)
    return kind


EXITS = {"passed": 0, "failed": 1, "skipped": 77}


def run_apart(case):
    """Runs one case in a process of its own, which ends with this one."""
    done = subprocess.run([sys.executable, sys.argv[0], "=" + case.__name__], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    for kind, code in EXITS.items():
        if done.returncode == code:
            return done.stdout, kind
    return f"{done.stdout}failed  {case.__name__}: its process ended with status {done.returncode}\n", "failed"


def run_beside(cases, beside):
    """So many cases at a time. How they went, by their words."""
    kinds = []
    with concurrent.futures.ThreadPoolExecutor(beside) as pool:
        for output, kind in pool.map(run_apart, cases):
            print(output, end="", flush=True)
            kinds.append(kind)
    return kinds


def main(beside=1):
    """Runs the cases whose names contain the first argument. beside: so many at once, where they wait more than they compute
    and share nothing."""
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    if chosen.startswith("="):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        sys.exit(EXITS[run(next(case for case in CASES if case.__name__ == chosen[1:]))])
    cases = [case for case in CASES if chosen in case.__name__]
    kinds = run_beside(cases, beside) if beside > 1 and len(cases) > 1 else [run(case) for case in cases]
    print(", ".join(f"{kinds.count(kind)} {kind}" for kind in EXITS))
    sys.exit(1 if "failed" in kinds else 0 if "passed" in kinds else 77)

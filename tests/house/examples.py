# SPDX-License-Identifier: Apache-2.0
"""Every example runs as its own first comment says, or plainly where that says nothing. A command whose remark says that something fails must fail."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

BUILD, SOURCE = pathlib.Path(os.environ["TEST_BUILD"]), pathlib.Path(os.environ["TEST_SOURCE"])
PROGRAMS = BUILD / "examples"
LIMIT = 120 * max(1, min(20, os.getloadavg()[0] / os.cpu_count()))  # seconds; a busy machine gets more


def commands(source):
    """The lines "    tutti run -n 4 ./hello       remark" and "    $ hello" of the opening comment, as (command, remark)."""
    name = source.stem
    opening = source.read_text().split("*/")[0]
    found = []
    for line in re.findall(r"^ \*     (?:\$ )?(.*)$", opening, re.M):
        for part in re.split(r"\s{3,}", line):  # "this          or, without a launcher,          that"
            if re.match(rf"((\w+=\S+\s+)*tutti run .*|(\./)?{name}\b.*)$", part) and re.search(rf"(^|[\s/]){name}\b", part):
                found.append((part, line))
    return found or [(name, "")]


def run(command):
    environment = {**os.environ, "PATH": f"{BUILD / 'bin'}:{PROGRAMS}:{os.environ['PATH']}", "TUTTI_TIMEOUT": f"{LIMIT:.0f}s"}
    command = command.replace("./", f"{PROGRAMS}/")
    with tempfile.TemporaryDirectory() as folder:  # some write files
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=LIMIT, cwd=folder, env=environment)


def main():
    if not PROGRAMS.is_dir():
        print("skipped: the examples were not built")
        return 77
    passed = failed = 0
    for source in sorted((SOURCE / "examples").glob("*.c")):
        if not (PROGRAMS / source.stem).exists():
            if source.stem.startswith("tensor_") and not list((BUILD / "src").glob("libtutti-tensor.so")):
                continue
            print(f"FAILED  {source.name} was not built")
            failed += 1
            continue
        for command, remark in commands(source):
            done = run(command)
            should_fail = re.search(r"\bfails\b", remark) is not None
            good = (done.returncode != 0) == should_fail and (should_fail or done.stdout != "")
            print(f"{'ok     ' if good else 'FAILED '} {command}")
            if not good:
                print(f"exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            passed += good
            failed += not good
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


sys.exit(main())

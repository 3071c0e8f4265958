# SPDX-License-Identifier: Apache-2.0
"""How soon a death is told on another host: two network namespaces of this machine with two ranks each, which do everything at once
(tests/hosts/support/steps.c); one is killed. Needs root.

    cmake --build build/release --target tutti_command tutti_ucx helper_steps helper_forward
    python3 bench/hosts/death.py --rounds 20

From SIGKILL until every operation of both ranks on the other host has printed its error with the name of the dead rank and its signal; the
output is looked at every millisecond.
"""
import argparse
import os
import re
import signal
import statistics
import sys
import time

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OPERATIONS = 6
PATIENCE = 60  # seconds


def once(hosts, jobs, steps):
    with hosts.Hosts(2) as two:
        job = jobs.Job(two, [2, 2], [steps], options=["--grace", "60"])
        job.wait_for_text(", runs", 4)
        victim = job.rank_pids()[3]
        begin = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        while len(re.findall(r"^\[[01]\] \w+ ended: .*rank 3.*signal 9", job.text(0), re.MULTILINE)) < 2 * OPERATIONS:
            if time.monotonic() - begin > PATIENCE:
                sys.exit(f"it was not told everywhere:\n{job.text(0)}")
            time.sleep(0.001)
        took = time.monotonic() - begin
        job.end()
        return 1000 * took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(SOURCE, "build", "release"))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    os.environ["TEST_SOURCE"], os.environ["TEST_BUILD"] = SOURCE, options.build
    os.environ["TUTTI_PLUGIN_PATH"] = os.path.join(options.build, "plugins")
    sys.path.insert(0, os.path.join(SOURCE, "tests", "hosts", "support"))
    import hosts
    import jobs
    if hosts.why_not():
        sys.exit(hosts.why_not())
    took = [once(hosts, jobs, os.path.join(options.build, "tests", "support", "steps")) for _ in range(options.rounds)]
    print(f"{len(took)} deaths: {min(took):.0f} to {max(took):.0f} ms, median {statistics.median(took):.0f}; load {os.getloadavg()[0]:.1f}")


main()

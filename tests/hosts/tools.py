# SPDX-License-Identifier: Apache-2.0
"""tutti ps, trace, info and bench over several hosts, each a network namespace with processes and a clock of its own."""
import json
import os
import re
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
import hosts as namespaces  # noqa: E402
from cases import LIMIT, TUTTI, children_of, contains, equal, main, processes_with, test, wait_for  # noqa: E402
from jobs import Job  # noqa: E402

BUILD = os.environ["TEST_BUILD"]
PLACES = os.path.join(BUILD, "tests", "support", "places")
STEPS = os.path.join(BUILD, "tests", "support", "steps")
WHY_NOT = namespaces.why_not()
AHEAD = 1000  # seconds that the clock of host b is ahead


def alone(command, ahead):
    """A command that sees its own processes alone, and a clock that is so many seconds ahead."""
    clock = ["--time", "--monotonic", str(ahead)] if ahead else []
    return ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *clock, *command]


class Places:
    """Two hosts on which a job runs, and a script that runs commands there."""

    def __init__(self, hosts, program, ahead=0):
        self.hosts, self.folder = hosts, tempfile.TemporaryDirectory()
        self.inits = []
        for host in range(2):
            process = hosts.start(host, alone(["sh", "-c", "echo ready; exec sleep 10000"], ahead if host == 1 else 0))
            equal(process.stdout.readline(), "ready\n")
            wait_for(lambda: children_of(process.pid), "the first process of a host")
            self.inits.append(children_of(process.pid)[0])
        self.script = os.path.join(self.folder.name, "rsh")
        with open(self.script, "w") as file:
            file.write("#!/bin/sh\nhost=$1\nshift\ncase $host in\n")
            for host in range(2):
                file.write(f'{hosts.address(host)}) exec nsenter -t {self.inits[host]} -n -u -p -m -T sh -c "$*" ;;\n')
            file.write("*) exit 255 ;;\nesac\n")
        os.chmod(self.script, 0o755)
        self.list = ",".join(hosts.address(host) for host in range(2))
        self.job = program and subprocess.Popen(
            self.here(["run", "--hosts", f"{hosts.address(0)}:2,{hosts.address(1)}:2", "--rsh", self.script, "--bind", "none", *program]),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "TUTTI_HOST_TIMEOUT": "100"})

    def here(self, words):
        """The command line of a tutti on the network of host a, which sees all processes: it can go to both."""
        return self.hosts.command(0, [TUTTI, *words])

    def tutti(self, *words):
        done = subprocess.run(self.here(words), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT,
                              env={**os.environ, "TUTTI_HOST_TIMEOUT": "100"})
        return done.returncode, done.stdout, done.stderr

    def read_until(self, text, count):
        """Until the job has printed it so often."""
        seen = 0
        while seen < count:
            line = self.job.stdout.readline()
            assert line, f"the job ended before it printed {text!r} {count} times"
            seen += text in line

    def end(self):
        self.job.send_signal(signal.SIGTERM)
        self.job.communicate(timeout=LIMIT)


def over_hosts(case):
    def run():
        if WHY_NOT:
            return WHY_NOT
        if subprocess.run(["unshare", "--time", "--monotonic", "1", "true"], capture_output=True).returncode != 0:
            return "this kernel has no clocks of namespaces"
        with namespaces.Hosts(2) as hosts:
            return case(hosts)
    run.__name__ = case.__name__
    return test(run)


@over_hosts
def ps_shows_a_job_over_hosts_as_one(hosts):
    places = Places(hosts, [PLACES, "wait"])
    places.read_until("all are here", 4)
    status, output, errors = places.tutti("ps", "--hosts", places.list, "--rsh", places.script)
    equal((status, errors), (0, ""))
    equal(len(re.findall(r"^job ", output, re.M)), 1)
    contains(output, "4 ranks on 2 hosts, open for")
    for rank, host in enumerate("aabb"):
        assert re.search(rf"^ +{rank} +\d+ {host} +(sleeps|runs) ", output, re.M), output
    status, output, _ = places.tutti("ps", "--json", "--hosts", places.list, "--rsh", places.script)
    jobs = json.loads(output)
    equal([(rank["rank"], rank["host"]) for rank in jobs[0]["ranks"]], [(0, "a"), (1, "a"), (2, "b"), (3, "b")])
    there = subprocess.run([places.script, hosts.address(1), f"'{TUTTI}' ps"], capture_output=True, text=True, timeout=LIMIT)
    contains(there.stdout, "2 ranks on this host of 4")  # without --hosts its own alone
    status, output, errors = places.tutti("ps", "--hosts", "10.77.0.99", "--rsh", places.script)
    equal(status, 1)
    contains(errors, "10.77.0.99 cannot be asked by")
    places.end()


def ends_of_barriers(file):
    """Of the barriers that all four ranks completed: when each of them did."""
    with open(file) as trace:
        events = json.load(trace)["traceEvents"]
    ends = {}
    for event in events:
        if event.get("name") == "barrier" and event["cat"] == "completed":
            ends.setdefault((event["args"]["group"], event["args"]["sequence"]), {})[event["pid"]] = event["ts"] + event["dur"]
    whole = [list(times.values()) for times in ends.values() if len(times) == 4]
    assert whole, "no barrier that all ranks completed"
    return whole


@over_hosts
def trace_puts_the_clocks_of_hosts_right(hosts):
    if not os.path.exists(os.path.join(BUILD, "plugins", "libtutti-ucx.so")):
        return "the plug-in tutti-ucx was not built: no libucx-dev"
    places = Places(hosts, [STEPS, "100"], ahead=AHEAD)
    places.read_until(", runs", 4)
    file = os.path.join(places.folder.name, "trace.json")
    status, output, errors = places.tutti("trace", "--hosts", places.list, "--rsh", places.script, "-o", file)
    equal(errors, "")
    contains(output, "recorders of 4 ranks of 4")
    ahead = float(re.search(rf"host {hosts.address(1)}: its clock is ([0-9.]+) s ahead of this one's, measured to", output).group(1))
    assert abs(ahead - AHEAD) < 1, output
    whole = ends_of_barriers(file)
    # Nobody leaves a barrier before the last has come; a second between the ends is a busy machine, 1000 would be clocks.
    assert all(max(times) - min(times) < AHEAD * 1e6 / 2 for times in whole), whole
    places.end()
    return None


@over_hosts
def trace_puts_files_of_failed_ranks_on_one_clock(hosts):
    if not os.path.exists(os.path.join(BUILD, "plugins", "libtutti-ucx.so")):
        return "the plug-in tutti-ucx was not built: no libucx-dev"
    with tempfile.TemporaryDirectory() as logs:
        places = Places(hosts, ["--log-dir", logs, STEPS, "100"], ahead=AHEAD)
        places.read_until(", runs", 4)
        os.kill(max(set(processes_with(STEPS)) & set(hosts.pids(1))), signal.SIGKILL)
        places.job.communicate(timeout=LIMIT)
        files = [os.path.join(logs, name) for name in os.listdir(logs) if name.endswith(".json")]
        equal(len(files), 4)
        for name in files:  # host b has a wrong idea of the time of day, too
            with open(name) as file:
                text = file.read()
            contains(text, '"clock_ahead_ns"')
            if '"host": "b"' in text:
                text = re.sub(r'("wall_minus_clock_ns": )(-?\d+)', lambda found: found[1] + str(int(found[2]) + 500 * 10**9), text)
            with open(name, "w") as file:
                file.write(text)
        timeline = os.path.join(places.folder.name, "trace.json")
        _, output, errors = places.tutti("trace", logs, "-o", timeline)
        equal(errors, "")
        found = re.search(r"host b: its clock was ([0-9.]+) s ahead of that of a, measured to ([0-9.]+) ms", output)
        assert found and abs(float(found[1]) - AHEAD) <= float(found[2]) / 1e3 + 1e-3, output
        assert all(max(times) - min(times) < 200e6 for times in ends_of_barriers(timeline)), output
        with open(files[0]) as file:
            text = re.sub(r'"clock_\w+_ns": -?\d+,', "", file.read())
        with open(files[0], "w") as file:
            file.write(text)
        _, output, _ = places.tutti("trace", logs)
        contains(output, "Not all files say how far the clocks of their hosts were apart")
    return None


@over_hosts
def info_says_what_differs_between_hosts(hosts):
    places = Places(hosts, None)
    status, output, errors = places.tutti("info", "--hosts", places.list, "--rsh", places.script)
    equal(errors, "")
    contains(output, f"host {hosts.address(0)}\n")
    first, other = output.split(f"\nhost {hosts.address(1)}: as the first, but for\n")
    assert re.search(r"^  host +a$", first, re.M), first
    assert re.search(r"^  \+   host +b$", other, re.M) and re.search(r"^  -   host +a$", other, re.M), other
    assert "TUTTI_TIMEOUT" not in other, other
    status, _, errors = places.tutti("info", "--hosts", "10.77.0.99", "--rsh", places.script)
    equal(status, 1)
    contains(errors, "10.77.0.99 says nothing of itself")


@over_hosts
def bench_runs_over_hosts(hosts):
    if not os.path.exists(os.path.join(BUILD, "plugins", "libtutti-ucx.so")):
        return "the plug-in tutti-ucx was not built: no libucx-dev"
    places = Places(hosts, None)
    status, output, errors = places.tutti("bench", "all_reduce", "--hosts", places.list.replace(",", ":1,") + ":1", f"--rsh={places.script}", "--private",
                                          "--check", "-b", "8", "-e", "64K", "-f", "128", "-n", "3", "-w", "1")
    equal((status, errors), (0, ""))
    contains(output, "# ranks: 2, started by tutti run")
    equal(len(re.findall(r"^ +\d+ +\d+ +f32 +sum .* 0$", output, re.M)), 2)
    return None


main()

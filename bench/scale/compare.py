# SPDX-License-Identifier: Apache-2.0
"""Compares the times that bench/scale simulates with those of real jobs, over hosts made of network namespaces whose links delay and limit. Needs root.

    cmake --build build/release --target tutti_command tutti_ucx helper_traffic helper_forward
    python3 bench/scale/compare.py [--delay MS] [--rate MBIT] [--hosts 2,3,4,6] [CALL…]
    python3 bench/scale/compare.py --ranks 4x64            # descriptors and memory of many ranks
    python3 bench/scale/compare.py --counts 4x64 CALL…     # what many ranks send

Every cable delays by half of --delay, and what a host sends goes at --rate at most, so that a message takes the delay and its bytes their time whatever the
processors do. Counts are compared by tests/hosts/scale.py, which needs neither.
"""
import argparse
import os
import re
import subprocess
import sys

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Long ones first: how TCP begins on a connection is no part of the model.
CALLS = ["all_reduce:f32:1000000", "all_to_all:u8:200000", "broadcast:u8:4000000", "all_gather:u8:200000", "all_reduce:f32:20000", "all_reduce+any:f32:20000",
         "all_reduce:f32:2", "barrier:u8:0"]


def modules(build):
    os.environ["TEST_SOURCE"], os.environ["TEST_BUILD"] = SOURCE, build
    os.environ["TUTTI_PLUGIN_PATH"] = os.path.join(build, "plugins")
    sys.path.insert(0, os.path.join(SOURCE, "tests", "hosts", "support"))
    import hosts
    import jobs
    return hosts, jobs


def median(values):
    return sorted(values)[len(values) // 2]


def times_in(text):
    """Microseconds of each call, from the moment at which all begin until the last is done: the median."""
    times = {}
    for call, figures in re.findall(r"rank \d+ after (\S+):((?: [0-9.]+)+) us", text):
        times.setdefault(call, []).append([float(word) for word in figures.split()])
    return {call: median([max(turn) for turn in zip(*ranks)]) for call, ranks in times.items()}


def measured(hosts, jobs, program, each, calls):
    job = jobs.Job(hosts, each, [program, "timed", ",".join(map(str, each)), *calls], options=["--bind", "none"])
    statuses = job.end()
    text = "".join(job.text(node) for node in range(len(each)))
    if any(statuses):
        raise SystemExit(f"the job failed: {statuses}\n{text}")
    return times_in(text)


def simulated(program, each, options):
    """The same calls in the same order: what they leave of their windows counts for the next."""
    done = subprocess.run([program, "predicted", ",".join(map(str, each)), *options.calls], capture_output=True, text=True, check=True,
                          env={**os.environ, "LATENCY": str(options.delay * 1e3), "RATE": str(options.rate)})
    return times_in(done.stdout)


def compare_times(namespaces, jobs, options):
    print(f"one way {options.delay} ms, {options.rate} Mbit/s per host\n{'hosts':>5} {'call':26} {'measured ms':>12} {'simulated ms':>13} {'ratio':>7}")
    for count in [int(word) for word in options.hosts.split(",")]:
        with namespaces.Hosts(count, forward={"delay": options.delay / 2}) as hosts:
            for host in range(count):
                namespaces.run("ip", "-n", hosts.names[host], "route", "replace", "10.77.0.0/24", "dev", "eth0", "congctl", options.congestion)
                namespaces.run("ip", "netns", "exec", hosts.names[host], "sysctl", "-w", f"net.ipv4.tcp_slow_start_after_idle={int(options.idle_restart)}")
                if hosts.limit(host, f"{options.rate}mbit"):
                    raise SystemExit(hosts.limit(host, f"{options.rate}mbit"))
            found = measured(hosts, jobs, options.program, [1] * count, options.calls)
        said = simulated(options.program, [1] * count, options)
        for call in options.calls:
            print(f"{count:>5} {call:26} {found[call] / 1e3:>12.2f} {said[call] / 1e3:>13.2f} {said[call] / found[call]:>7.2f}", flush=True)


def count_ranks(namespaces, jobs, options):
    """A job of so many ranks: what each holds after an all-reduce, an all-gather and an all-to-all."""
    count, each = (int(word) for word in options.ranks.split("x"))
    with namespaces.Hosts(count) as hosts:
        job = jobs.Job(hosts, [each] * count, [options.program, "held", ",".join([str(each)] * count), *options.calls],
                       options=["--bind", "none"], environment={"TUTTI_TIMEOUT": "600"})
        statuses = job.end()
        text = "".join(job.text(node) for node in range(count))
    if any(statuses):
        raise SystemExit(f"the job failed: {statuses}\n{text[-2000:]}")
    for call in options.calls:
        rows = [tuple(map(int, row)) for row in re.findall(rf"after {re.escape(call)}: (\d+) connections, (\d+) descriptors, (\d+) KiB of its own, (\d+) KiB shared", text)]
        columns = list(zip(*rows))
        print(f"{count} x {each} {call:26} ranks {len(rows)}: connections {min(columns[0])} to {max(columns[0])}, descriptors {min(columns[1])} to {max(columns[1])}, "
              f"memory of its own {min(columns[2])} to {max(columns[2])} KiB, shared {min(columns[3])} to {max(columns[3])} KiB", flush=True)


def compare_counts(namespaces, jobs, options):
    """Messages, bytes and connections of every rank, in a job and simulated."""
    count, each = (int(word) for word in options.counts.split("x"))
    listed = ",".join([str(each)] * count)
    said = subprocess.run([options.program, "simulated", listed, *options.calls], capture_output=True, text=True, check=True).stdout.splitlines()
    with namespaces.Hosts(count) as hosts:
        job = jobs.Job(hosts, [each] * count, [options.program, "real", listed, *options.calls], options=["--bind", "none"], environment={"TUTTI_TIMEOUT": "600"})
        statuses = job.end()
        text = "".join(job.text(node) for node in range(count))
    if any(statuses):
        raise SystemExit(f"the job failed: {statuses}\n" + "\n".join(line for line in text.splitlines() if " after " not in line))
    found = [line.split("] ", 1)[1] for line in text.splitlines() if " after " in line]
    print(f"{count} x {each}: {len(found)} lines counted, {len(said)} simulated, {len(set(found) ^ set(said))} differ")
    print("\n".join(sorted(set(found) ^ set(said))[:20]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release", help="the build folder")
    parser.add_argument("--delay", type=float, default=20, help="ms that a packet takes from host to host")
    parser.add_argument("--rate", type=float, default=100, help="Mbit/s that a host sends at most")
    parser.add_argument("--hosts", default="2,3,4,6", help="numbers of hosts")
    parser.add_argument("--congestion", default="cubic", help="how TCP finds its rate")
    parser.add_argument("--idle-restart", action="store_true", help="let TCP begin anew on connections that were idle, as it does by default")
    parser.add_argument("--ranks", help="HOSTSxRANKS: count what the ranks of such a job hold instead")
    parser.add_argument("--counts", help="HOSTSxRANKS: compare what the ranks of such a job send instead")
    parser.add_argument("calls", nargs="*", default=CALLS)
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    options.program = os.path.join(options.build, "tests", "support", "traffic")
    namespaces, jobs = modules(options.build)
    why = namespaces.why_not() or (None if options.ranks or options.counts else namespaces.no_faults())
    if why:
        raise SystemExit(why)
    if options.counts:
        compare_counts(namespaces, jobs, options)
    elif options.ranks:
        options.calls = options.calls if options.calls != CALLS else ["barrier:u8:0", "all_reduce:f32:2", "all_reduce:f32:1000000", "all_gather:u8:1000"]
        count_ranks(namespaces, jobs, options)
    else:
        compare_times(namespaces, jobs, options)


if __name__ == "__main__":
    main()

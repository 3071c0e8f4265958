# SPDX-License-Identifier: Apache-2.0
"""The fault matrix over hosts: two network namespaces with two ranks each, which do everything at once (support/steps.c),
and something happens to one of them. Every operation on every rank that is left ends with an error that names a rank or a
host, and nothing is left running."""
import os
import re
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
import hosts as namespaces  # noqa: E402
from cases import LIMIT, contains, main, test, wait_for  # noqa: E402
from jobs import Job, SILENCE  # noqa: E402

STEPS = os.path.join(os.environ["TEST_BUILD"], "tests", "support", "steps")
OPERATIONS = ["all_reduce", "barrier", "send_recv", "put", "peers_barrier", "get"]
WHY_NOT = namespaces.why_not()
if WHY_NOT is None and not os.path.exists(os.path.join(os.environ["TEST_BUILD"], "plugins", "libtutti-ucx.so")):
    WHY_NOT = "the plug-in tutti-ucx was not built"
PORT = 29741


def endings(job, ranks):
    """By rank: operations that ended there, with their errors."""
    found = {rank: {} for rank in ranks}
    for node in range(2):
        for rank, operation, message in re.findall(r"^\[(\d+)\] (\w+) ended: (.*)$", job.text(node), re.MULTILINE):
            found.setdefault(int(rank), {})[operation] = message
    return found


class EndedByUcx(Exception):
    """An assertion of UCX ended a rank that was to be told (docs/hosts.md): nothing can be said of this run."""


def disturbed_once(how, ranks, environment, seconds, after):
    with namespaces.Hosts(2) as hosts:
        job = Job(hosts, [2, 2], [STEPS, *([seconds] if seconds else [])], options=["--grace", "60"], environment=environment, port=PORT)

        def all_ended():
            return all(launcher.poll() is not None for launcher in job.launchers)

        def told():
            return all(len(endings(job, ranks)[rank]) == len(OPERATIONS) for rank in ranks)

        wait_for(lambda: all_ended() or sum(job.text(node).count(", runs") for node in range(2)) >= 4, "four ranks that run")
        how(hosts, job)
        wait_for(lambda: told() or all_ended(), "every operation to end on every rank that is left")
        texts = "\n".join(job.text(node) for node in range(2))
        if not told() and re.search(r"\.[ch]:\d+ +Assertion `", texts):
            raise EndedByUcx()
        assert told(), f"some were not told:\n{texts}"
        for rank in ranks:
            for operation, message in endings(job, ranks)[rank].items():
                assert re.search(r"\brank \d|\bhost\b", message), f"rank {rank}, {operation}: {message}"
        if after is not None:
            after(job)
        for launcher in job.launchers:
            launcher.wait(timeout=LIMIT)
        assert all(launcher.returncode != 0 for launcher in job.launchers), [launcher.returncode for launcher in job.launchers]
        hosts.nothing_left()
        return {rank: endings(job, ranks)[rank] for rank in ranks}


def disturb(how, ranks, environment=None, seconds=None, after=None):
    """What happens to a job in which how(hosts, job) does something; `ranks` must all be told of it. None: UCX ended a
    rank every time."""
    for _ in range(10):
        try:
            return disturbed_once(how, ranks, environment, seconds, after)
        except EndedByUcx:
            print("    once more: an assertion of UCX ended a rank", flush=True)
    return None


def over_hosts(case):
    def run():
        if WHY_NOT:
            return WHY_NOT
        return "assertions of UCX ended ranks in ten runs of ten" if case() is None else None
    run.__name__ = case.__name__
    return test(run)


@over_hosts
def a_killed_rank_ends_every_operation_with_its_name_and_signal():
    told = disturb(lambda hosts, job: os.kill(job.rank_pids()[3], signal.SIGKILL), [0, 1, 2])
    for rank in told or []:
        for message in told[rank].values():
            contains(message, "rank 3")
            contains(message, "signal 9")
    return told


@over_hosts
def a_stopped_rank_ends_every_operation_by_its_deadline():
    def kill_it(job):
        os.kill(job.rank_pids()[3], signal.SIGKILL)
    return disturb(lambda hosts, job: os.kill(job.rank_pids()[3], signal.SIGSTOP), [0, 1, 2], seconds=SILENCE, after=kill_it)


@over_hosts
def a_pulled_cable_ends_every_operation_on_both_hosts():
    return disturb(lambda hosts, job: hosts.pull(1), [0, 1, 2, 3], {"TUTTI_HOST_TIMEOUT": SILENCE})


@over_hosts
def a_killed_launcher_ends_every_operation_on_the_other_host():
    return disturb(lambda hosts, job: job.launchers[1].send_signal(signal.SIGKILL), [0, 1])


main(beside=3)

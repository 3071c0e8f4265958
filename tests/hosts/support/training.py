# SPDX-License-Identifier: Apache-2.0
"""Jobs over hosts that train (support/train.c) with --survive while something happens: who went on, and what everybody said."""
import os
import re

import hosts as namespaces
from cases import LIMIT, test, wait_for
from jobs import Job

TRAIN = os.path.join(os.environ["TEST_BUILD"], "tests", "support", "train")
WHY_NOT = namespaces.why_not()
if WHY_NOT is None and not os.path.exists(os.path.join(os.environ["TEST_BUILD"], "plugins", "libtutti-ucx.so")):
    WHY_NOT = "the plug-in tutti-ucx was not built"


class EndedByUcx(Exception):
    """An assertion of UCX ended a rank (docs/hosts.md): nothing can be said of this run."""


def went_on(job):
    """Ranks that went on, and with how many."""
    return {int(rank): int(count) for node in range(len(job.outputs))
            for rank, count in re.findall(r"rank (\d+) went on with (\d+) ranks", job.text(node))}


def lose_once(ranks, how, expected, environment, seconds, steps, port):
    with namespaces.Hosts(len(ranks)) as hosts:
        job = Job(hosts, ranks, [TRAIN, str(steps), *([seconds] if seconds else [])], options=["--survive", "--grace", "2"],
                  environment=environment, port=port)

        def all_ended():
            return all(launcher.poll() is not None for launcher in job.launchers)

        def texts():
            return "\n".join(f"---- host {node}\n{job.text(node)}" for node in range(len(ranks)))

        wait_for(lambda: all_ended() or texts().count(", runs") >= sum(ranks), "ranks that run")
        assert not all_ended(), texts()
        skipped = how(hosts, job)
        if skipped:
            return skipped
        try:
            wait_for(all_ended, "all launchers to end", 2 * LIMIT)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{texts()}") from None
        if re.search(r"\.[ch]:\d+ +Assertion `", texts()):  # also of a rank that had gone on: its status is not its own
            raise EndedByUcx()
        assert went_on(job) == expected, f"{went_on(job)} went on, not {expected}:\n{texts()}"
        hosts.nothing_left()
        return [launcher.returncode for launcher in job.launchers], [job.text(node) for node in range(len(ranks))]


def lose(ranks, how, expected, environment=None, seconds=None, steps=20, port=29751):
    """Exit statuses and outputs by host of a job in which how(hosts, job) does something, after which the ranks of
    `expected` go on; or why that cannot be tried."""
    for _ in range(10):
        try:
            return lose_once(ranks, how, expected, environment, seconds, steps, port)
        except EndedByUcx:
            print("    once more: an assertion of UCX ended a rank", flush=True)
    return "assertions of UCX ended ranks in ten runs of ten"


def over_hosts(case):
    def run():
        return WHY_NOT or case()
    run.__name__ = case.__name__
    return test(run)

# SPDX-License-Identifier: Apache-2.0
"""Links that delay, reorder, lose, repeat, or are slow: everything that crosses hosts gives the same results over them."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
import hosts as namespaces  # noqa: E402
from cases import equal, main, test  # noqa: E402
from jobs import Job  # noqa: E402

BUILD = os.environ["TEST_BUILD"]
RESULTS = os.path.join(BUILD, "tests", "support", "results")
WHY_NOT = namespaces.why_not()
if not os.path.exists(os.path.join(BUILD, "plugins", "libtutti-ucx.so")):
    WHY_NOT = "the plug-in tutti-ucx was not built: no libucx-dev"


def results_over(each, forward=None, change=None):
    """Runs the program over hosts whose cables are like that; why it cannot, or None."""
    if WHY_NOT:
        return WHY_NOT
    if forward is not None and namespaces.no_faults():
        return namespaces.no_faults()
    with namespaces.Hosts(len(each), forward=forward) as hosts:
        for host in range(len(each)) if change else ():
            why = change(hosts, host)
            if why:
                return why
        job = Job(hosts, each, [RESULTS, "2"], options=["--bind", "none"])
        equal((job.end(), [job.text(node) for node in range(len(each)) if job.text(node).count("all results are right") != each[node]]),
              ([0] * len(each), []))
        hosts.nothing_left()
    return None


@test
def results_are_right_over_links_that_delay_and_reorder():
    return results_over([2, 2], forward={"delay": 2, "jitter": 1, "reorder": 10})


@test
def results_are_right_over_links_that_lose_and_repeat():
    return results_over([1, 1, 1], forward={"delay": 0.5, "loss": 1, "repeat": 2})


@test
def results_are_right_where_a_firewall_drops_packets_now_and_then():
    return results_over([1, 2], change=lambda hosts, host: hosts.lose(host, 1))


@test
def results_are_right_over_slow_links():
    return results_over([2, 1], change=lambda hosts, host: hosts.limit(host, "100mbit"))


main()

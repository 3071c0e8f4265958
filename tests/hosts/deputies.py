# SPDX-License-Identifier: Apache-2.0
"""Jobs over hosts whose first launchers are lost: the next in line that has more than half of the ranks takes their place, once or
again; no two parts go on, and nothing is left running."""
import os
import signal
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
from training import lose, over_hosts  # noqa: E402 (first: it finds the others)
from cases import contains, equal, main, wait_for  # noqa: E402
from jobs import SILENCE  # noqa: E402

PORT = 29761


def kill(*nodes):
    def how(_, job):
        for node in nodes:
            job.launchers[node].send_signal(signal.SIGKILL)
    return how


def part(one, other):
    def how(network, _):
        for here in one:
            for there in other:
                skipped = network.cut(here, there)
                if skipped:
                    return skipped
        return None
    return how


@over_hosts
def three_of_five_hosts_go_on_when_the_first_two_launchers_are_killed():
    found = lose([1, 1, 1, 1, 1], kill(0, 1), {2: 3, 3: 3, 4: 3}, port=PORT)
    if isinstance(found, str):
        return found
    equal(found[0][2:], [0, 0, 0])
    contains(found[1][2], "3 of 5 ranks have, and go on with this one")
    contains(found[1][4], "The job goes on with that of node 2")
    return None


@over_hosts
def a_host_with_more_than_half_of_the_ranks_goes_on_alone():
    found = lose([1, 1, 3], kill(0, 1), {2: 3, 3: 3, 4: 3}, port=PORT)
    if isinstance(found, str):
        return found
    equal(found[0][2], 0)
    contains(found[1][2], "3 of 5 ranks have, and go on with this one")
    return None


@over_hosts
def who_took_the_place_of_the_first_launcher_is_replaced_in_turn():
    def one_after_the_other(_, job):
        job.launchers[0].send_signal(signal.SIGKILL)
        job.wait_for_text("The job goes on with that of node 1", 2)
        job.launchers[1].send_signal(signal.SIGKILL)

    found = lose([1, 1, 2, 2], one_after_the_other, {2: 4, 3: 4, 4: 4, 5: 4}, steps=300, port=PORT)
    if isinstance(found, str):
        return found
    equal(found[0][2:], [0, 0])
    contains(found[1][3], "The job goes on with that of node 1")
    contains(found[1][3], "The job goes on with that of node 2")
    return None


@over_hosts
def a_shrink_that_is_half_done_when_the_store_moves_begins_anew_by_itself():
    with tempfile.TemporaryDirectory() as folder:
        strike = os.path.join(folder, "strike")

        def kill_a_rank_then_the_launcher(_, job):
            with open(strike + ".new", "w") as file:
                file.write(str(job.launcher_pid(0)))
            os.rename(strike + ".new", strike)
            os.kill(job.rank_pids()[4], signal.SIGKILL)

        found = lose([1, 2, 2], kill_a_rank_then_the_launcher, {1: 3, 2: 3, 3: 3}, {"TRAIN_STRIKE": f"3:{strike}"}, port=PORT)
    if isinstance(found, str):
        return found
    contains(found[1][2], "rank 3 kills the launcher before its ballot")
    equal(found[0][1], 0)
    return None


@over_hosts
def whoever_asks_a_store_that_stands_still_goes_on_once_its_launcher_is_lost():
    # Connections show that rank 0 has died, and nobody tells why: the others ask the store, which stands still with its launcher.
    def stand_still(_, job):
        pid = job.launcher_pid(0)
        os.kill(pid, signal.SIGSTOP)
        try:
            os.kill(job.rank_pids()[0], signal.SIGKILL)
            wait_for(lambda: all(launcher.poll() is not None for launcher in job.launchers[1:]), "the other launchers to end")
        finally:
            os.kill(pid, signal.SIGCONT)

    found = lose([1, 1, 1], stand_still, {1: 2, 2: 2}, {"TUTTI_HOST_TIMEOUT": SILENCE, "TUTTI_TIMEOUT": "3600"}, port=PORT)
    if isinstance(found, str):
        return found
    equal(found[0][1:], [0, 0])
    contains(found[1][2], "The job goes on with that of node 1")
    return None


@over_hosts
def fewer_than_half_do_not_go_on_whoever_is_next_in_line():
    found = lose([1, 1, 1, 1], kill(0, 1), {}, port=PORT)
    if isinstance(found, str):
        return found
    for node in (2, 3):
        assert found[0][node] != 0, found
        contains(found[1][node], "lost the launcher that holds the job together")
    return None


@over_hosts
def of_two_parts_the_larger_goes_on_with_the_next_in_line_that_it_has():
    found = lose([1, 1, 1, 1, 1], part((0, 1), (2, 3, 4)), {2: 3, 3: 3, 4: 3}, {"TUTTI_HOST_TIMEOUT": SILENCE}, port=PORT)
    if isinstance(found, str):
        return found
    assert found[0][0] != 0 and found[0][1] != 0, found
    equal(found[0][2:], [0, 0, 0])
    contains(found[1][0], "fewer than half of the ranks (2 of 5) are left")
    contains(found[1][4], "The job goes on with that of node 2")
    return None


@over_hosts
def of_two_equal_parts_of_four_hosts_the_one_with_the_first_launcher_goes_on():
    found = lose([1, 1, 1, 1], part((0, 1), (2, 3)), {0: 2, 1: 2}, {"TUTTI_HOST_TIMEOUT": SILENCE}, port=PORT)
    if isinstance(found, str):
        return found
    equal(found[0][:2], [0, 0])
    assert found[0][2] != 0 and found[0][3] != 0, found
    return None


main(beside=3)

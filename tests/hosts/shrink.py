# SPDX-License-Identifier: Apache-2.0
"""Jobs over hosts that go on after losses (--survive): ranks train (support/train.c), something happens, and of what falls apart one
part goes on, with collectives and symmetric memory, or none; the others end with an error that says why; nothing is left running."""
import os
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
from training import lose, over_hosts  # noqa: E402 (first: it finds the others)
from cases import contains, equal, main  # noqa: E402
from jobs import SILENCE  # noqa: E402


@over_hosts
def three_of_four_ranks_on_two_hosts_go_on_when_one_is_killed():
    found = lose([2, 2], lambda hosts, job: os.kill(job.rank_pids()[3], signal.SIGKILL), {0: 3, 1: 3, 2: 3})
    if isinstance(found, str):
        return found
    equal(found[0], [0, 0])
    contains(found[1][0], "rank 3 on b")
    return None


@over_hosts
def a_killed_launcher_takes_its_ranks_along_and_the_half_with_the_store_goes_on():
    found = lose([2, 2], lambda hosts, job: job.launchers[1].send_signal(signal.SIGKILL), {0: 2, 1: 2})
    if isinstance(found, str):
        return found
    equal(found[0][0], 0)
    contains(found[1][0], "host b (node 1) is lost")
    return None


@over_hosts
def of_two_equal_parts_the_one_with_the_store_goes_on():
    found = lose([2, 2], lambda hosts, job: hosts.cut(0, 1), {0: 2, 1: 2}, {"TUTTI_HOST_TIMEOUT": SILENCE})
    if isinstance(found, str):
        return found
    equal(found[0][0], 0)
    assert found[0][1] != 0, found
    contains(found[1][1], "lost the launcher that holds the job together")
    return None


@over_hosts
def more_than_half_goes_on_without_the_first_launcher_and_less_does_not_though_it_has_the_store():
    found = lose([1, 2], lambda hosts, job: hosts.cut(0, 1), {1: 2, 2: 2}, {"TUTTI_HOST_TIMEOUT": SILENCE})
    if isinstance(found, str):
        return found
    assert found[0][0] != 0, found
    equal(found[0][1], 0)
    contains(found[1][0], "fewer than half of the ranks (1 of 3) are left")
    contains(found[1][1], "2 of 3 ranks have, and go on with this one")
    return None


@over_hosts
def two_of_three_hosts_go_on_when_that_of_the_first_launcher_is_lost():
    found = lose([1, 1, 1], lambda hosts, job: hosts.pull(0), {1: 2, 2: 2}, {"TUTTI_HOST_TIMEOUT": SILENCE})
    if isinstance(found, str):
        return found
    equal(found[0][1:], [0, 0])
    contains(found[1][2], "The job goes on with that of node 1")
    return None


@over_hosts
def a_killed_first_launcher_is_replaced_when_more_than_half_is_left():
    found = lose([1, 1, 1], lambda hosts, job: job.launchers[0].send_signal(signal.SIGKILL), {1: 2, 2: 2})
    if isinstance(found, str):
        return found
    equal(found[0][1:], [0, 0])
    return None


@over_hosts
def of_two_hosts_that_do_not_reach_each_other_one_is_left_out():
    found = lose([1, 1, 1], lambda hosts, job: hosts.cut(1, 2), {0: 2, 1: 2}, {"TUTTI_HOST_TIMEOUT": SILENCE}, SILENCE)
    if isinstance(found, str):
        return found
    equal(found[0], [0, 0, 0])
    contains(found[1][2], "go on without it")
    return None


@over_hosts
def a_rank_that_dies_amid_long_reductions_between_hosts_of_one_rank_each_is_left_out():
    # 16 MB each: the sums take almost all of the time, so that is where it dies. UCX ends a survivor now and then (docs/hosts.md): then once more.
    for ranks, left in (([1, 1, 1], {0: 2, 2: 2}), ([1, 1], {0: 1})):  # parts of the sum for each, and inputs that two swap
        found = lose(ranks, lambda _, job: os.kill(job.rank_pids()[1], signal.SIGKILL), left, {"TRAIN_ELEMENTS": "2000000"}, steps=3)
        if isinstance(found, str):
            return found
        equal([found[0][node] for node in left], [0] * len(left))
        contains(found[1][0], "was killed by signal 9 (Killed)")
    return None


main(beside=3)

# SPDX-License-Identifier: Apache-2.0
"""examples/survive under tutti run --survive: the count is right whichever call of whichever rank the death comes at. And store waits that a death ends."""
import os
import re
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
from cases import LIMIT, TUTTI, contains, equal, main, test  # noqa: E402

SURVIVE = os.path.join(os.environ["TEST_BUILD"], "examples", "survive")
TRAIN = os.path.join(os.environ["TEST_BUILD"], "tests", "support", "train")
RANKS, STEPS = 3, 5


def survive(fault, ranks=RANKS):
    done = subprocess.run([TUTTI, "run", "--survive", "-n", str(ranks), SURVIVE, str(STEPS)], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=LIMIT, env={**os.environ, "TUTTI_FAULT": fault})
    totals = {int(rank): int(total) for rank, total in
              re.findall(rf"rank (\d+): {STEPS} steps, total (\d+)$", done.stdout, re.M)}
    return done, totals


@test
def without_a_death_it_counts_to_the_end():
    done, totals = survive("")
    equal(done.returncode, 0)
    equal(totals, {rank: RANKS * STEPS for rank in range(RANKS)})


@test
def the_count_is_right_at_every_call_that_a_rank_may_die_in():
    for victim in range(RANKS):
        for step in range(STEPS):
            done, totals = survive(f"rank={victim},op=all_reduce,at={step},do=kill")
            equal(totals, {rank: RANKS * step + (RANKS - 1) * (STEPS - step) for rank in range(RANKS) if rank != victim})
            contains(done.stderr, f"rank {victim} (pid ")
            contains(done.stderr, "was killed by signal 9 (Killed); the others go on")
            equal(done.returncode, 0)  # some ended well


@test
def a_second_rank_may_die_while_the_others_agree_and_shrink():
    for operation in ("agree", "shrink"):
        _, totals = survive(f"rank=1,op=all_reduce,at=2,do=kill;rank=0,op={operation},do=exit:3", ranks=4)
        equal(totals, {2: 4 * 2 + 2 * 3, 3: 4 * 2 + 2 * 3})


@test
def a_rank_that_dies_when_all_are_done_takes_nothing_back():
    _, totals = survive("rank=2,op=agree,do=kill")
    equal(totals, {0: RANKS * STEPS, 1: RANKS * STEPS})


@test
def a_job_of_one_host_goes_on_where_the_page_of_the_launcher_was_closed_on_the_way():
    closed = ["sh", "-c", f'exec 4<&-; exec "{SURVIVE}" {STEPS}']
    done = subprocess.run([TUTTI, "run", "--survive", "-n", str(RANKS), *closed], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=LIMIT, env={**os.environ, "TUTTI_FAULT": "rank=1,op=all_reduce,at=2,do=kill"})
    equal(sorted(re.findall(rf"rank (\d+): {STEPS} steps, total (\d+)$", done.stdout, re.M)), [("0", "12"), ("2", "12")])
    contains(done.stderr, "holds no news of the launcher")
    equal(done.returncode, 0)


@test
def a_death_ends_the_waits_of_a_launched_job_on_its_store():
    job = os.path.join(os.environ["TEST_BUILD"], "tests", "support", "job")
    done = subprocess.run([TUTTI, "run", "--survive", "-q", "-n", "4", job, "store"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=LIMIT)
    for rank in (0, 2, 3):
        assert re.search(rf"^rank {rank} heard TUTTI_ERROR_DEAD: rank 1 \(pid \d+\) was killed by signal 9", done.stdout, re.M), done.stdout + done.stderr


@test
def a_rank_that_dies_before_it_opens_its_world_is_not_waited_for():
    done = subprocess.run([TUTTI, "run", "--survive", "-n", "3", "sh", "-c", f"[ $TUTTI_RANK = 1 ] && kill -9 $$; exec {TRAIN}"], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=LIMIT, env={**os.environ, "TUTTI_TIMEOUT": "1000"})
    for rank in (0, 2):  # by itself, or from the other one, which gave up
        assert re.search(rf"^\[{rank}\] rank -1 ends: .*rank 1 on \S+ \(pid \d+\) was killed by signal 9", done.stdout, re.M), done.stdout + done.stderr


main()

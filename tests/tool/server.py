# SPDX-License-Identifier: Apache-2.0
"""examples/server under tutti run --refill: it loses workers, answers every request, and is whole again."""
import os
import re
import signal
import subprocess
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
from cases import LIMIT, TUTTI, contains, equal, main, test  # noqa: E402

SERVER = os.path.join(os.environ["TEST_BUILD"], "examples", "server")
if not os.path.exists(SERVER):
    print("skipped: the examples were not built")
    sys.exit(77)


def right(x):
    return sum(((output * 7 + column * 3) % 11) / 16 * x for output in range(64) for column in range(256))


class Server:
    def __init__(self, ranks, refills, command=(SERVER,)):
        how = ["--refill", str(refills)] if refills else ["--survive"]
        self.process = subprocess.Popen([TUTTI, "run", "-n", str(ranks), *how, *command], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=1)
        self.pids, self.errors, self.changed = {}, [], threading.Condition()
        threading.Thread(target=self.read_errors, daemon=True).start()

    def read_errors(self):
        for line in self.process.stderr:
            found = re.search(r"rank (\d+) is pid (\d+)", line)
            with self.changed:
                self.errors.append(line)
                if found:
                    self.pids.setdefault(int(found[1]), []).append(int(found[2]))
                self.changed.notify_all()

    def pid(self, rank, number=0):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.pids.get(rank, [])) > number, LIMIT), "".join(self.errors)
            return self.pids[rank][number]

    def ask(self, x):
        self.process.stdin.write(f"{x}\n")
        line = self.process.stdout.readline()
        found = re.search(r"request \d+: ([-0-9.e+]+), answered by (\d+) of (\d+) ranks", line)
        assert found, line + "".join(self.errors)
        return float(found[1]), int(found[2])

    def end(self):
        self.process.stdin.close()
        return self.process.wait(LIMIT)


def is_right(answer, x):
    assert abs(answer - right(x)) <= 1e-4 * abs(right(x)), f"{answer} is not {right(x)}"


@test
def a_pool_that_loses_nobody_answers():
    server = Server(3, 1)
    for x in (1, 2.5, -3):
        answer, ranks = server.ask(x)
        is_right(answer, x)
        equal(ranks, 3)
    equal(server.end(), 0)


@test
def a_worker_that_dies_between_requests_is_replaced_and_every_request_is_answered():
    server = Server(3, 4)
    is_right(server.ask(1)[0], 1)
    for number in range(2):
        os.kill(server.pid(2, number), signal.SIGKILL)
        is_right(server.ask(2)[0], 2)
        server.pid(2, number + 1)
        answer, ranks = server.ask(3)
        is_right(answer, 3)
        equal(ranks, 3)
    equal(server.end(), 0)
    contains("".join(server.errors), "takes its place")


@test
def the_lowest_worker_may_die_too_while_the_pool_is_idle():
    server = Server(3, 4)
    is_right(server.ask(1)[0], 1)
    os.kill(server.pid(1), signal.SIGKILL)
    server.pid(1, 1)  # nobody asked for anything: the pool heals by itself
    answer, ranks = server.ask(4)
    is_right(answer, 4)
    equal(ranks, 3)
    equal(server.end(), 0)


@test
def two_workers_that_die_together_are_replaced():
    server = Server(4, 4)
    is_right(server.ask(1)[0], 1)
    for rank in (1, 3):
        os.kill(server.pid(rank), signal.SIGKILL)
    for rank in (1, 3):
        server.pid(rank, 1)
    answer, ranks = server.ask(5)
    is_right(answer, 5)
    equal(ranks, 4)
    equal(server.end(), 0)


@test
def rank_0_may_die_too():
    server = Server(3, 4)
    is_right(server.ask(1)[0], 1)
    os.kill(server.pid(0), signal.SIGKILL)
    server.pid(0, 1)
    answer, ranks = server.ask(6)
    is_right(answer, 6)
    equal(ranks, 3)
    equal(server.end(), 0)


@test
def a_newcomer_that_dies_before_it_has_joined_is_replaced_by_the_next_one():
    server = Server(3, 4, ("sh", "-c", 'case "$TUTTI_REFILL" in 1) exit 7 ;; 2) kill -9 $$ ;; esac; exec "$0"', SERVER))
    is_right(server.ask(1)[0], 1)
    os.kill(server.pid(2), signal.SIGKILL)
    server.pid(2, 1)  # the third newcomer: the first two were no ranks yet
    answer, ranks = server.ask(7)
    is_right(answer, 7)
    equal(ranks, 3)
    equal(server.end(), 0)
    errors = "".join(server.errors)
    contains(errors, "takes its place")  # of newcomers that end at once the launcher may tell the last one alone
    assert "timeout" not in errors, errors


@test
def a_pool_whose_newcomers_are_used_up_is_told_so_and_goes_on():
    server = Server(3, 1)
    is_right(server.ask(1)[0], 1)
    os.kill(server.pid(2), signal.SIGKILL)
    server.pid(2, 1)
    equal(server.ask(2)[1], 3)
    os.kill(server.pid(2, 1), signal.SIGKILL)
    while server.ask(3)[1] == 3:  # it was answered before the death was seen
        pass
    answer, ranks = server.ask(4)
    is_right(answer, 4)
    equal(ranks, 2)
    equal(server.end(), 0)
    errors = "".join(server.errors)
    contains(errors, "nobody will take the place of rank 2, which died: --refill 1 is used up: 1 newcomer was started")
    assert "timeout" not in errors, errors


@test
def a_pool_that_was_started_without_newcomers_is_told_so_and_goes_on():
    server = Server(3, 0)
    is_right(server.ask(1)[0], 1)
    os.kill(server.pid(1), signal.SIGKILL)
    while server.ask(3)[1] == 3:
        pass
    equal(server.ask(4)[1], 2)
    equal(server.end(), 0)
    contains("".join(server.errors), "start it with `tutti run --refill N`")


main()

# SPDX-License-Identifier: Apache-2.0
"""tutti ps and tutti trace on jobs that hang or fail on purpose: what they show is what a person needs to know."""
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
from cases import LIMIT, TUTTI, children_of, contains, equal, main, test, wait_for  # noqa: E402

MISMATCH = 14  # TUTTI_ERROR_MISMATCH
TIMEOUT = 11  # TUTTI_ERROR_TIMEOUT
JOB = os.path.join(os.environ["TEST_BUILD"], "tests", "support", "job")


def tutti(*arguments):
    done = subprocess.run([TUTTI, *arguments], capture_output=True, text=True, errors="replace", timeout=LIMIT)
    return done.returncode, done.stdout, done.stderr


class Running:
    """A job under tutti run, found among the jobs of this user by the pids of its ranks."""

    def __init__(self, scenario, ranks=3, options=()):
        self.process = subprocess.Popen([TUTTI, "run", "-n", str(ranks), *options, JOB, scenario], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.ranks = ranks

    def pids(self):
        return [rank for guardian in children_of(self.process.pid) for rank in children_of(guardian)]

    def look(self):
        """What tutti ps knows of this job; None when it is not there yet."""
        _, output, _ = tutti("ps", "--json")
        pids = set(self.pids())
        for job in json.loads(output):
            if pids and {rank["pid"] for rank in job["ranks"]} & pids:
                return job
        return None

    def wait_until(self, condition, what):
        """Waits until condition(job) holds; returns the job."""
        found = []

        def check():
            job = self.look()
            found[:] = [job]
            return job is not None and condition(job)
        wait_for(check, what)
        return found[0]

    def hung(self, waiting, what):
        """Waits until the given ranks have been in an operation for more than a second, and it is known for whom."""
        return self.wait_until(lambda job: all(job["ranks"][rank].get("current", {}).get("for_ns", 0) > 1.1e9 and job["ranks"][rank]["waits_for"]
                                               for rank in waiting), what)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@test
def ranks_that_wait_are_shown_with_whom_they_wait_for():
    with Running("skip") as running:
        job = running.hung((0, 2), "ranks 0 and 2 to wait")
        for rank in (0, 2):
            shown = job["ranks"][rank]
            equal(shown["waits_for"], [1])
            equal((shown["current"]["operation"], shown["current"]["sequence"], shown["current"]["group"]), ("all_reduce", 3, "0"))
            equal((shown["current"]["dtype"], shown["current"]["reduction"], shown["current"]["count"]), ("f32", "sum", 4))
        late = job["ranks"][1]
        assert "current" not in late, late
        equal((late["last"]["operation"], late["last"]["sequence"], late["last"]["status"]), ("all_reduce", 2, "TUTTI_OK"))
        equal(late["waits_for"], [])
        equal(late["counters"]["all_reduce"]["calls"], 2)
        equal(late["counters"]["all_reduce"]["bytes"], 2 * 4 * 4)
        equal(sorted(rank["pid"] for rank in job["ranks"]), sorted(running.pids()))


@test
def the_table_for_people_has_a_line_per_rank():
    with Running("skip") as running:
        job = running.hung((0, 2), "ranks 0 and 2 to wait")
        status, output, _ = tutti("ps", "--counters", job["job"][:8])
        equal(status, 0)
        for rank in (0, 2):
            assert re.search(rf"^ +{rank} +\d+ (runs|sleeps) +\d+ +all_reduce 3 of group 0 \(f32 sum, 4 elements\) +\d.* s  1$", output,
                             re.M), output
        assert re.search(r"^ +1 +\d+ sleeps +\d+ +- all_reduce 2 of group 0 .* ended .* ago", output, re.M), output
        assert re.search(r"^ +all_reduce +6 +0 +96 ", output, re.M), output


@test
def a_rank_that_computes_is_told_from_one_that_sleeps():
    with Running("compute") as running:
        job = running.hung((0, 2), "ranks 0 and 2 to wait")
        equal(job["ranks"][1]["state"], "runs")
        status, output, _ = tutti("trace", job["job"])
        equal(status, 1)
        assert re.search(r"rank 1 did not come to all_reduce 3 of group 0 \(f32 sum, 4 elements\), for which rank [02] has been waiting "
                         r"[\d.]+ s: rank 1 \(pid \d+\) is computing on CPU \d+, in no operation of Tutti", output), output


@test
def a_stopped_rank_is_shown_as_stopped():
    with Running("stop") as running:
        job = running.hung((0, 2), "ranks 0 and 2 to wait")
        equal(job["ranks"][1]["state"], "stopped")
        contains(tutti("trace", job["job"])[1], "is stopped by a signal or a debugger")


@test
def ranks_that_use_two_groups_in_another_order_wait_for_each_other():
    with Running("groups", ranks=2) as running:
        job = running.hung((0, 1), "both ranks to wait")
        equal([rank["waits_for"] for rank in job["ranks"]], [[1], [0]])
        equal([rank["current"]["group"] for rank in job["ranks"]], ["data", "tensor"])
        status, output, _ = tutti("trace", job["job"])
        equal(status, 1)
        assert re.search(r"rank 1 did not come to barrier 1 of group data.*rank 1 \(pid \d+\) is in barrier 1 of group tensor", output) or \
            re.search(r"rank 0 did not come to barrier 1 of group tensor.*rank 0 \(pid \d+\) is in barrier 1 of group data", output), output


@test
def swapped_calls_are_named_on_both_sides_after_the_job_has_failed():
    with tempfile.TemporaryDirectory() as folder:
        status, _, error = tutti("run", "-n", "3", "--log-dir", folder, JOB, "order")
        equal(status, 3)
        contains(error, f'"tutti trace {folder}" shows what the ranks did')
        status, output, _ = tutti("trace", folder)
        equal(status, 1)
        # A rank that came after the group had ended made no call.
        assert re.search(r"The first divergence: (rank 0|rank 2|ranks 0 and 2) called all_reduce 3 of group 0 \(f32 sum, 4 elements\), "
                         r"rank 1 called barrier 3 of group 0\.", output) or \
            re.search(r"The first divergence: rank 1 called barrier 3 of group 0, rank 2 called all_reduce 3 of group 0", output), output


@test
def a_killed_rank_is_the_first_divergence_of_the_files_it_left():
    with tempfile.TemporaryDirectory() as folder:
        status, _, error = tutti("run", "-n", "3", "--log-dir", folder, JOB, "kill")
        equal(status, 128 + signal.SIGKILL)
        assert re.search(r"^tutti run: rank 1 \(pid \d+\) was killed by signal 9 \(Killed\)$", error, re.M), error
        assert error.index("tutti run: rank 1") < error.index("tutti run: then ranks 0 and 2"), error
        status, output, _ = tutti("trace", "--list", folder)
        equal(status, 1)
        # By which signal stands there when its parent had said so before the last of the others wrote.
        # A survivor that was late saw the death before it came there itself.
        assert re.search(r"The first divergence: (rank 1|ranks 0 and 1|ranks 1 and 2) did not come to all_reduce 3 of group 0 .*rank 1 \(pid \d+\) "
                         r"(was killed by signal 9 \(Killed\)|died)", output), output
        assert re.search(r"all_reduce 3 of group 0 \(f32 sum, 4 elements\): TUTTI_ERROR_DEAD", output), output


@test
def a_wrong_tag_is_told_with_the_message_that_was_not_received():
    with tempfile.TemporaryDirectory() as folder:
        equal(tutti("run", "-n", "2", "--log-dir", folder, JOB, "tags")[0], 3)
        status, output, _ = tutti("trace", folder)
        equal(status, 1)
        expected = [rf"The first divergence: rank {rank} waited [\d.]+ [mu]?s in recv \d of group 0 \(i32, 5 elements, from rank {1 - rank}, tag {tag}\), "
                    rf"which failed \(TUTTI_ERROR_\w+\): rank {1 - rank} has not sent such a message; "
                    rf"what it has not received: with tag {other} \(3 elements of i32\)" for rank, tag, other in ((0, 5, 7777), (1, 7777, 5))]
        assert any(re.search(one, output) for one in expected), output


@test
def a_receive_for_which_nobody_sends_is_the_first_divergence():
    with Running("silent") as running:
        job = running.hung((2,), "rank 2 to wait")
        status, output, _ = tutti("trace", job["job"])
        equal(status, 1)
        assert re.search(r"rank 2 has been waiting [\d.]+ s in recv \d of group 0 \(i32, 5 elements, from rank 1, tag 5\): "
                         r"rank 1 has not sent such a message; rank 1 \(pid \d+\) is asleep, in no operation of Tutti", output), output


@test
def a_receive_from_a_rank_that_left_is_told_with_that_rank():
    with tempfile.TemporaryDirectory() as folder:
        equal(tutti("run", "-n", "3", "--log-dir", folder, JOB, "leave")[0], 3)
        status, output, _ = tutti("trace", folder)
        equal(status, 1)
        assert re.search(r"The first divergence: rank \d waited .* in recv \d of group 0 \(i32, 5 elements, from rank \d, tag 5\), which failed", output), output


@test
def messages_that_nobody_received_are_listed():
    with Running("unread", ranks=2) as running:
        job = running.wait_until(lambda job: all(rank.get("last", {}).get("operation") == "barrier" for rank in job["ranks"]),
                                 "all ranks to pass the barrier")
        status, output, _ = tutti("trace", job["job"])
        equal(status, 0)
        contains(output, "In group 0 2 messages were not received when the recorders were copied: from rank 0 to rank 1 with tag 9 (1 element of i32), "
                 "from rank 1 to rank 0 with tag 9 (1 element of i32)")


def write_recorder(folder, rank, first, messages, **different):
    """A recorder of which the first operation that it still has is `first`; `messages`: operation, other rank."""
    entries = [{"id": first + i, "group": "7", "operation": operation, "sequence": first + i, "count": 1, "dtype": "f32", "root": root, "tag": 3,
                "created_ns": i, "ended_ns": i + 1, "state": "completed", "status": 0, **different} for i, (operation, root) in enumerate(messages)]
    document = {"tutti_flight_recorder": 1, "job": "abc", "world": "w", "rank": rank, "size": 3, "pid": 10 + rank, "state": "alive", "written_ns": 10 ** 9,
                "groups": [{"key": "7", "name": "0", "size": 3, "ranks": [0, 1, 2]}], "entries": entries}
    with open(os.path.join(folder, f"{rank}.json"), "w") as file:
        json.dump(document, file)


@test
def a_recorder_that_forgot_or_is_missing_makes_no_message_unreceived():
    many = [("send", 2)] * 64
    with tempfile.TemporaryDirectory() as folder:
        write_recorder(folder, 0, 1, [("send", 1), ("send", 1)])
        write_recorder(folder, 1, 1, [("recv", 0)] + many)
        write_recorder(folder, 2, 1, [("recv", 1)] * 64)
        contains(tutti("trace", folder)[1], "In group 0 1 message was not received when the recorders were copied: from rank 0 to rank 1 with tag 3")
        write_recorder(folder, 1, 2, many)  # of what it received from rank 0 it knows nothing any more
        status, output, _ = tutti("trace", folder)
        equal(status, 0)
        assert "not received" not in output, output
        contains(output, "messages are paired only where they go back to the first")
        os.unlink(os.path.join(folder, "1.json"))
        assert "not received" not in tutti("trace", folder)[1], output


@test
def what_a_rank_sent_whose_recorder_forgot_or_is_missing_is_not_known():
    with tempfile.TemporaryDirectory() as folder:
        write_recorder(folder, 0, 1, [("send", 2)])
        write_recorder(folder, 1, 1, [("recv", 0)], status=TIMEOUT)
        write_recorder(folder, 2, 1, [("recv", 0)])
        contains(tutti("trace", folder)[1], "rank 0 has not sent such a message; rank 0 (pid 10)")
        write_recorder(folder, 0, 5, [("send", 2)] * 64)
        contains(tutti("trace", folder)[1], "rank 0 has not sent such a message, as far back as its recorder goes")
        os.unlink(os.path.join(folder, "0.json"))
        status, output, _ = tutti("trace", folder)
        equal(status, 1)
        contains(output, "whether rank 0 has sent such a message is not known, its recorder is not here")
        assert "has not sent" not in output, output
        write_recorder(folder, 1, 1, [("recv", -1)], status=TIMEOUT)
        contains(tutti("trace", folder)[1], "nobody has sent such a message of which a recorder knows that is here")


@test
def arrows_begin_and_end_where_a_recorder_is():
    def arrows(folder):
        path = os.path.join(folder, "trace.out")
        equal(tutti("trace", "-o", path, folder)[0], 0)
        events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
        os.unlink(path)
        return sorted((event["ph"], event["pid"]) for event in events if event["ph"] in "sf")

    with tempfile.TemporaryDirectory() as folder:
        write_recorder(folder, 0, 1, [("send", 1), ("send", 2)])
        write_recorder(folder, 1, 1, [("recv", 0), ("recv", 2)])
        write_recorder(folder, 2, 1, [("send", 1), ("recv", 0)])
        equal(arrows(folder), [("f", 1), ("f", 1), ("f", 2), ("s", 0), ("s", 0), ("s", 2)])
        os.unlink(os.path.join(folder, "0.json"))  # the lanes that are left: rank 1 is the first, rank 2 the second
        equal(arrows(folder), [("f", 0), ("s", 1)])


@test
def a_message_that_does_not_fit_is_told_as_sent():
    with tempfile.TemporaryDirectory() as folder:
        write_recorder(folder, 0, 1, [("send", 1)], count=10)
        write_recorder(folder, 1, 1, [("recv", 0)], count=4, status=MISMATCH)
        status, output, _ = tutti("trace", folder)
        equal(status, 1)
        contains(output, "which failed (TUTTI_ERROR_MISMATCH): rank 0 sent 10 elements of f32. A message must fit into its receive")
        assert "has not sent" not in output, output


@test
def ranks_that_agree_have_no_divergence():
    with Running("wait") as running:
        job = running.wait_until(lambda job: all(rank.get("last", {}).get("operation") == "barrier" for rank in job["ranks"]),
                                 "all ranks to pass the barrier")
        status, output, _ = tutti("trace", job["job"])
        equal(status, 0)
        contains(output, "The ranks made the same calls in the same order")


@test
def the_trace_opens_as_chrome_expects_it():
    with Running("wait") as running, tempfile.TemporaryDirectory() as folder:
        job = running.wait_until(lambda job: all(rank.get("last", {}).get("operation") == "barrier" for rank in job["ranks"]),
                                 "all ranks to pass the barrier")
        path = os.path.join(folder, "trace.json")
        equal(tutti("trace", "-o", path, job["job"])[0], 0)
        events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
        names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
        equal(len(names), 3)
        slices = [event for event in events if event["ph"] == "X"]
        equal(len(slices), 3 * 4)
        equal([event["name"] for event in slices if event["pid"] == 0], ["all_reduce"] * 3 + ["barrier"])
        equal(min(event["ts"] for event in slices), 0)  # times count from the first operation
        for event in slices:
            assert event["dur"] >= 0 and event["ts"] < LIMIT * 1e6, event  # counters of some processors step by many cycles
        reduction = next(event["args"] for event in slices if event["name"] == "all_reduce")
        equal((reduction["count"], reduction["bytes"]), (4, 16))
        assert re.fullmatch("[a-z_]+", reduction["algorithm"]), reduction


@test
def operations_at_a_time_have_their_own_tracks_and_messages_an_arrow():
    with Running("messages") as running, tempfile.TemporaryDirectory() as folder:
        job = running.wait_until(lambda job: all(rank.get("last", {}).get("operation") == "barrier" for rank in job["ranks"]),
                                 "all ranks to pass the barrier")
        path = os.path.join(folder, "trace.json")
        equal(tutti("trace", "-o", path, job["job"])[0], 0)
        events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
        slices = [event for event in events if event["ph"] == "X"]
        for one in slices:
            for other in slices:
                if one is not other and (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
                    assert one["ts"] + one["dur"] <= other["ts"] + 0.002 or other["ts"] + other["dur"] <= one["ts"] + 0.002, (one, other)
        ends = {event["id"]: event for event in events if event["ph"] == "f"}
        begins = {event["id"]: event for event in events if event["ph"] == "s"}
        equal((len(begins), sorted(begins)), (6, sorted(ends)))
        for number, begin in begins.items():
            end = ends[number]
            equal(end["pid"], (begin["pid"] + 1) % 3)
            for event, name in ((begin, "send"), (end, "recv")):
                under = [one["name"] for one in slices if (one["pid"], one["tid"]) == (event["pid"], event["tid"]) and
                         one["ts"] <= event["ts"] <= one["ts"] + one["dur"]]
                assert name in under, (event, under)


@test
def looking_disturbs_nobody():
    with Running("wait") as running:
        job = running.wait_until(lambda job: all(rank.get("last", {}).get("operation") == "barrier" for rank in job["ranks"]),
                                 "all ranks to pass the barrier")
        def descriptors():
            return [sorted(os.listdir(f"/proc/{pid}/fd")) for pid in running.pids()]
        before = descriptors()
        for _ in range(5):
            tutti("ps"), tutti("trace")
        equal(descriptors(), before)
        equal(running.look()["job"], job["job"])


@test
def watching_repeats():
    with Running("wait") as running:
        running.wait_until(lambda job: len(job["ranks"]) == 3, "the job")
        watching = subprocess.Popen([TUTTI, "ps", "--watch=50ms"], stdout=subprocess.PIPE, text=True)
        seen = 0
        for line in watching.stdout:
            seen += line.startswith("job ")
            if seen == 3:
                break
        watching.kill()
        watching.communicate()
        equal(seen, 3)


@test
def an_ordinary_user_runs_jobs_and_sees_only_its_own():
    if os.geteuid() != 0:
        return "not root: every other test runs as an ordinary user"
    nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    if subprocess.run(["test", "-x", TUTTI], **nobody).returncode != 0:
        return "an ordinary user cannot reach the build folder"
    with Running("wait") as running:
        job = running.wait_until(lambda job: len(job["ranks"]) == 3, "the job of root")
        done = subprocess.run([TUTTI, "run", "-q", "-n", "2", JOB, "well"], capture_output=True, text=True, timeout=LIMIT, **nobody)
        equal((done.returncode, done.stdout, done.stderr), (0, "", ""))
        done = subprocess.run([TUTTI, "ps"], capture_output=True, text=True, timeout=LIMIT, **nobody)
        assert job["job"] not in done.stdout, done.stdout


@test
def what_is_no_job_and_no_recorder_is_said_so():
    status, _, error = tutti("trace", "no-such-job")
    equal(status, 1)
    contains(error, "neither a file nor the id of a running job")
    status, output, _ = tutti("ps", "no-such-job")
    equal(status, 1)
    contains(output, "no-such-job")
    with tempfile.TemporaryDirectory() as folder:
        equal(tutti("trace", folder)[0], 1)
        for text, part in (("{", "is not JSON: line 1"), ("[1, 2]", "is not a flight recorder"), ("{}", "is not a flight recorder"),
                           ('{"tutti_flight_recorder": 99}', "another version"), ('{"a": "' + "\\ud800" * 10, "is not JSON"),
                           ("[" * 100000, "nested too deeply"), ("", "is not JSON")):
            path = pathlib.Path(folder, "bad.json")
            path.write_text(text)
            status, _, error = tutti("trace", str(path))
            equal(status, 1)
            contains(error, part)


@test
def a_damaged_file_is_never_more_than_an_error():
    seed = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        tutti("run", "-n", "3", "--log-dir", folder, JOB, "kill")
        good = next(path for path in sorted(pathlib.Path(folder).glob("tutti-*.json"))).read_bytes()
        bad = pathlib.Path(folder, "bad.json")
        for _ in range(150):
            text = bytearray(good)
            for _ in range(seed.randint(1, 4)):
                at = seed.randrange(len(text) or 1)
                what = seed.randrange(4)
                if what == 0:
                    text[at:at + 1] = bytes([seed.randrange(256)])
                elif what == 1:
                    del text[at:at + seed.randint(1, 40)]
                elif what == 2:
                    text[at:at] = seed.choice([b"-", b"9" * 25, b'"', b"{", b"[[", b"\\u", b"null", b"1e999"])
                else:
                    text = text[:at + 1]
            bad.write_bytes(text)
            status, _, error = tutti("trace", "-o", "-" if seed.random() < 0.5 else "/dev/null", "--list", str(bad))
            assert status in (0, 1) and "Sanitizer" not in error and "runtime error" not in error, (status, error, bytes(text))


main()

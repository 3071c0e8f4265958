# SPDX-License-Identifier: Apache-2.0
"""PyTorch on the other end: its clients with our server, our client with its servers, and both on one file."""
import datetime
import os
import subprocess
import sys
import tempfile
import threading
import traceback

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from torch_python import with_torch  # noqa: E402

with_torch("torch.distributed")
import torch.distributed as dist  # noqa: E402

BUILD = os.environ.get("TEST_BUILD", os.path.join(os.path.dirname(__file__), "../../build/release"))
PROGRAM = os.path.join(BUILD, "tests/support/store_shell")
TIMEOUT = datetime.timedelta(seconds=20)
SHORT = datetime.timedelta(milliseconds=100)


class Shell:
    """Our store, in a process of its own."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen([PROGRAM, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self.answer().split()[1])

    def answer(self):
        return self.process.stdout.readline().rstrip("\n")

    def ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def do(self, *words):
        self.ask(*words)
        answer = self.answer()
        assert answer.startswith("ok "), f"{words}: {answer}"
        return answer[3:]

    def fails(self, *words):
        self.ask(*words)
        answer = self.answer()
        assert answer.startswith("error "), f"{words}: {answer}"
        return answer[6:]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        assert self.process.wait(20) == 0


def equal(left, right):
    assert left == right, f"{left!r} is not {right!r}"


def raises(kind, fragment, function, *arguments):
    try:
        function(*arguments)
    except kind as error:
        assert fragment in str(error), f"{error} does not contain {fragment}"
        return
    raise AssertionError(f"{function} raised nothing")


def exchange(theirs, ours, queues=True):
    """Every operation, each side seeing what the other did. What has no reply is followed by a question on the same connection."""
    theirs.set("a", "one")
    equal(ours.do("get", "a", 5000), "one")
    ours.do("set", "b", "two")
    equal(theirs.get("b"), b"two")
    equal(theirs.add("n", 5), 5)
    equal(ours.do("add", "n", -7), "-2")
    equal(theirs.get("n"), b"-2")
    equal(theirs.compare_set("a", "one", "three"), b"three")
    equal(ours.do("compare_set", "a", "one", "four"), "three")
    equal(ours.do("compare_set", "missing", "x", "y"), "x")
    equal(theirs.compare_set("missing", "x", "y"), b"x")
    equal(ours.do("compare_set", "fresh", "~", "new"), "new")
    equal(theirs.get("fresh"), b"new")
    equal(theirs.check(["a", "b"]), True)
    equal(ours.do("check", "a", "nothing"), "0")
    theirs.wait(["a", "n"], TIMEOUT)
    ours.do("wait", 5000, "a", "b", "n")
    ours.do("append", "a", "+")
    ours.do("num_keys")
    theirs.append("a", "-")
    theirs.num_keys()
    equal(ours.do("get", "a", 5000), "three+-")
    theirs.multi_set(["m1", "m2"], ["x", "y"])
    equal(ours.do("multi_get", "m2", "m1"), "y x")
    ours.do("multi_set", "m1", "p", "m2", "q")
    ours.do("num_keys")
    equal(theirs.multi_get(["m1", "m2"]), [b"p", b"q"])
    equal(theirs.num_keys(), int(ours.do("num_keys")))
    equal(theirs.delete_key("m1"), True)
    equal(ours.do("delete", "m1"), "0")
    equal(ours.do("delete", "m2"), "1")
    equal(theirs.delete_key("m2"), False)
    if queues:
        theirs.queue_push("q", "1")
        equal(theirs.queue_len("q"), 1)
        ours.do("push", "q", "2")
        equal(ours.do("length", "q"), "2")
        theirs.queue_push("q", "3")
        equal(theirs.queue_len("q"), 3)
        equal(ours.do("length", "q"), "3")
        equal(ours.do("pop", "q", 5000), "1")
        equal(theirs.queue_pop("q"), b"2")
        equal(theirs.queue_len("q"), 1)
        equal(ours.do("pop", "q", 0), "3")
        assert "TUTTI_ERROR_EMPTY" in ours.fails("pop", "q", 0)
        raises(dist.QueueEmptyError, "empty", theirs.queue_pop, "q", False)
        # A blocked pop on either side is woken by the other.
        ours.ask("pop", "late", 10000)
        theirs.queue_push("late", "theirs")
        equal(ours.answer(), "ok theirs")
        popped = []
        waiting = threading.Thread(target=lambda: popped.append(theirs.clone().queue_pop("later")))
        waiting.start()
        ours.do("push", "later", "ours")
        waiting.join(20)
        equal(popped, [b"ours"])
        equal(sorted(ours.do("list_keys").split()), sorted(["a", "b", "n", "fresh"]))
        equal(sorted(theirs.list_keys()), sorted(["a", "b", "n", "fresh"]))


def waits(theirs, ours):
    """Waits that are ended by the other side, and waits that nobody ends."""
    ours.ask("get", "from-them", 10000)
    theirs.set("from-them", "came")
    equal(ours.answer(), "ok came")
    got = []
    waiting = threading.Thread(target=lambda: got.append(theirs.clone().get("from-us")))
    waiting.start()
    ours.do("set", "from-us", "came")
    waiting.join(20)
    equal(got, [b"came"])
    raises(dist.DistStoreError, "wait timeout after 100ms, keys: /the_key", theirs.wait, ["the_key"], SHORT)
    theirs.set("the_key", "there")  # still usable
    equal(theirs.get("the_key"), b"there")
    answer = ours.fails("get", "our_key", 100)
    assert "TUTTI_ERROR_TIMEOUT" in answer and "wait timeout after 100ms, keys: /our_key" in answer, answer
    ours.do("set", "our_key", "there")
    equal(ours.do("get", "our_key", 5000), "there")


def barriers(theirs, ours):
    if not hasattr(theirs, "barrier"):
        return  # an older PyTorch, whose servers know no barriers either
    ours.ask("barrier", "meet", 2, 10000)
    theirs.barrier("meet", 2, TIMEOUT)
    equal(ours.answer(), "ok ")
    answer = ours.fails("barrier", "alone", 2, 100)
    assert "TUTTI_ERROR_TIMEOUT" in answer and "barrier timeout" in answer, answer
    equal(ours.do("add", "after", 1), "1")


def their_client_with_our_server():
    with Shell("server") as ours:
        theirs = dist.TCPStore("localhost", ours.port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
        exchange(theirs, ours)
        waits(theirs, ours)
        barriers(theirs, ours)
        prefixed = dist.PrefixStore("part", theirs)
        prefixed.set("k", "v")
        equal(ours.do("get", "part/k", 5000), "v")
        large = "x" * (8 << 20)
        theirs.set("large", large)
        equal(theirs.get("large"), large.encode())
        clients = [dist.TCPStore("127.0.0.1", ours.port, is_master=False, timeout=TIMEOUT, wait_for_workers=False) for _ in range(20)]
        equal([client.add("clients", 1) for client in clients], list(range(1, 21)))


def our_client_with_their_server(libuv):
    theirs = dist.TCPStore("localhost", 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False, use_libuv=libuv)
    with Shell("client", theirs.port) as ours:
        exchange(theirs, ours, queues=libuv)
        waits(theirs, ours)
        if libuv:
            barriers(theirs, ours)
        theirs.set("word", "no number")
        assert "TUTTI_ERROR_STORE" in ours.fails("add", "word", 1)  # their server drops us, and we come back
        equal(ours.do("get", "word", 5000), "no number")


def our_client_with_their_event_loop():
    our_client_with_their_server(True)


def our_client_with_their_poll_loop():
    our_client_with_their_server(False)


def both_on_one_file():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        theirs = dist.FileStore(path, 2)
        theirs.set_timeout(TIMEOUT)
        with Shell("file", path, 2) as ours:
            theirs.set("a", "one")
            equal(ours.do("get", "a", 5000), "one")
            ours.do("set", "b", "two")
            equal(theirs.get("b"), b"two")
            equal(theirs.add("n", 5), 5)
            equal(ours.do("add", "n", 2), "7")
            equal(theirs.compare_set("a", "one", "three"), b"three")
            equal(ours.do("get", "a", 5000), "three")
            ours.do("delete", "a")
            equal(theirs.check(["a"]), False)
            theirs.delete_key("b")
            equal(ours.do("check", "b"), "0")
            equal(theirs.num_keys(), int(ours.do("num_keys")))
            ours.ask("get", "late", 10000)
            theirs.set("late", "came")
            equal(ours.answer(), "ok came")
        assert os.path.exists(path)
        del theirs
        assert not os.path.exists(path), "the last of two handles removes the file"


passed = failed = 0
for case in (their_client_with_our_server, our_client_with_their_event_loop, our_client_with_their_poll_loop, both_on_one_file):
    try:
        case()
        print("ok     ", case.__name__, flush=True)
        passed += 1
    except Exception:
        traceback.print_exc()
        print("FAILED ", case.__name__, flush=True)
        failed += 1
print(f"{passed} passed, {failed} failed, 0 skipped")
sys.stdout.flush()
os._exit(1 if failed else 0)  # without their servers' threads having a say

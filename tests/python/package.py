#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package, with processes as ranks: collectives on buffers of all kinds, symmetric memory, works, batches, errors, deaths and Ctrl-C."""
import array
import ast
import copy
import ctypes
import os
import pathlib
import pickle
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
import harness  # noqa: E402
from harness import raises, run  # noqa: E402
import tutti  # noqa: E402
from tutti import buffers as buffers_module  # noqa: E402

try:
    import numpy
except ImportError:
    numpy = None


# ---- what ranks do ----

def buffers():
    with tutti.World() as world:
        group, rank, size = world.group, world.rank, world.size
        assert group.rank == rank and group.ranks == list(range(size)) and world.launcher == "options"
        x = array.array("f", [rank, 1])
        assert group.all_reduce(x) is x and list(x) == [sum(range(size)), size]
        y = bytearray(size)
        group.all_gather(bytes([rank]), out=y)
        assert list(y) == list(range(size))
        z = array.array("d", [rank] * 3)
        group.broadcast(z, root=1)
        assert list(z) == [1] * 3
        group.reduce(z, root=0, op="max")
        part = array.array("i", [0])
        group.reduce_scatter(array.array("i", range(size)), out=part)
        assert part[0] == rank * size
        group.scatter(array.array("q", range(size)) if rank == 0 else None, out=(one := array.array("q", [9])), root=0)
        assert one[0] == rank
        got = array.array("q", [0] * size)
        assert (group.gather(one, out=got, root=0) is got) == (rank == 0)
        group.all_to_all(array.array("i", [10 * rank + i for i in range(size)]), out=(moved := array.array("i", [0] * size)))
        assert list(moved) == [10 * i + rank for i in range(size)]
        group.permute(one, to=[(i + 1) % size for i in range(size)], out=(came := array.array("q", [0])))
        assert came[0] == (rank - 1) % size
        group.barrier()
        return rank


def messages():
    with tutti.World() as world:
        group, rank = world.group, world.rank
        got = array.array("i", [0])
        if rank == 0:
            group.send(array.array("i", [42]), to=1, tag=7)
        else:
            assert group.recv(got, source=0, tag=7)[0] == 42
        assert world.group is group
        with group.batch():
            group.send(array.array("i", [rank]), to=1 - rank)
            group.recv(got, source=1 - rank, tag=0)
        assert got[0] == 1 - rank
        work = group.all_reduce(array.array("d", [1.5]), wait=False)
        assert list(work.wait()) == [3] and work.done()
        store = world.store
        world.store.set(f"from {rank}", "hello")
        assert world.store.get(f"from {1 - rank}", timeout=60) == b"hello"
        assert world.store.add("counter") in (1, 2)
        assert world.store.delete(f"from {1 - rank}") and not world.store.delete("nothing")
        world.finish()
        raises(RuntimeError, store.get, "anything")


def awaited():
    import asyncio

    async def both(group):
        first, second = group.all_reduce(array.array("i", [1]), wait=False), group.all_reduce(array.array("i", [2]), wait=False)
        late = asyncio.ensure_future(_of(group.recv(array.array("i", [0]), source=1 - group.rank, tag=7, wait=False)))  # one that waits longer than the others
        await asyncio.sleep(0)
        many = await asyncio.gather(*[_of(group.all_reduce(array.array("i", [i]), wait=False)) for i in range(20)])
        assert [list(each) for each in many] == [[2 * i] for i in range(20)]
        group.send(array.array("i", [5]), to=1 - group.rank, tag=7)
        assert list(await late) == [5]
        return [list(await first), list(await second)]

    async def _of(work):
        return await work

    with tutti.World() as world:
        assert asyncio.run(both(world.group)) == [[2], [4]]


def symmetric():
    with tutti.World() as world:
        rank, size = world.rank, world.size
        memory = world.empty((2, 3), "i32")
        memory.array[:] = rank
        peers = memory.rendezvous()
        peers.barrier()
        beside = peers.array((rank + 1) % size)
        assert beside.shape == (2, 3) and (beside == (rank + 1) % size).all()
        peers.barrier()
        peers.put((rank + 1) % size, numpy.full(3, 100 + rank, "i4"), offset=12)
        peers.signal((rank + 1) % size)
        peers.wait_signal((rank - 1) % size)
        assert (memory.array[1] == 100 + (rank - 1) % size).all() and (memory.array[0] == rank).all()
        own = memory.array
        world.group.all_reduce(own[0])
        assert (own[0] == sum(range(size))).all()
        raises(tutti.Error, peers.array, 99)
        group = world.new_group([0, 1])
        assert (group is None) == (rank > 1)
        if group is not None:
            with group:
                assert group.all_gather(numpy.array([rank])).tolist() == [[0], [1]]
            raises(tutti.Error, group.barrier)
        world.group.barrier()
    assert (own[0] == sum(range(size))).all()  # memory outlives the world


def columns(group):
    """Elements that lie apart go by send and receive from where they lie to where they belong."""
    matrix, before = numpy.arange(24.0).reshape(4, 6) + 100 * group.rank, 100 * (1 - group.rank)
    theirs = numpy.arange(24.0).reshape(4, 6) + before
    for part in ((slice(None), 0), (slice(None), slice(1, 3)), (slice(None, None, 2),), (slice(None), slice(None, None, 3)), (slice(1, 3),)):
        out = numpy.zeros((4, 6))
        wanted = numpy.zeros((4, 6))
        wanted[part] = theirs[part]
        assert group.send_recv(matrix[part], 1 - group.rank, out[part], 1 - group.rank).shape == out[part].shape and (out == wanted).all(), part
        if group.rank == 0:
            group.send(matrix[part], to=1)
            assert (group.recv(numpy.empty(matrix[part].shape), source=1) == theirs[part]).all()  # one after the other here, and apart there
        else:
            out[:] = 0
            work = group.recv(out[part], source=0, wait=False, status=True)
            assert work.wait().count == out[part].size and (out == wanted).all()
            group.send(matrix[part], to=0)
    for strange in (matrix[::-1], matrix[:, ::-1], matrix.T, matrix[::2, ::2], numpy.broadcast_to(matrix[0], (3, 6)), numpy.zeros(4, [("a", "i4"), ("b", "i1")])["a"]):
        assert "not contiguous" in str(raises(ValueError, group.send, strange, 1 - group.rank)), strange.strides
    raises(ValueError, group.all_reduce, matrix[:, 0])  # which takes no columns


def factors(group):
    """premul_sum of types that only NumPy has, and factors that are its numbers."""
    for name in ("f8", "f4", "f2", "c8", "c16"):
        real = numpy.zeros(1, name).real.dtype
        for factor in (group.rank + 0.5, real.type(group.rank + 0.5), numpy.full(1, group.rank + 0.5, real)):
            assert group.all_reduce(numpy.full(3, 4, name), "premul_sum", factor=factor).tolist() == [8] * 3, (name, factor)
    raises(OverflowError, group.all_reduce, numpy.ones(1, "f2"), "premul_sum", factor=1e6)


def numpy_arrays():
    with tutti.World() as world:
        group = world.group
        columns(group)
        factors(group)
        for name in ("f8", "f4", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16"):
            x = numpy.full((2, 2), world.rank + 1, name)
            assert (group.all_reduce(x) == 3).all(), name
        flags = numpy.array([world.rank == 0])
        assert group.all_reduce(flags, op="max")[0]
        assert group.all_gather(numpy.ones((2, 3))).shape == (2, 2, 3)
        assert group.reduce_scatter(numpy.ones((4, 3))).tolist() == [[2] * 3] * 2
        raises(ValueError, group.all_reduce, numpy.ones((3, 3)).T[1:, :2])
        fixed = numpy.ones(3)
        fixed.flags.writeable = False
        raises(ValueError, group.all_reduce, fixed)
        raises(TypeError, group.all_reduce, "text")
        raises(TypeError, group.all_reduce, numpy.ones(2), out=numpy.ones(2, "i4"))
        raises(ValueError, group.all_reduce, numpy.ones(2), out=numpy.ones(3))
        raises(ValueError, group.all_reduce, numpy.ones(2), op="median")
        raises(tutti.TypeMismatchError, group.all_reduce, numpy.ones(2), op="bor")
        group.all_reduce(numpy.ones(0))
        raises(TypeError, group.all_reduce, numpy.ones(3, ">f4"))
        raises(ValueError, group.all_gather_v, numpy.ones(2), [2], out=numpy.ones(2))
        raises(ValueError, group.all_gather_v, numpy.ones(2), [3, 3], out=numpy.ones(6))
        for _ in range(20):  # works that nobody waits for write into no other array
            group.all_reduce(numpy.full(100000, 7.0), wait=False)
            fresh = numpy.zeros(100000)
            assert fresh.sum() == 0
        group.barrier()
        assert fresh.sum() == 0


def waits_beside_a_thread():
    """The thread lets rank 1 come once rank 0 is inside of its call, which nobody could see who needed the interpreter's lock for it."""
    with tutti.World() as world:
        group, x = world.group, array.array("i", [1])
        before = group.sequence

        def let_come():
            while group.sequence == before:
                time.sleep(0.001)
            world.store.set("come", "")
        if world.rank == 0:
            thread = threading.Thread(target=let_come)
            thread.start()
        else:
            world.store.wait("come", timeout=120)
        assert list(group.all_reduce(x, timeout=120)) == [2]
        if world.rank == 0:
            thread.join()


def mismatch():
    with tutti.World() as world:
        error = raises(tutti.MismatchError, world.group.all_reduce, array.array("f", [1] * (2 + world.rank)))
        assert error.status == "MISMATCH" and error.operation == "all_reduce" and isinstance(pickle.loads(pickle.dumps(error)), tutti.MismatchError)


def late():
    with tutti.World() as world:
        if world.rank == 0:
            error = raises(TimeoutError, world.group.barrier, timeout=0.05)
            assert isinstance(error, tutti.DeadlineError) and error.ranks == (1,)
            world.store.set("over", "")
        else:
            world.store.wait("over", timeout=300)


def dies():
    with tutti.World() as world:
        world.group.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        error = raises(tutti.DeadError, world.group.barrier)
        assert error.ranks == (1,) and "signal 9" in str(error)
        rest = world.group.shrink()
        assert rest.size == world.size - 1 and list(rest.all_reduce(array.array("i", [1]))) == [world.size - 1]


def fails(rank):
    with tutti.World() as world:
        part = world.new_group([0, 1])
        if world.rank == rank:
            raise ZeroDivisionError("on purpose")
        for group in (world.group, part):
            error = raises(tutti.AbortedError, group.barrier)
            assert "ZeroDivisionError: on purpose" in str(error), error


def returns_what_stays_here():
    return threading.Lock()


def dies_and_leaves_a_child():
    """The child has what the rank had open, as workers of a data loader do."""
    with tutti.World() as world:
        world.group.barrier()
        if world.rank == 1:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        world.group.barrier()


def dies_in_the_middle_of_its_answer():
    """Likewise. A pipe takes a few bytes all or none; of more it may have some."""
    from multiprocessing.connection import Connection
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    sent = []

    def send(self, data, write=os.write):
        sent.append(write(self._handle, data if len(data) <= select.PIPE_BUF else data[:100]))
        if len(sent) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    Connection._send = send
    return bytes(1 << 20)


def answers_with_its_rank():
    with tutti.World() as world:
        return bytes([world.rank]) * (world.rank << 20)


def goes_on(told):
    with tutti.World() as world:
        if world.rank == 0:
            raise ZeroDivisionError("on purpose")
        while not os.path.exists(told):  # in code of its own
            time.sleep(0.01)


# ---- tests ----

def collectives_work_on_buffers():
    for ranks in (2, 3):
        assert tutti.spawn(buffers, ranks) == list(range(ranks))


def messages_works_batches_and_the_store():
    tutti.spawn(messages, 2)


def works_can_be_awaited():
    tutti.spawn(awaited, 2)


def threads_run_while_a_call_waits():
    tutti.spawn(waits_beside_a_thread, 2)


def symmetric_memory_is_an_array():
    if numpy is not None:
        tutti.spawn(symmetric, 3)


def numpy_arrays_of_every_type():
    if numpy is not None:
        tutti.spawn(numpy_arrays, 2)


def the_program_of_the_page_for_numpy_computes():
    """On one rank and on three, what NumPy alone does."""
    if numpy is None:
        return
    plate = numpy.zeros((62, 64))
    plate[0] = 1
    for _ in range(200):
        mean = (plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]) / 4
        change = numpy.abs(mean - plate[1:-1, 1:-1]).max()
        plate[1:-1, 1:-1] = mean
    page = pathlib.Path(os.environ.get("TEST_SOURCE", pathlib.Path(__file__).parent.parent.parent)) / "docs/numpy.md"
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "heat.py"
        script.write_text(page.read_text().split("```python\n")[1].split("```")[0])
        for ranks in (1, 3):
            ran = subprocess.run([sys.executable, "-m", "tutti.run", "-n", str(ranks), str(script)], capture_output=True, text=True, timeout=300)
            assert ran.returncode == 0 and ran.stdout == f"[0] heat {plate[1:-1].sum():.6f}, the last change was {change:.6f}\n", (ran.stdout, ran.stderr)


def errors_are_exceptions():
    tutti.spawn(mismatch, 2)
    tutti.spawn(late, 2)
    with tutti.World() as alone:
        assert alone.size == 1 and alone.store is None
    assert raises(tutti.StateError, lambda: alone.rank).status == "STATE"
    alone.close()
    raises(ValueError, tutti.World, rank=1)
    raises(tutti.Error, tutti.World, settings="TUTTI_SPIN=often")


def a_death_reaches_the_others_and_the_parent():
    error = raises(tutti.DeadError, tutti.spawn, dies, 3)
    assert error.ranks == (1,) and "signal 9" in str(error)
    raises(ZeroDivisionError, tutti.spawn, fails, 2, 1)
    text = str(raises(RuntimeError, tutti.spawn, returns_what_stays_here, 1))
    assert "rank 0 returned <unlocked _thread.lock" in text and "cannot pickle '_thread.lock' object" in text, text
    begin = time.monotonic()
    error = raises(tutti.DeadError, tutti.spawn, dies_and_leaves_a_child, 2)
    assert error.ranks == (1,) and time.monotonic() - begin < 45, (error, time.monotonic() - begin)
    begin = time.monotonic()
    error = raises(tutti.DeadError, tutti.spawn, dies_in_the_middle_of_its_answer, 1)
    assert error.ranks == (0,) and "signal 9" in str(error) and time.monotonic() - begin < 45, (error, time.monotonic() - begin)
    assert tutti.spawn(answers_with_its_rank, 3) == [bytes([rank]) * (rank << 20) for rank in range(3)]
    raises(ValueError, tutti.spawn, fails, 0, 1)


def whoever_waits_for_a_rank_that_goes_on_when_another_has_failed_is_told_why():
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        said = []
        told = os.path.join(folder, "told")

        def note(message, *_):
            said.append(str(message))
            pathlib.Path(told).touch()
        warnings.simplefilter("always")
        warnings.showwarning = note
        raises(ZeroDivisionError, tutti.spawn, goes_on, 2, told)
    assert len(said) == 1 and "ZeroDivisionError('on purpose'). Not ended, and waited for: rank 1" in said[0], said


def the_launcher_starts_scripts():
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "program.py"
        script.write_text("import array, tutti\nwith tutti.World() as world:\n    x = array.array('i', [1])\n    print('sum', world.group.all_reduce(x)[0])\n")
        ran = subprocess.run([sys.executable, "-m", "tutti.run", "-n", "3", str(script)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and ran.stdout.count("sum 3") == 3, (ran.stdout, ran.stderr)


def ctrl_c_ends_a_wait():
    program = ("import sys, tutti\n"
               "world = tutti.World(rank=0, size=1)\n"
               "group = world.group\n"
               "import array\n"
               "try:\n"
               "    print('waits', flush=True)\n"
               "    group.recv(array.array('i', [0]), source=0, tag=1, timeout=300)\n"
               "except KeyboardInterrupt:\n"
               "    print('heard', list(group.all_reduce(array.array('i', [5]))), flush=True)\n")
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "waits\n"
    time.sleep(0.2)  # it most probably waits by now; earlier is right, too
    child.send_signal(signal.SIGINT)
    output = child.communicate(timeout=300)[0]
    assert output == "heard [5]\n" and child.returncode == 0, (output, child.returncode)


def ctrl_c_ends_waits_of_every_kind():
    """Rank 1 is there, and does what rank 0 waits for never. What was interrupted may have ended its group; the world goes on, and closes."""
    program = ("import array, sys, tutti\n"
               "world = tutti.World(rank=int(sys.argv[1]), size=2, store=sys.argv[2], timeout=1e6)\n"
               "agreeing, shrinking, reducing = [world.new_group([0, 1], tag=tag) for tag in ('agree', 'shrink', 'collective')]\n"
               "memory = world.empty(4, 'i32')\n"
               "peers, x = memory.rendezvous(world.new_group([0, 1], tag='peers')), array.array('i', [0])\n"
               "world.group.barrier()\n"
               "waits = {'next_event': world.next_event, 'recv': lambda: world.group.recv(x, source=1, tag=1),\n"
               "         'work': lambda: world.group.recv(x, source=1, tag=2, wait=False).wait(), 'wait_signal': lambda: peers.wait_signal(1),\n"
               "         'wait_for_signal': lambda: peers.wait_for_signal(0, 7), 'barrier of peers': peers.barrier,\n"
               "         'agree': lambda: agreeing.agree(True), 'shrink': shrinking.shrink, 'all_reduce': lambda: reducing.all_reduce(x)}\n"
               "for name, wait in waits.items() if world.rank == 0 else ():\n"
               "    try:\n"
               "        print(name, flush=True)\n"
               "        wait()\n"
               "    except KeyboardInterrupt:\n"
               "        print('heard', flush=True)\n"
               "if world.rank == 0:\n"
               "    world.store.set('over', '')\n"
               "world.store.wait('over', timeout=300)\n"
               "world.group.all_reduce(x)\n"
               "world.close()\n"
               "print('closed', flush=True)\n")
    url = f"unix:@tutti-interrupted-{os.getpid()}"
    first, second = [subprocess.Popen([sys.executable, "-c", program, str(rank), url], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    guard = threading.Timer(300, first.kill)  # for one that is never heard: its deadline is days away
    guard.start()
    try:
        for name in ("next_event", "recv", "work", "wait_signal", "wait_for_signal", "barrier of peers", "agree", "shrink", "all_reduce"):
            assert first.stdout.readline() == f"{name}\n", name
            time.sleep(0.2)  # it most probably waits by now; earlier is right, too
            first.send_signal(signal.SIGINT)
            assert first.stdout.readline() == "heard\n", name
        for child in (first, second):
            assert child.communicate(timeout=300)[0] == "closed\n" and child.returncode == 0
    finally:
        guard.cancel()
        for child in (first, second):
            child.kill()
            child.wait()


def ctrl_c_that_was_heard_ends_no_later_call():
    program = ("import array, os, signal, threading, time, tutti\n"
               "group = tutti.World().group\n"
               "for _ in range(30):\n"
               "    sender = threading.Timer(0.005, group.send, (array.array('i', [5]), 0, 1))\n"
               "    try:\n"
               "        os.kill(os.getpid(), signal.SIGINT)\n"
               "        time.sleep(300)\n"
               "    except KeyboardInterrupt:\n"
               "        sender.start()\n"
               "    assert list(group.recv(array.array('i', [0]), source=0, tag=1, timeout=300)) == [5]\n"
               "    sender.join()\n")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr


def ctrl_c_ends_an_await():
    """Also where asyncio has a handler of its own. The work goes on, and nobody waits for it any more."""
    program = ("import array, asyncio, tutti\n"
               "world = tutti.World(rank=0, size=1)\n"
               "async def main():\n"
               "    print('waits', flush=True)\n"
               "    await world.group.recv(array.array('i', [0]), source=0, tag=1, timeout=300, wait=False)\n"
               "try:\n"
               "    asyncio.run(main())\n"
               "except KeyboardInterrupt:\n"
               "    print('heard', list(world.group.all_reduce(array.array('i', [5]))), flush=True)\n")
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "waits\n"
    time.sleep(0.3)  # it most probably waits by now; earlier is right, too
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=300)[0] == "heard [5]\n" and child.returncode == 0  # and not the receive's deadline


def an_await_whose_thread_does_not_start_is_the_only_one_that_fails():
    import asyncio
    start = threading.Thread.start

    def failing(thread):
        threading.Thread.start = start
        raise RuntimeError("can't start new thread")

    async def main(group):
        first, second = (group.recv(array.array("i", [0]), source=0, tag=tag, wait=False) for tag in (1, 2))
        threading.Thread.start = failing
        try:
            await first
            raise AssertionError("the thread was started")
        except RuntimeError:
            pass
        waits = asyncio.ensure_future(_of(second))
        await asyncio.sleep(0)
        group.send(array.array("i", [7]), to=0, tag=1)
        group.send(array.array("i", [8]), to=0, tag=2)
        return list(await asyncio.wait_for(waits, 60)), list(first.wait())

    async def _of(work):
        return await work

    with tutti.World() as world:
        assert asyncio.run(main(world.group)) == ([8], [7])


def a_handler_may_call_the_group_wherever_it_comes():
    """Also where the package looks at signals that came before a call: a handler runs between any two steps of Python."""
    program = ("import array, signal, tutti\n"
               "from tutti import _interrupt\n"
               "world, taken, take = tutti.World(), [], _interrupt._take\n"
               "signal.signal(signal.SIGUSR1, lambda number, frame: taken.append(list(world.group.all_reduce(array.array('i', [3])))))\n"
               "class Poller:\n"
               "    def poll(self, limit):\n"
               "        return True\n"
               "def signalled():\n"
               "    _interrupt._take = take\n"
               "    signal.raise_signal(signal.SIGUSR1)\n"
               "    return take()\n"
               "_interrupt._poller, _interrupt._take = Poller(), signalled\n"
               "world.group.barrier()\n"
               "print(taken, flush=True)\n")
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60).stdout == "[[3]]\n"


def handler(kind):
    """A program that is sent SIGINT while it waits for another rank, with a handler that only notes it."""
    return ("import array, os, signal, sys, threading, time, tutti\n"
            "noted = []\n"
            "signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))\n"
            "world = tutti.World()\n"
            "group, x = world.group, array.array('i', [1])\n"
            "group.barrier()\n"
            "def send():\n"
            "    time.sleep(0.2)\n"  # the main thread most probably waits by then; earlier is right, too
            "    os.kill(os.getpid(), signal.SIGINT)\n"
            "    world.store.set('sent', '')\n"
            "if world.rank == 0:\n"
            "    threading.Thread(target=send).start()\n"
            + {"collective": "    group.all_reduce(x)\n", "work": "    group.all_reduce(x, wait=False).wait()\n",
               "store": "    world.store.wait('over', timeout=300)\n    group.all_reduce(x)\n"}[kind] +
            "    assert noted == [signal.SIGINT], noted\n"
            "else:\n"
            "    world.store.wait('sent', timeout=300)\n"
            "    world.store.set('over', '')\n"
            "    group.all_reduce(x)\n"
            "assert x[0] == 2\n"
            "world.finish()\n")


def a_handler_that_raises_nothing_ends_nothing():
    for kind in ("collective", "work", "store"):
        ran = subprocess.run([sys.executable, "-m", "tutti.run", "-n", "2", sys.executable, "-c", handler(kind)], capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, (kind, ran.stdout, ran.stderr)


def ctrl_c_ends_the_opening_of_a_world():
    program = ("import sys, tutti\n"
               "print('opens', flush=True)\n"
               "try:\n"
               "    tutti.World(rank=1, size=2, store=sys.argv[1], timeout=300)\n"
               "except KeyboardInterrupt:\n"
               "    print('heard', flush=True)\n")
    child = subprocess.Popen([sys.executable, "-c", program, f"unix:@tutti-nobody-{os.getpid()}"], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "opens\n"
    time.sleep(0.3)  # it most probably waits by now; earlier is right, too
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=300)[0] == "heard\n"


def numbers_that_do_not_fit_are_refused():
    with tutti.World() as world:
        x = array.array("i", [1])
        for call in (lambda: world.group.send(x, to=2**32), lambda: world.group.recv(x, source=0, tag=2**40), lambda: world.group.broadcast(x, root=2**32),
                     lambda: world.new_group([2**32]), lambda: world.group.permute(x, to=[2**32], out=x)):
            raises(OverflowError, call)
        world.group.barrier(timeout=1e30)
        world.group.barrier(timeout=float("inf"))
        peers = world.empty(4, "i64").rendezvous()
        for call in (lambda: peers.put(2**32, x), lambda: peers.put(0, x, offset=2**64), lambda: peers.get(0, x, offset=2**64), lambda: peers.get(2**32, x),
                     lambda: peers.signal(2**32), lambda: peers.signal(0, channel=2**32), lambda: peers.wait_signal(0, channel=2**32), lambda: peers.barrier(2**32),
                     lambda: peers.test_signal(0, 2**32), lambda: peers.put_with_signal(0, x, 0, 1, offset=2**64), lambda: world.group.subgroups(2**32 + 1),
                     lambda: world.empty(2**62), lambda: world.empty(2**70)):
            raises(OverflowError, call)
        raises(TypeError, peers.get, None, x)
        raises(TypeError, world.empty, 2.5)
        for shape in (-1, (-2, -3)):
            raises(ValueError, world.empty, shape)
        raises(ValueError, world.group.all_to_all_v, x, [1], x, [-1])
        raises(ValueError, world.group.barrier, timeout=float("nan"))
        raises(ValueError, world.group.barrier, timeout=-1)
        for call in (lambda: peers.put_with_signal(0, x, 0, 2**64 + 7), lambda: peers.put_with_signal(0, x, 2**64, 7), lambda: peers.wait_for_signal(0, 2**64),
                     lambda: world.empty(4, persistent_id=2**64), lambda: tutti.World(rank=0, size=2**32 + 1),
                     lambda: world.empty(4, alignment=2**64 + 8), lambda: world.empty(4, signal_pad_bytes=2**64 + 8), lambda: world.grow_backend("shm", 2**64 + 8),
                     lambda: tutti.World(name="other", threads=2**32 + 1), lambda: tutti.Store.file("/nowhere/store", workers=2**32 + 1), lambda: tutti.mesh_shape(2**32 + 4, (0, 0)),
                     lambda: tutti.Mesh(world, (1,)).neighbor(0, 2**32 + 1), lambda: tutti.Mesh(world, (1,)).group(2**32)):
            raises(OverflowError, call)
        for call in (lambda: world.new_group([0], name="a\0b"), lambda: world.group.abort("a\0b"), lambda: tutti.Mesh(world, (1,), names=("a\0b",))):
            raises(ValueError, call)


def what_has_a_handle_is_not_copied():
    """Neither into this process, where the copy would be used after the end of the first, nor into another."""
    with tutti.World() as world:
        memory = world.empty(4, "i64")
        for thing in (world, world.group, memory, memory.rendezvous(), world.group.barrier(wait=False), tutti.Store.memory(), tutti.Mesh(world, (1,))):
            for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                assert type(thing).__name__ in str(raises(TypeError, copied, thing))


def strange_buffer(numbers):
    """Longs of struct's standard size, which is 4 bytes and not the machine's."""
    view = buffers_module._View(buf=ctypes.addressof(numbers), len=ctypes.sizeof(numbers), itemsize=4, ndim=1, format=b"<l",
                                shape=(ctypes.c_ssize_t * 1)(len(numbers)), strides=(ctypes.c_ssize_t * 1)(4))
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)(("PyMemoryView_FromBuffer", ctypes.pythonapi))
    return make(ctypes.addressof(view))


def buffers_that_do_not_fit_are_refused():
    with tutti.World() as world:
        strange = strange_buffer(numbers := (ctypes.c_int * 3)(1, 2, 3))
        assert "4 bytes" in str(raises(TypeError, world.group.all_reduce, strange)) and list(numbers) == [1, 2, 3]
        assert list(world.group.all_reduce((ctypes.c_long * 2)(4, 5))) == [4, 5]
        for fixed in (b"abc", memoryview(b"abc")):
            assert "read-only" in str(raises(ValueError, world.group.broadcast, fixed))
        assert "NoneType" in str(raises(TypeError, world.group.all_reduce, None))
        raises(ValueError, world.group.all_reduce, memoryview(bytearray(10))[::2])
        raises(TypeError, world.group.all_reduce, array.array("u", "ab"))
        kept = bytearray(8)
        world.group.all_reduce(kept)
        kept.extend(b"more")  # nobody holds it any more


def closed_groups_say_so():
    with tutti.World() as world:
        group, x = world.new_group([0]), array.array("i", [1])
        group.close()
        group.close()
        assert repr(group) == "<tutti.Group, closed>"
        for call in (lambda: group.name, lambda: group.rank, lambda: group.ranks, lambda: group.timeout, lambda: group.all_reduce(x), group.barrier, group.check, group.ran,
                     group.shrink, group.destroy, lambda: group.batch().__enter__(), lambda: group.subgroups(1), lambda: group.rank_of(0), lambda: group.abort("why")):
            assert "the group is closed" in str(raises(tutti.StateError, call))

        def inside():
            with world.new_group([0]) as made:
                made.close()
                raise ZeroDivisionError
        raises(ZeroDivisionError, inside)

        def leaves(name, *code):
            with world.new_group([0], name=name):
                sys.exit(*code)
        for code in ((), (0,)):  # a program that ends well ends no group
            raises(SystemExit, leaves, f"good {code}", *code)
            world.group_named(f"good {code}").barrier()
        for code in (3, "words"):
            raises(SystemExit, leaves, f"bad {code}", code)
            assert f"SystemExit: {code}" in str(raises(tutti.AbortedError, world.group_named(f"bad {code}").barrier))


def what_an_interrupt_leaves_running_keeps_its_buffers():
    """Ctrl-C may come when a work has just been started, and nobody has it yet."""
    import weakref
    from tutti import _interrupt, world as module
    with tutti.World() as world:
        x = array.array("i", [0])
        there, call = weakref.ref(x), _interrupt.call

        def interrupted(*arguments):
            call(*arguments)
            raise KeyboardInterrupt
        _interrupt.call = interrupted
        try:
            raises(KeyboardInterrupt, world.group.recv, x, source=0, tag=1, wait=False)
        finally:
            _interrupt.call = call
        del x
        assert there() is not None
        world.group.send(array.array("i", [7]), to=0, tag=1)
        world.group.barrier()
        while there() is not None:  # its work ends, and then they go; the test's own limit is for what never ends
            module._sweep()
            time.sleep(0.001)


def an_interrupt_while_a_work_is_dropped_frees_nothing():
    """It may come between any two steps of the package itself."""
    import weakref
    from tutti import world as module
    from tutti._library import lib
    with tutti.World() as world:
        x = array.array("i", [0])
        work, there, test, before, told = world.group.recv(x, source=0, tag=1, wait=False), weakref.ref(x), lib.tutti_work_test, sys.unraisablehook, []

        def interrupted(*arguments):
            raise KeyboardInterrupt
        lib.tutti_work_test, sys.unraisablehook = interrupted, lambda about: told.append(about.exc_type)  # and not its frames, which hold the buffers
        try:
            del work, x
        finally:
            lib.tutti_work_test, sys.unraisablehook = test, before
        assert told == [KeyboardInterrupt] and there() is not None
        world.group.send(array.array("i", [7]), to=0, tag=1)
        while there() is not None and there()[0] != 7:  # the message comes when it gets to it; the test's own limit is for one that never does
            time.sleep(0.001)
        end = time.monotonic() + 60
        while there() is not None:  # the next sweep finds it
            assert time.monotonic() < end, module._left
            module._sweep()
            time.sleep(0.001)
        assert not module._left


def sweeps_in_the_middle_of_each_other_release_each_work_once():
    """A handler, or another thread, may make works of its own while some are swept."""
    from tutti import world as module
    from tutti._library import lib
    with tutti.World() as world:
        works = [world.group.recv(array.array("i", [0]), source=0, tag=1, wait=False) for _ in range(20)]
        finished, release, released = module.finished, lib.tutti_work_release, []

        def again(place):
            module.finished = finished
            done = finished(place)
            module._sweep()
            module.finished = again
            return done
        for _ in range(20):
            world.group.send(array.array("i", [7]), to=0, tag=1)
        for work in works:
            work.wait()
        module.finished = lambda place: False
        works.clear()
        del work
        lib.tutti_work_release, module.finished = lambda handle: (released.append(handle), release(handle)), again
        try:
            threads = [threading.Thread(target=module._sweep) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            lib.tutti_work_release, module.finished = release, finished
        released = [getattr(handle, "value", handle) for handle in released if handle is not None]
        assert len(released) == len(set(released)) == 20 and not module._left, (released, module._left)


def a_forked_child_does_not_wait_for_its_parents_works():
    """It has none of the threads that would end them."""
    import asyncio

    async def _of(work):
        return await work

    with tutti.World() as world:
        work = world.group.recv(array.array("i", [0]), source=0, tag=1, wait=False)
        child = os.fork()
        if child == 0:
            try:
                found = [raises(tutti.Error, call).status for call in (lambda: work.wait(1), work.done, lambda: asyncio.run(asyncio.wait_for(_of(work), 60)))]
                os._exit(0 if found == ["FORKED"] * 3 else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        world.group.send(array.array("i", [7]), to=0, tag=1)
        assert list(work.wait()) == [7]


def a_signal_of_a_forked_child_ends_nothing_here():
    program = ("import array, os, signal, threading, tutti\n"
               "world = tutti.World()\n"
               "read, write = os.pipe()\n"
               "child = os.fork()\n"
               "if child == 0:\n"
               "    try:\n"
               "        os.read(read, 1)\n"
               "        os.kill(os.getpid(), signal.SIGINT)\n"
               "    except KeyboardInterrupt:\n"
               "        pass\n"
               "    with tutti.World(name='own') as own:\n"  # and it can have a world of its own
               "        own.group.barrier()\n"
               "    os._exit(3)\n"
               "def later():\n"
               "    os.write(write, b'x')\n"
               "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
               "    world.group.send(array.array('i', [5]), to=0, tag=1)\n"
               "threading.Timer(0.2, later).start()\n"  # the main thread most probably waits by then; earlier is right, too
               "print(list(world.group.recv(array.array('i', [0]), source=0, tag=1, timeout=300)))\n")
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300)
    assert ran.stdout == "3\n[5]\n" and ran.returncode == 0, (ran.stdout, ran.stderr)


def a_library_of_another_version_is_refused():
    own = pathlib.Path(tutti.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        other = pathlib.Path(folder) / "tutti"
        shutil.copytree(own, other, ignore=shutil.ignore_patterns("lib", "plugins", "bin", "__pycache__"))
        table = other / "_interface.py"
        table.write_text(re.sub(r"^version = .*$", "version = '77.5.1'", table.read_text(), count=1, flags=re.M))

        def said():
            ran = subprocess.run([sys.executable, "-c", "import tutti"], capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": folder})
            assert ran.returncode == 1, ran
            return ran.stderr.splitlines()[-1]
        assert said().startswith("ImportError: tutti: libtutti.so.77.5 cannot be loaded: ")
        (other / "lib").mkdir()
        for path in (own / "lib").iterdir():  # with what it needs beside it
            (other / "lib" / re.sub(r"^(libtutti\.so)\..*", r"\1.77.5", path.name)).symlink_to(path.resolve())
        assert said() == f"ImportError: tutti: the package was made for version 77.5.1 and the library is {tutti.__version__}"


def importing_is_quick_and_needs_nothing():
    program = "import sys, tutti; print('numpy' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300).stdout == "False False\n"


# Functions of C that Python's users do not need, and why.
NOT_WANTED = {
    "the language has it": "tutti_main tutti_spawn tutti_convert tutti_view_count tutti_view_bytes tutti_view_of tt_dims_of tt_no_dims tt_tensors_of tt_named tt_at tt_print "
                           "tt_size tt_stride tt_offset tt_graph_print tt_metadata_get tt_module_user tt_module_name tt_module_call tt_function_module "
                           "tt_sequential_module tt_symm_enabled",
    "exceptions": "tutti_status_name tutti_error_clear tutti_error_set tutti_error_save tutti_error_restore tt_error_pending tt_error_clear tt_error_show",
    "names instead of numbers": "tutti_device_at tutti_device_kind tutti_device_index tutti_dtype_size tutti_dtype_name tutti_reduction_name tutti_dtype_parse "
                                "tutti_reduction_parse tutti_reduction_applies tutti_algorithm_parse",
    "objects count their references": "tutti_work_keep tutti_memory_keep tutti_mesh_keep tutti_peers_keep tutti_pool_keep tutti_group_world tutti_peers_group tutti_pool_alloc "
                                      "tutti_pool_device tutti_memory_find tt_scope_return tt_scope_leave tt_finalize tt_optimizer_group_count",
    "one argument that is several things": "tutti_form_group tutti_form_name tutti_form_ranks tutti_form_lists tutti_form_mesh tutti_form_mesh_dim tutti_group_expand "
                                           "tutti_group_resolve tutti_group_find_or_new tt_group",
    "part of another function": "tt_backward tt_data_mut tt_to_dlpack tt_save_safetensors tt_fused_all_gather_matmul_native tt_sgd_step tt_adamw_step tt_bucket_average tt_shard_gather tt_shard_reduce "
                                "tt_module_clip_grad_norm tt_clip_grad_norm tutti_store_underlying tutti_store_has_extended_api tutti_peers_get_remote tutti_work_sequence",
    "pointers into memory, for kernels of one's own": "tutti_memory_signal_pad tutti_memory_pad_bytes tutti_memory_signal_pad_bytes tutti_memory_set_signal_pad_bytes "
                                                      "tutti_view_memset32 tutti_view_write_value32 tutti_peers_multicast tutti_peers_bytes "
                                                      "tutti_peers_pad_bytes tutti_peers_buffer tutti_peers_signal_pad tutti_peers_get_signal_pad",
    "launchers": "tutti_store_serve",
    "tests of the library": "tt_count tt_operator_count tt_operator_at tt_operator_argument_at tt_symm_test_begin tt_symm_test_end tt_set_version"}


def every_function_of_c_is_at_hand():
    """In the package, or named above; and nothing is named above that is in the package."""
    from tutti import _interface
    folder = pathlib.Path(tutti.__file__).parent
    text = "\n".join(path.read_text() for path in folder.rglob("*.py") if path.name != "_interface.py" and "torch" not in path.parts)
    used = set(re.findall(r"\b(?:tt|tutti)_\w+", text))
    unwanted = set(" ".join(NOT_WANTED.values()).split())
    missing = [name for name in _interface.functions if name not in used | unwanted and not name.endswith("_init")]
    assert not missing, f"neither bound nor named as not wanted: {missing}"
    assert not unwanted & used, f"bound, and named as not wanted: {unwanted & used}"
    assert unwanted <= set(_interface.functions), unwanted - set(_interface.functions)


def a_package_that_pip_has_built_looks_for_plug_ins_in_itself_alone():
    if not harness.installed:
        return
    with tutti.World() as world:
        text = str(raises(tutti.NotFoundError, world.set_memory_backend, "cuda", "abacus"))
    own = pathlib.Path(tutti.__file__).resolve().parent
    folders = [pathlib.Path(path).resolve() for path in re.findall(r"(/[^;()]*)/libtutti-abacus\.so: ", text)]
    assert folders and all(own in folder.parents for folder in folders), text


def the_package_is_python_of_3_9():
    """Its grammar; annotations that Python evaluates; and names that came to the standard library later. (`scripts/test python` runs it on a 3.9.)"""
    later = {"pairwise", "batched", "bit_count", "StrEnum", "TypeAlias", "ParamSpec", "Concatenate", "TypeGuard", "Self", "LiteralString", "Never", "assert_never",
             "Unpack", "TypeVarTuple", "Required", "NotRequired", "override", "tomllib", "anext", "aiter", "ExceptionGroup", "BaseExceptionGroup", "EllipsisType", "NoneType",
             "TaskGroup", "file_digest", "cbrt", "exp2"}
    found = []
    for path in sorted(pathlib.Path(tutti.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text(), str(path), feature_version=(3, 9))
        lazy = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" and any(name.name == "annotations" for name in node.names) for node in tree.body)
        for node in ast.walk(tree):
            hints = [getattr(node, field, None) for field in ("annotation", "returns")]
            if not lazy and any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitOr) for hint in hints if hint is not None for part in ast.walk(hint)):
                found.append(f"{path}:{node.lineno}: X | Y in an annotation that is evaluated")
            names = {alias.name for alias in node.names} if isinstance(node, (ast.Import, ast.ImportFrom)) else {getattr(node, "attr", None), getattr(node, "id", None)}
            found += [f"{path}:{node.lineno}: {name}" for name in names & later]
            if isinstance(node, ast.Call) and any(keyword.arg in ("strict", "slots", "kw_only") for keyword in node.keywords):
                found.append(f"{path}:{node.lineno}: an argument that came later")
            if isinstance(node, getattr(ast, "Match", ())) or isinstance(node, getattr(ast, "TryStar", ())):
                found.append(f"{path}:{node.lineno}: a statement that came later")
    assert not found, "\n".join(found)


if __name__ == "__main__":
    run((collectives_work_on_buffers, messages_works_batches_and_the_store, works_can_be_awaited, threads_run_while_a_call_waits, symmetric_memory_is_an_array,
         numpy_arrays_of_every_type, the_program_of_the_page_for_numpy_computes, errors_are_exceptions, a_death_reaches_the_others_and_the_parent,
         whoever_waits_for_a_rank_that_goes_on_when_another_has_failed_is_told_why, the_launcher_starts_scripts, ctrl_c_ends_a_wait, ctrl_c_ends_waits_of_every_kind,
         ctrl_c_that_was_heard_ends_no_later_call, ctrl_c_ends_an_await, a_handler_that_raises_nothing_ends_nothing,
         an_await_whose_thread_does_not_start_is_the_only_one_that_fails, a_handler_may_call_the_group_wherever_it_comes,
         ctrl_c_ends_the_opening_of_a_world, numbers_that_do_not_fit_are_refused, what_has_a_handle_is_not_copied,
         buffers_that_do_not_fit_are_refused, closed_groups_say_so, what_an_interrupt_leaves_running_keeps_its_buffers,
         an_interrupt_while_a_work_is_dropped_frees_nothing, sweeps_in_the_middle_of_each_other_release_each_work_once, a_signal_of_a_forked_child_ends_nothing_here,
         a_forked_child_does_not_wait_for_its_parents_works,
         a_library_of_another_version_is_refused, importing_is_quick_and_needs_nothing, every_function_of_c_is_at_hand,
         a_package_that_pip_has_built_looks_for_plug_ins_in_itself_alone, the_package_is_python_of_3_9))

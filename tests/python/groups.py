#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Groups of all kinds, meshes, stores, events, counters and backends from Python, with processes as ranks."""
import array
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import raises, run  # noqa: E402
import tutti  # noqa: E402


# ---- stores ----

def queues(store):
    store.push("line", "first")
    store.push("line", b"")
    assert store.queue_length("line") == 2 and store.pop("line") == b"first" and store.pop("line", wait=False) == b"" and store.queue_length("line") == 0
    assert raises(tutti.NotFoundError, store.pop, "line", wait=False).status == "EMPTY"
    raises(TimeoutError, store.pop, "line", timeout=0.01)


def server_with_a_secret():
    """And the secret; None where the library was built without libsodium."""
    secret = b"sixteen bytes or"
    try:
        return tutti.Store.tcp("127.0.0.1", 0, server=True, secret=secret), secret
    except tutti.UnsupportedError as error:
        assert "libsodium" in str(error), error
        return tutti.Store.tcp("127.0.0.1", 0, server=True), None


def a_store_has_values_and_queues():
    server, secret = server_with_a_secret()
    with tempfile.TemporaryDirectory() as folder, server:
        stores = (tutti.Store.memory(), tutti.Store.file(pathlib.Path(folder) / "store"), server)
        for store in stores:
            store.set("text", "words")
            assert store.get("text") == b"words" and "text" in store and "none" not in store and store.check("text") and not store.check("text", "none")
            assert store.add("count", 3) == 3 and store.add("count") == 4 and store.get("count") == b"4"
            store.append("text", b" more\0")
            assert store.get("text") == b"words more\0"
            assert store.compare_set("text", "other", "new") == b"words more\0" and store.compare_set("text", b"words more\0", "new") == b"new"
            assert store.compare_set("fresh", "", "made") == b"made" and store.compare_set("missing", "x", "y") == b"x"
            store.set_many({"a": b"1\0x", "b": "", "c": "3"})
            assert store.get_many(["c", "a", "b"]) == [b"3", b"1\0x", b""] and store.get_many([]) == []
            assert set(store.keys()) >= {"text", "count", "fresh", "a", "b", "c"} and len(store) >= 6 and store
            assert store.delete("a") and not store.delete("a")
            if store.kind == "file":
                assert "no queues" in str(raises(tutti.UnsupportedError, store.push, "line", "first"))
            else:
                queues(store)
            raises(TimeoutError, store.get, "missing", timeout=0.01)
            raises(TimeoutError, store.wait, "text", "missing", timeout=0.01)
            raises(TimeoutError, store.get_many, ["text", "missing"], timeout=0.01)
            raises(TimeoutError, store.barrier, "meeting", 2, timeout=0.01)
            inner = store.prefix("inside")
            inner.set("key", "value")
            assert store.get("inside/key") == b"value" and inner.kind == "prefix" and inner.get("key") == b"value"
            store.timeout = 0.02
            assert abs(store.timeout - 0.02) < 1e-6
            raises(TimeoutError, store.get, "missing")
        assert [store.kind for store in stores] == ["memory", "file", "tcp"] and server.port > 0 and server.address == f"tcp://127.0.0.1:{server.port}"
        with tutti.Store.open(server.address, secret=secret) as client:
            assert client.get("text") == b"new" and "tcp" in repr(client)
        raises(tutti.StateError, client.get, "text")
        if secret is not None:
            raises(tutti.Error, tutti.Store.tcp, "127.0.0.1", server.port, timeout=0.3, secret=b"another one, but")
        raises(tutti.Error, tutti.Store.tcp, "0.0.0.0", 0, server=True)  # everybody's network, and no secret
    raises(tutti.Error, tutti.Store.open, "nothing://here")


def what_a_store_cannot_take_is_told():
    """Instead of another key, other bytes and another number."""
    store = tutti.Store.memory()
    for call in (lambda: store.set("a\0b", "x"), lambda: store.get("a\0b"), lambda: store.set_many({"a\0b": "x"}), lambda: "a\0b" in store, lambda: store.push("a\0b", "x"),
                 lambda: store.prefix("a\0b"), lambda: store.get("a", timeout=-1)):
        raises(ValueError, call)
    for call in (lambda: store.set("a", 5), lambda: store.set("a", [1, 2]), lambda: store.push("a", 5), lambda: store.compare_set("a", "", 5)):
        raises(TypeError, call)
    for call in (lambda: store.add("n", 2**64 + 1), lambda: store.add("n", 2**63), lambda: store.barrier("b", 2**64 + 1), lambda: tutti.Store.tcp("127.0.0.1", 2**32 + 1)):
        raises(OverflowError, call)
    assert not store.keys() and store.add("n", -2**63) == -2**63


def a_store_that_is_closed_stays_for_who_waits_in_it():
    server = tutti.Store.tcp("127.0.0.1", 0, server=True)
    stores = [tutti.Store.memory(), tutti.Store.open(server.address)] + [tutti.Store.open(server.address) for _ in range(8)]
    found = []
    threads = [threading.Thread(target=lambda store=store: found.append(raises(TimeoutError, store.get, "never", timeout=1))) for store in stores]
    for thread in threads:
        thread.start()
    time.sleep(0.3)  # they most probably wait by now; earlier is right, too
    for store in stores:
        store.close()
    for thread in threads:
        thread.join()
    assert len(found) == len(stores)


def ctrl_c_ends_a_question_to_a_store_that_does_not_answer():
    serve = "import signal, tutti\nstore = tutti.Store.tcp('127.0.0.1', 0, server=True)\nprint(store.address, flush=True)\nsignal.pause()\n"
    ask = ("import sys, tutti\n"
           "store = tutti.Store.open(sys.argv[1], timeout=300)\n"
           "print('open', flush=True)\n"
           "sys.stdin.readline()\n"
           "for call in (lambda: store.add('count'), lambda: 'key' in store):\n"
           "    print('waits', flush=True)\n"
           "    try:\n"
           "        call()\n"
           "    except KeyboardInterrupt:\n"
           "        print('heard', flush=True)\n"
           "import os; os._exit(0)\n")
    server = subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True)
    child = subprocess.Popen([sys.executable, "-c", ask, server.stdout.readline().strip()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "open\n"
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)
        child.stdin.write("\n")
        child.stdin.flush()
        begin = time.monotonic()
        for _ in range(2):
            assert child.stdout.readline() == "waits\n"
            time.sleep(0.2)
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "heard\n"
        assert child.wait(timeout=300) == 0 and time.monotonic() - begin < 60
    finally:
        for process in (child, server):
            process.kill()
            process.wait()


def threads_meet_in_clones_of_a_store():
    store, found = tutti.Store.memory(), []

    def come(number):
        with store.clone() as mine:
            mine.barrier("all", 3)
            found.append(mine.add("came"))
    threads = [threading.Thread(target=come, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    store.barrier("all", 3)
    for thread in threads:
        thread.join()
    assert sorted(found) == [1, 2]


ASKERS = """
import os, signal, time, tutti
class Stop(Exception): pass
def stop(number, frame):
    if armed[0]:
        armed[0] = False
        raise Stop
def asks(number, frame):
    store.check('key')
def threads():
    return len(os.listdir('/proc/self/task'))
def more():
    store.check('key')
    end = time.monotonic() + 30
    while threads() > before and time.monotonic() < end:  # those that were left end when they get to it
        time.sleep(0.01)
    return threads() - before
store, armed = tutti.Store.memory(), [False]
store.check('key')
before = threads()
signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
for _ in range(1500):
    try:
        armed[0] = True
        while True:
            store.check('key')
    except Stop:
        pass
signal.setitimer(signal.ITIMER_REAL, 0)
print(more())
signal.signal(signal.SIGALRM, asks)
ask, question = tutti._interrupt.ask, lambda: (signal.setitimer(signal.ITIMER_REAL, 0.0001), time.sleep(0.01))
for _ in range(10):
    ask(question)  # and the handler asks meanwhile
print(more())
"""


def interrupts_of_questions_leave_no_threads_behind():
    """Wherever they come: before the question, while it is asked, and after it."""
    ran = subprocess.run([sys.executable, "-c", ASKERS], capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "0\n0\n", ""), (ran.returncode, ran.stdout, ran.stderr)


def ctrl_c_ends_a_wait_for_a_store_without_a_world():
    program = ("import tutti\n"
               "store = tutti.Store.memory()\n"
               "for wait in (lambda: store.get('never', timeout=300), lambda: store.pop('never', timeout=300), lambda: store.barrier('never', 2, timeout=300)):\n"
               "    print('waits', flush=True)\n"
               "    try:\n"
               "        wait()\n"
               "    except KeyboardInterrupt:\n"
               "        print('heard', flush=True)\n"
               "import os; os._exit(0)\n")
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    for _ in range(3):
        assert child.stdout.readline() == "waits\n"
        time.sleep(0.2)  # it most probably waits by now; earlier is right, too
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "heard\n"
    assert child.wait(timeout=300) == 0


# ---- what ranks do ----

def of_groups(world):
    rank, size, whole = world.rank, world.size, world.group
    pairs = whole.subgroups(2)
    assert pairs.size == 2 and pairs.ranks == [rank // 2 * 2, rank // 2 * 2 + 1] and pairs.rank_of(rank) == rank % 2 and pairs.world_rank(0) == rank // 2 * 2
    raises(ValueError, pairs.rank_of, (rank + 2) % size)
    outer = whole.split([[0, 3], [1]])
    assert (outer is None) == (rank == 2) and (outer is None or outer.ranks == ([1] if rank == 1 else [0, 3]))
    crossed = world.new_groups([[0, 2], [1, 3]], description="crossed")
    x = array.array("i", [rank])
    crossed.all_reduce(x)
    assert x[0] == {0: 2, 1: 4}[rank % 2] and crossed.description == "crossed" and crossed.sequence == crossed.completed == 1
    tagged = world.new_group([0, 1, 2, 3], tag="mine")
    assert tagged.tag == "mine" and world.find_group([3, 2, 1, 0], "mine").name == tagged.name and world.find_group([0], "mine") is None
    assert world.group_named(tagged.name).ranks == [0, 1, 2, 3] and world.group_named("nobody's") is None
    assert {group.name for group in world.groups()} >= {whole.name, tagged.name, pairs.name, crossed.name} and whole.settled == 0
    after, before = (rank + 1) % size, (rank - 1) % size
    got = array.array("i", [0])
    assert whole.send_recv(array.array("i", [rank]), after, got, before, tag=3) is got and got[0] == before
    assert whole.send_recv(array.array("i", [rank]), None, got, None) is got and got[0] == before  # nobody on either side
    ordered = world.new_group([3, 1, 2, 0], keep_order=True)
    assert ordered.world_rank(0) == 3 and ordered.ranks == [3, 1, 2, 0]
    local = world.new_group([0, 1], local=True) if rank < 2 else None
    assert local is None or local.size == 2
    counts = [1, 0, 2, 3]
    part = whole.reduce_scatter_v(array.array("i", range(6)), counts, out=array.array("i", [0] * counts[rank]))
    assert list(part) == [size * i for i in range(sum(counts[:rank]), sum(counts[:rank + 1]))]
    raises(ValueError, whole.reduce_scatter_v, array.array("i", range(5)), counts, out=part)
    name = ordered.name
    ordered.destroy()
    assert world.group_named(name) is None
    whole.prepare()
    whole.barrier()


def connectivity(made, *arguments, **named):
    """None where the library was built without hwloc, as in a wheel: then it says so."""
    try:
        return made(*arguments, **named)
    except tutti.UnsupportedError as error:
        assert "hwloc" in str(error), error
        return None


def of_meshes(world):
    rank = world.rank
    mesh = tutti.Mesh(world, (2, 2), names=("data", "model"))
    assert mesh.shape == (2, 2) and mesh.names == ("data", "model") and mesh.coordinate == (rank // 2, rank % 2) and mesh.ranks == [0, 1, 2, 3] and mesh.ndim == 2
    assert mesh.group("model").ranks == [rank // 2 * 2, rank // 2 * 2 + 1] and mesh.group(0).ranks == [rank % 2, rank % 2 + 2] and mesh.local_rank("data") == rank // 2
    assert mesh.neighbor("model") == rank // 2 * 2 + 1 - rank % 2 and mesh.neighbor(0, 5) == (rank + 2) % 4
    assert mesh.neighbor("model", 1, periodic=False) == (rank + 1 if rank % 2 == 0 else None)
    rows = mesh["model"]
    assert rows.shape == (2,) and rows.group().name == mesh.group("model").name and rows.names == ("model",) and mesh["data", "model"] == mesh and rows != mesh
    flat = mesh.flatten("all")
    assert flat.shape == (4,) and flat.group().size == 4 and mesh["all"] == flat and "data 2 × model 2" in repr(mesh) and mesh.device == "cpu"
    x = array.array("f", [1])
    mesh.group("data").all_reduce(x)
    assert x[0] == 2
    raises(LookupError, mesh.group, "height")
    raises(ValueError, tutti.Mesh, world, (3, 2))
    raises(ValueError, tutti.Mesh, world, (2, 2), ("one",))
    raises(tutti.Error, mesh.group)  # which of the two?
    part = tutti.Mesh(world, (2,), ranks=[1, 3])
    assert (part.coordinate is None) == (rank % 2 == 0) and (part.group() is None) == (rank % 2 == 0) and part.names is None
    links = connectivity(tutti.Connectivity.of_ranks, world.group)
    if links is not None:
        assert len(links) == 4 and links.link(0, 0) == "self" and links.link(0, 1) in ("core", "cache", "node", "package", "machine") and f"rank {rank}" in links.place(rank)
        raises(IndexError, links.link, 0, 4)
    world.group.barrier()


def of_peers(world):
    rank, size = world.rank, world.size
    memory = world.empty(4, "i64")
    peers = memory.rendezvous()
    after = (rank + 1) % size
    peers.put_with_signal(after, array.array("q", [rank] * 2), word=0, value=7, offset=8)
    peers.wait_for_signal(0, 7)
    peers.wait_for_signal(0, 5, at_least=True)
    found = peers.get(rank, array.array("q", [0, 0]), offset=8)
    assert list(found) == [(rank - 1) % size] * 2
    raises(TimeoutError, peers.wait_for_signal, 0, 8, timeout=0.01)
    assert not peers.test_signal(after, 1)
    peers.signal(after, 1)
    peers.wait_signal((rank - 1) % size, 1)
    assert peers.size == size and peers.rank == rank and peers.channels > 1
    peers.barrier()
    assert memory.device == "cpu" and world.memory_backend("cpu") == "shm" and not world.has_multicast("cpu")
    world.open_backend("shm")
    raises(tutti.Error, world.open_backend, "none such")
    raises(tutti.Error, world.set_memory_backend, "cpu", "none such")


def of_records(world):
    before = world.counters("all_reduce")
    for _ in range(3):
        world.group.all_reduce(array.array("f", [1, 2]))
    now = world.counters("all_reduce")
    assert now["calls"] - before["calls"] == 3 and now["bytes"] - before["bytes"] == 24 and now["failures"] == 0 and now["seconds"] > 0
    raises(LookupError, world.counters, "all_produce")
    assert "all_reduce" in world.trace()
    with tempfile.TemporaryDirectory() as folder:
        world.write_trace(folder)
        (path,) = pathlib.Path(folder).iterdir()
        assert "all_reduce" in json.dumps(json.loads(path.read_text())) and f"rank-{world.rank}" in path.name
    assert world.name and isinstance(world.address, str) and tutti.clock() <= tutti.clock()


def of_calls(world):
    """What a call can be told besides its arrays."""
    group, rank, size = world.group, world.rank, world.size
    for algorithm in ("inline", "one_shot", "two_shot"):
        assert list(group.all_reduce(array.array("i", [rank]), algorithm=algorithm, executor="shm")) == [sum(range(size))]
        assert group.ran()["algorithm"] == algorithm and group.ran()["executor"] == "shm"
    group.barrier(algorithm="tree", executor="shm")
    assert group.ran()["algorithm"] == "tree"
    x, whole = array.array("i", range(rank, rank + 2 * size)), array.array("i", [0] * 2 * size)
    part, counts, to = array.array("i", [0, 0]), [2] * size, [(each + 1) % size for each in range(size)]
    for call in (lambda **how: group.broadcast(part, **how), lambda **how: group.all_gather(part, whole, **how), lambda **how: group.all_gather_v(part, counts, whole, **how),
                 lambda **how: group.reduce(x, **how), lambda **how: group.reduce_scatter(x, out=part, **how), lambda **how: group.reduce_scatter_v(x, counts, out=part, **how),
                 lambda **how: group.gather(part, out=whole, **how), lambda **how: group.scatter(x, part, **how), lambda **how: group.all_to_all(x, whole, **how),
                 lambda **how: group.all_to_all_v(x, counts, whole, counts, **how), lambda **how: group.permute(x, to, out=whole, **how)):
        call(algorithm="one_shot", executor="shm")
        assert group.ran()["algorithm"] == "one_shot", group.ran()
        group.barrier()
        assert "no algorithm" in str(raises(ValueError, call, algorithm="quick"))
        assert "shm" in str(raises(tutti.Error, call, executor="none such"))  # lists those that are there
    raises(tutti.Error, group.broadcast, x, algorithm="two_shot")  # which it does not have
    assert list(group.all_reduce(array.array("f", [rank]), order="any", wait=False).wait()) == [sum(range(size))]
    assert "rank, any" in str(raises(ValueError, group.all_reduce, x, order="none"))
    wanted = sum(3 * (each + 1) for each in range(size)) / 2
    for kind in "fd":
        factor = (rank + 1) / 2
        assert list(group.all_reduce(array.array(kind, [3]), "premul_sum", factor=factor)) == [wanted]
        assert list(group.reduce_scatter(array.array(kind, [3] * size), "premul_sum", out=array.array(kind, [0]), factor=array.array(kind, [factor]))) == [wanted]
        with group.batch():
            first, second = array.array(kind, [3]), array.array(kind, [3] * size)
            group.reduce(first, 1, "premul_sum", factor=factor)
            group.reduce_scatter_v(second, [1] * size, "premul_sum", array.array(kind, [0]), factor=factor)
        assert rank != 1 or list(first) == [wanted]
    assert "needs one" in str(raises(ValueError, group.all_reduce, array.array("f", [1]), "premul_sum"))
    assert "premul_sum" in str(raises(ValueError, group.all_reduce, array.array("f", [1]), factor=2))
    raises(TypeError, group.all_reduce, array.array("f", [1]), "premul_sum", factor=array.array("d", [1]))
    raises(TypeError, group.all_reduce, array.array("i", [1]), "premul_sum", factor=2)
    raises(OverflowError, group.all_reduce, array.array("f", [1]), "premul_sum", factor=1e60)
    group.barrier()


def of_received(world):
    """Who sent how much, where the receive left that open."""
    group, rank, size = world.group, world.rank, world.size
    if rank > 0:
        group.send(array.array("i", [rank] * rank), to=0, tag=10 + rank, executor="shm")
    else:
        got = [group.recv(array.array("i", [0] * size), status=True, executor="shm") for _ in range(size - 1)]
        assert sorted((each.source, each.tag, each.count) for each in got) == [(each, 10 + each, each) for each in range(1, size)]
        assert all(list(each.array[:each.count]) == [each.source] * each.count for each in got) and "from rank" in repr(got[0])
    group.barrier()
    after, before = (rank + 1) % size, (rank - 1) % size
    found = group.send_recv(array.array("i", [rank]), after, array.array("i", [0, 0]), before, tag=4, status=True)
    assert (found.source, found.tag, found.count, found.array[0]) == (before, 4, 1, before)
    found = group.send_recv(array.array("i", [rank]), None, array.array("i", [0]), None, status=True)
    assert (found.source, found.tag, found.count) == (None, None, 0)
    work = group.recv(array.array("i", [0]), tag=5, status=True, wait=False)
    assert work.result.source is None
    group.barrier()
    group.send(array.array("i", [rank]), to=after, tag=5)
    found = work.wait()
    assert type(found) is tutti.Received and (found.source, found.tag, found.count) == (before, 5, 1)
    with group.batch():
        group.send(array.array("i", [rank]), to=after, tag=6)
        found = group.recv(array.array("i", [0]), status=True)
        assert found.source is None
    assert (found.source, found.tag, found.array[0]) == (before, 6, before)


def together():
    with tutti.World() as world:
        of_groups(world)
        of_calls(world)
        of_received(world)
        of_meshes(world)
        of_peers(world)
        of_records(world)
        world.group.barrier()


def with_a_fault():
    with tutti.World() as world:
        raises(TimeoutError, world.next_event, timeout=0.01)
        group = world.new_group(range(world.size))
        world.inject_fault("rank=1,op=all_reduce,at=0,do=kill")
        error = raises(tutti.DeadError, group.all_reduce, array.array("f", [1]))
        assert error.ranks == (1,)
        kinds = {}
        while {"death", "group_ended"} - set(kinds):
            event = world.next_event(timeout=30)
            kinds[event.kind] = event
        assert kinds["death"].rank == 1 and kinds["death"].status == "DEAD" and "rank 1" in kinds["death"].text and kinds["group_ended"].group
        assert world.event_fd >= 0


# ---- tests ----

def groups_meshes_peers_and_records():
    tutti.spawn(together, 4)


def events_tell_of_a_death():
    raises(tutti.DeadError, tutti.spawn, with_a_fault, 2)


def a_fake_world_checks_and_moves_nothing():
    with tutti.World.fake(3, 16) as world:
        assert world.rank == 3 and world.size == 16 and world.launcher == "fake" and world.store is None
        x = array.array("f", [1])
        world.group.all_reduce(x)
        raises(ValueError, world.group.broadcast, x, root=16)
        assert tutti.Mesh(world, (4, 4)).coordinate == (0, 3)
    with tutti.World.fake(0, 2, fail=True) as world:
        raises(tutti.Error, world.group.all_reduce, x)


def shapes_and_machines():
    assert tutti.mesh_shape(12, (0, 0)) == (4, 3) and tutti.mesh_shape(12, (0, 2)) == (6, 2)
    raises(ValueError, tutti.mesh_shape, 12, (5, 0))
    machine, nodes = connectivity(tutti.Connectivity.of_machine), connectivity(tutti.Connectivity.of_machine, nodes=True)
    if machine is None or nodes is None:
        return
    assert len(machine) == os.cpu_count() and machine.link(0, 0) == "self" and "processor" in machine.place(0) and machine.direct(0, 0) == 0
    assert len(nodes) >= 1 and nodes.distance(0, 0) in (0, 10)


if __name__ == "__main__":
    run((a_store_has_values_and_queues, what_a_store_cannot_take_is_told, a_store_that_is_closed_stays_for_who_waits_in_it, threads_meet_in_clones_of_a_store,
         ctrl_c_ends_a_wait_for_a_store_without_a_world, ctrl_c_ends_a_question_to_a_store_that_does_not_answer,
         interrupts_of_questions_leave_no_threads_behind, groups_meshes_peers_and_records,
         events_tell_of_a_death, a_fake_world_checks_and_moves_nothing, shapes_and_machines))

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tensors on a GPU from Python: streams, events, replays, pinned memory, devices. Runs on the stand-in for the driver, and on a GPU where there is one."""
import gc
import pathlib
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import raises, run, skip  # noqa: E402
import tutti  # noqa: E402
from tutti import streams, tensor as tt  # noqa: E402

if not streams.device_available("cuda"):
    assert "cuda" in str(raises(tutti.UnsupportedError, streams.Stream)) and streams.default_device() == "cpu"
    raises(tutti.UnsupportedError, streams.set_default_device, "cuda")
    raises(tutti.UnsupportedError, streams.Event)
    raises(tutti.UnsupportedError, streams.memory)
    skip("no GPU, and no stand-in for its driver; what is asked of streams says so")


def operators_go_to_the_current_stream():
    x = tt.arange(8, dtype="f32").to_device("cuda")
    assert streams.current_stream().handle == 0 and x.device == "cuda:0"
    stream = streams.Stream()
    with stream as inside:
        assert inside is stream and streams.current_stream().handle == stream.handle != 0
        with streams.Stream() as other:
            assert streams.current_stream().handle == other.handle
        assert streams.current_stream().handle == stream.handle
        y = x * 2 + 1
        mark = streams.Event()
    assert streams.current_stream().handle == 0
    mark.join()
    z = y - 1
    mark.wait()
    assert mark.done() and z.tolist() == [2.0 * i for i in range(8)]
    stream.synchronize()
    with streams.Stream(handle=stream.handle):  # somebody else's, which stays
        assert (x + 1).tolist() == [i + 1.0 for i in range(8)]
    del stream, other
    gc.collect()
    raises(tutti.UnsupportedError, streams.Stream, "cuda:99")
    raises(tutti.Error, streams.Stream, "cpu")
    raises(ValueError, streams.Stream, "nowhere")


def threads_have_streams_of_their_own():
    stream, found = streams.Stream(), []

    def work():
        found.append(streams.current_stream().handle)
        with stream:
            found.append(streams.current_stream().handle)
        found.append(streams.current_stream().handle)
    with stream:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert streams.current_stream().handle == stream.handle
    assert found == [0, stream.handle, 0]


def a_step_is_run_again():
    a = tt.ones(4, device="cuda")
    with streams.Stream():
        (a * 3).add_(1)  # once as it is
        replay = streams.Replay()
        raises(tutti.StateError, replay)
        with replay:
            result = a * 3
            result += 1
        for value in range(3):
            a.fill_(float(value))
            replay()
            assert result.tolist() == [3.0 * value + 1] * 4
        raises(tutti.StateError, replay.__enter__)

        def reads():
            with streams.Replay():
                a.tolist()
        assert "captured" in str(raises(tutti.StateError, reads))

        def leaves():
            with streams.Replay() as kept:
                a.fill_(7.0)
                raise KeyError(kept)
        raises(tutti.StateError, raises(KeyError, leaves).args[0])
        assert (a * 2).tolist() == [4.0] * 4  # nothing of it ran, and the stream goes on
    raises(tutti.Error, streams.Replay().__enter__)  # the default stream cannot be noted


def copies_from_pinned_memory_do_not_wait():
    here, there = streams.empty_pinned(1000), tt.zeros(1000, device="cuda")
    here.fill_(5.0)
    made = streams.Event()
    with streams.Stream():
        made.join()  # zeros come first
        assert streams.copy_async_(there, here) is there
        arrived = streams.Event()
    arrived.join()
    assert there.sum().item() == 5000
    raises(tutti.Error, streams.copy_async_, there, tt.zeros(1000))  # not pinned
    raises(tutti.Error, streams.copy_async_, there, streams.empty_pinned(999))


def other_libraries_streams_are_ordered():
    """A consumer's stream by DLPack begins after what was put into the current one here, and an array of others is wanted in that."""
    x = tt.arange(8, dtype="f32").to_device("cuda")

    class Theirs:
        """An array on the device that notes the stream in which it is asked for."""
        asked: list = []

        def __dlpack_device__(self):
            return x.__dlpack_device__()

        def __dlpack__(self, *, stream=None, max_version=None):
            self.asked.append(stream)
            return x.__dlpack__(stream=stream, max_version=max_version)
    with streams.Stream() as here:
        y = x * 2
        other = streams.Stream()
        capsule = y.__dlpack__(stream=other.handle, max_version=(1, 0))
        with other:
            assert tt.from_dlpack(capsule).tolist() == [2.0 * i for i in range(8)]
        for stream in (None, 1, 2, -1, here.handle):
            assert (tt.from_dlpack(y.__dlpack__(stream=stream)) + 0).tolist() == [2.0 * i for i in range(8)]
        assert (tt.from_dlpack(Theirs()) + 1).tolist() == [i + 1.0 for i in range(8)]
    tt.from_dlpack(Theirs())
    assert Theirs.asked == [here.handle, 1]


class Unordered:
    """An array of a library that is none of those whose streams are known."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **named):
        return self._tensor.__dlpack__(**named)


def _reduce():
    with tutti.World() as world:
        group = world.group
        x = tt.full((1000,), float(group.rank + 1), device="cuda")
        assert group.all_reduce(x) is x and x.tolist() == [3.0] * 1000
        with streams.Stream():
            gathered = group.all_gather(x * float(group.rank))
            assert gathered.device == "cuda:0" and gathered.shape == (2, 1000) and gathered.sum().item() == 3000
        work = group.all_reduce(x, op="max", wait=False)
        work.join()
        assert (x + 1).tolist() == [4.0] * 1000 and work.wait() is x and work.done()
        with group.batch():
            group.all_reduce(a := tt.ones(3, device="cuda"))
            group.broadcast(b := tt.full((2,), float(group.rank), device="cuda"), root=1)
        assert a.tolist() == [2.0] * 3 and b.tolist() == [1.0] * 2
        assert "devices" in str(raises(TypeError, group.all_reduce, x, out=tt.zeros(1000)))
        assert "symm_empty" in str(raises(TypeError, world.empty((1000,)).rendezvous().put, 0, x))
        held = group.all_reduce(Unordered(x), out=tt.empty(1000, device="cuda"))  # of a library whose stream nobody knows
        assert held.tolist() == [6.0] * 1000
        with group.batch():
            group.all_reduce(Unordered(x), out=held)
        assert held.tolist() == [6.0] * 1000
        with streams.Stream():
            assert "streams" in str(raises(TypeError, group.all_reduce, x, out=Unordered(held)))

        def two_places():
            with group.batch():
                group.all_reduce(x)
                group.all_reduce(tt.zeros(3))
        assert "devices" in str(raises(TypeError, two_places))
        streams.synchronize("cuda")
        world.finish()


def groups_take_arrays_of_the_device():
    tutti.spawn(_reduce, 2)


def _pipelines():
    with tutti.World() as world, streams.Stream():
        rank, size = world.rank, world.size
        x, total, order = tt.full((2, 3), float(rank + 1), device="cuda"), tt.zeros((2, 3), device="cuda"), []
        gathered, output = tt.zeros((2 * size, 3), device="cuda"), tt.zeros((2 * size, 3), device="cuda")

        def consume(shards, source):
            assert shards[0].device == "cuda:0"
            order.append(source)
            total.add_(shards[0] * 2)

        def produce(to, out):
            assert out.device == "cuda:0" and out.shape == (2, 3)
            out.copy_(x * 10 + float(to))
        for _ in range(2):
            tt.pipelined_all_gather_and_consume([x], consume, world.group, [gathered])
            tt.pipelined_produce_and_all_to_all(produce, output, world.group)
        assert order == [rank, 1 - rank] * 2 and total.tolist() == [[12.0] * 3] * 2
        assert gathered[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0] and output[:, 0].tolist() == [10.0 + rank] * 2 + [20.0 + rank] * 2
        assert "expected all on one" in str(raises(tutti.Error, tt.pipelined_all_gather_and_consume, [x, tt.ones(2)], consume, world.group))
        assert tt.fused_workspace_bytes(world.group) > 0
        streams.synchronize("cuda")
        group = world.new_group(range(size))

        def fails(to, out):
            raise ZeroDivisionError("in the middle")
        if rank == 0:
            raises(ZeroDivisionError, tt.pipelined_produce_and_all_to_all, fails, output, group)
        else:
            def ends():
                for _ in range(2):  # the first may have returned before
                    tt.pipelined_produce_and_all_to_all(produce, output, group)
            assert "in the middle" in str(raises(tutti.AbortedError, ends))
        world.group.barrier()
        world.finish()


def pipelines_take_tensors_of_the_device():
    tutti.spawn(_pipelines, 2)


def the_default_device_is_the_threads():
    streams.set_default_device("cuda")
    try:
        assert streams.default_device() == "cuda:0" and tt.ones(2).device == "cuda:0" and tutti.nn.Linear(2, 2).weight.device == "cuda:0"
        found = []
        thread = threading.Thread(target=lambda: found.append(streams.default_device()))
        thread.start()
        thread.join()
        assert found == ["cpu"]
    finally:
        streams.set_default_device("cpu")
    assert streams.default_device() == "cpu" and tt.ones(2).device == "cpu"


def memory_is_counted_and_limited():
    before = streams.memory()
    x = tt.zeros(1 << 20, device="cuda")
    now = streams.memory()
    assert now["allocated"] >= before["allocated"] + (4 << 20) and now["reserved"] >= now["allocated"] and now["peak_allocated"] >= now["allocated"]
    streams.memory_limit(now["reserved"] + (1 << 20))
    try:
        assert "limit" in str(raises(MemoryError, tt.zeros, 1 << 26, device="cuda"))
    finally:
        streams.memory_limit(0)
    del x
    gc.collect()
    streams.memory_trim()
    assert streams.memory()["reserved"] < now["reserved"] and streams.memory()["limit"] == 0
    a = tt.ones((4, 4), device="cuda")
    with streams.tf32():
        assert (a @ a).tolist() == [[4.0] * 4] * 4


if __name__ == "__main__":
    run((operators_go_to_the_current_stream, threads_have_streams_of_their_own, a_step_is_run_again, copies_from_pinned_memory_do_not_wait,
         other_libraries_streams_are_ordered, groups_take_arrays_of_the_device, pipelines_take_tensors_of_the_device,
         the_default_device_is_the_threads, memory_is_counted_and_limited))

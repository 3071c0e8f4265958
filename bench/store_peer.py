# SPDX-License-Identifier: Apache-2.0
"""PyTorch's part of bench/store: its two servers, or a number of its clients as processes of their own.

    store_peer.py servers               prints the ports of the event-loop and the poll-based server, then waits for the end of its input
    store_peer.py clients N PORT…       each client connects to every port; then, for each line "SERVER OPERATION SECONDS" of input, all
                                        work on that server (an index) at once, and one line "OPERATIONS_PER_SECOND P50 P99" (ns) is printed
"""
import datetime
import os
import struct
import sys
import time

import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=60)
BATCH = 64  # sets, which have no reply, are followed by one question


def servers():
    stores = [dist.TCPStore("localhost", 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False, use_libuv=libuv)
              for libuv in (True, False)]
    print(*(store.port for store in stores), flush=True)
    sys.stdin.read()
    os._exit(0)


def work(store, operation, seconds, number):
    clock = time.perf_counter_ns
    key = f"client-{number}"
    times = []
    start = now = clock()
    end = start + int(seconds * 1e9)
    while now < end:
        if operation == "add":
            store.add(key, 1)
        elif operation == "get":
            store.get("value")
        else:
            for _ in range(BATCH):
                store.set(key + "-set", "0123456789abcdef")
            store.num_keys()
        before, now = now, clock()
        times.append(now - before)
    count = len(times) * (BATCH if operation == "set" else 1)
    times.sort()
    return count * 1e9 / (now - start), times[len(times) // 2], times[len(times) * 99 // 100]


def client(number, ports, commands, results):
    stores = [dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT, wait_for_workers=False) for port in ports]
    os.write(results, b"r")
    while True:
        message = os.read(commands, 64)
        if not message:
            os._exit(0)
        server, operation, seconds = message.decode().split()
        os.write(results, struct.pack("ddd", *work(stores[int(server)], operation, float(seconds), number)))


def read_whole(descriptor, size):
    data = b""
    while len(data) < size:
        data += os.read(descriptor, size - len(data))
    return data


def clients(count, ports):
    pipes = []
    for number in range(count):
        command, result = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.close(command[1])
            for write, read in pipes:
                os.close(write)
                os.close(read)
            client(number, ports, command[0], result[1])
        os.close(command[0])
        os.close(result[1])
        pipes.append((command[1], result[0]))
    for _, read in pipes:
        read_whole(read, 1)
    print("ready", flush=True)
    for line in sys.stdin:
        for write, _ in pipes:
            os.write(write, line.encode())
        parts = [struct.unpack("ddd", read_whole(read, 24)) for _, read in pipes]
        middle = sorted(part[1] for part in parts)[len(parts) // 2]
        print(sum(part[0] for part in parts), middle, max(part[2] for part in parts), flush=True)
    os._exit(0)


if sys.argv[1] == "servers":
    servers()
else:
    clients(int(sys.argv[2]), [int(port) for port in sys.argv[3:]])

# SPDX-License-Identifier: Apache-2.0
"""The gloo contender, through torch.distributed: the same commands and answers as worker.h. Started by measure.py, one process per rank.

gloo's all_reduce and broadcast are in place, and its reduce_scatter and all_to_all depend on the version: what is missing answers "none".
"""
import os
import sys
import time

import torch
import torch.distributed as dist


class Rank:
    def __init__(self, folder, cpus):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if cpus != "-":
            os.sched_setaffinity(0, {int(cpus.lstrip("-").split(",")[self.rank])})
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.commands = open(f"{folder}/commands.{self.rank}")
        self.answers = open(f"{folder}/answers.{self.rank}", "w")

    def values(self, rank, first, count):
        x = (torch.arange(first, first + count, dtype=torch.int64) * 0x9E3779B1 + rank * 0x85EBCA6B) & 0xFFFFFFFF
        x ^= x >> 15
        x = (x * 0x2C1B3C6D) & 0xFFFFFFFF
        x ^= x >> 12
        x = (x * 0x297A2D39) & 0xFFFFFFFF
        x = torch.where(x >= 1 << 31, x - (1 << 32), x)
        return (x.to(torch.float64) * 2.0**-31).to(torch.float32)

    def prepare(self, operation, size_bytes):
        elements = max(size_bytes // 4, 1)
        share = elements // self.size if operation in ("all_gather", "reduce_scatter", "all_to_all") else elements
        whole = share * self.size
        if operation in ("reduce_scatter", "all_to_all"):
            original = self.values(self.rank, 0, whole)
        else:
            original = self.values(self.rank, 0, share)
        self.share, self.original, self.input = share, original, original.clone()
        out = whole if operation in ("all_gather", "all_to_all") else share
        self.output = torch.zeros(out, dtype=torch.float32)

    def call(self, operation):
        if operation == "barrier":
            dist.barrier()
        elif operation == "all_reduce":
            dist.all_reduce(self.input)
        elif operation == "all_gather":
            dist.all_gather_into_tensor(self.output, self.input)
        elif operation == "reduce_scatter":
            dist.reduce_scatter_tensor(self.output, self.input)
        elif operation == "broadcast":
            dist.broadcast(self.input, 0)
        elif operation == "all_to_all":
            dist.all_to_all_single(self.output, self.input)
        else:
            raise NotImplementedError(operation)

    def wrong(self, operation):
        self.input.copy_(self.original)
        self.output.fill_(-7)
        dist.barrier()
        self.call(operation)
        r, n, c = self.rank, self.size, self.share
        found, tolerance = self.output, 0.0
        if operation == "all_reduce":
            found, wanted, tolerance = self.input, sum(self.values(k, 0, c).double() for k in range(n)), 1e-5
        elif operation == "reduce_scatter":
            wanted, tolerance = sum(self.values(k, r * c, c).double() for k in range(n)), 1e-5
        elif operation == "all_gather":
            wanted = torch.cat([self.values(k, 0, c) for k in range(n)])
        elif operation == "broadcast":
            found, wanted = self.input, self.values(0, 0, c)
        else:
            wanted = torch.cat([self.values(k, r * c, c) for k in range(n)])
        return int(((found.double() - wanted.double()).abs() > tolerance).sum())

    def turn(self, operation, mode, state, measurements, batch, check):
        times = []
        for i in range(measurements + 2):
            if state == "dirty":
                self.input.copy_(self.original)
            if mode == "isolated":
                dist.barrier()
            begin = time.perf_counter_ns()
            for _ in range(batch):
                self.call(operation)
            times.append((time.perf_counter_ns() - begin) / batch)
        times = sorted(times[2:])
        wrong = self.wrong(operation) if check == "check" and operation != "barrier" else -1
        return f"{times[len(times) // 2]:.1f} {times[0]:.1f} {sum(times) / len(times):.1f} {wrong}"

    def loop(self):
        for line in self.commands:
            if line.startswith("quit"):
                break
            operation, _, size_bytes, mode, state, _, measurements, batch, check = line.split()
            try:
                self.prepare(operation, int(size_bytes))
                answer = self.turn(operation, mode, state, int(measurements), int(batch), check)
            except (NotImplementedError, RuntimeError) as error:
                print(f"gloo: {operation}: {error}", file=sys.stderr)
                answer = "none"
            print(answer, file=self.answers, flush=True)


if __name__ == "__main__":
    Rank(sys.argv[1], sys.argv[2]).loop()

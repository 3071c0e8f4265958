#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fits a line through points that are spread over the ranks, with arrays of NumPy, on one rank or on several:

    PYTHONPATH=build/release/python python3 examples/python_numpy.py
    PYTHONPATH=build/release/python python3 -m tutti.run -n 4 examples/python_numpy.py

Each rank has some of the points. What the fit needs of them are sums, and the ranks add theirs up: 2 x 2 numbers, however many points there are. The sums have
the same bits on all ranks, and so have the lines."""
import numpy

import tutti

POINTS = 10000  # of each rank


def main():
    with tutti.World() as world:
        group, random = world.group, numpy.random.default_rng(world.rank)
        x = random.uniform(-1, 1, POINTS)
        y = 3 * x + 2 + random.normal(0, 0.1, POINTS)
        table = numpy.stack([x, numpy.ones(POINTS)], axis=1)

        square, right = table.T @ table, table.T @ y
        with group.batch():  # both at once
            group.all_reduce(square)
            group.all_reduce(right)
        line = numpy.linalg.solve(square, right)

        worst = numpy.array([abs(y - table @ line).max()])
        group.all_reduce(worst, op="max")
        lines = group.all_gather(line)  # (ranks, 2)
        print(f"rank {world.rank}: y = {line[0]:.3f} x + {line[1]:.3f}, no point is farther away than {worst[0]:.3f}; "
              f"all ranks have the same: {bool((lines == line).all())}", flush=True)


if __name__ == "__main__":
    main()

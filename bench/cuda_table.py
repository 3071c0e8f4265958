# SPDX-License-Identifier: Apache-2.0
"""Prints the GPU table of docs/performance-gpu.md from what bench/cuda_peers.py wrote.

    python3 bench/cuda_table.py cuda-2.json cuda-4.json cuda-8.json
"""
import json
import sys

print("| ranks | bytes | one-shot us (PyTorch) | ratio | two-shot us (PyTorch) | ratio | automatic us | ratio to PyTorch's better | share of bandwidth | private buffers us |")
print("|---|---|---|---|---|---|---|---|---|---|")
for path in sorted(sys.argv[1:], key=lambda p: json.load(open(p))["ranks"]):
    data = json.load(open(path))
    for row in data["rows"]:
        def pair(kind):
            ours, theirs = row[f"tutti {kind}"], row.get(f"torch {kind}")
            if theirs is None:
                return f"{ours:.1f} (no result)", "-"
            return f"{ours:.1f} ({theirs:.1f})", f"{ours / theirs:.2f}"
        one, one_ratio = pair("one-shot")
        two, two_ratio = pair("two-shot")
        better = min(row[name] for name in ("torch one-shot", "torch two-shot") if name in row)
        auto = row["tutti auto"]
        share = 2 * row["size"] * row["ranks"] / (auto / 1e6) / data["bandwidth"]
        print(f"| {row['ranks']} | {row['size']} | {one} | {one_ratio} | {two} | {two_ratio} | {auto:.1f} | {auto / better:.2f} | {share:.0%} | {row['tutti private']:.1f} |")

# SPDX-License-Identifier: Apache-2.0
"""Makes docs/performance.md and its pictures of the JSON files that measure.py wrote, one chapter per file.

    python3 bench/peers/report.py two-cores.json sixteen-cores.json
"""
import argparse
import json
import math
import os

TARGETS = {"barrier": (0.6, 0.6), 8: (0.5, 0.5), 1024: (0.5, 0.6), 4096: (0.5, 0.6), 65536: (0.35, 0.5), 1 << 20: (0.4, 0.6),
           1 << 25: (0.3, 0.5), 1 << 26: (0.3, 0.5), 1 << 28: (0.3, 0.5)}
OTHERS = 0.5
COLOURS = {"tutti_symmetric": "#0072b2", "tutti_private": "#56b4e9", "tutti": "#0072b2", "openmpi": "#d55e00", "openmpi_vader": "#e69f00",
           "mpich": "#009e73", "gloo": "#cc79a7", "copy": "#999999"}


def median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def size_text(size):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def time_text(ns):
    us = ns / 1e3
    return f"{us:.2f} µs" if us < 100 else f"{us:.0f} µs" if us < 10000 else f"{us / 1e3:.1f} ms"


def figure(one):
    return f"{time_text(median(one['rounds']))} ({time_text(min(one['rounds']))} – {time_text(max(one['rounds']))})"


def is_peer(name):
    return not name.startswith(("tutti", "copy", "floor"))


def best_peer(row):
    peers = {name: median(one["rounds"]) for name, one in row["results"].items() if is_peer(name)}
    return min(peers.items(), key=lambda item: item[1]) if peers else (None, None)


def ratio_text(row, name, target):
    _, best = best_peer(row)
    if name not in row["results"] or not best:
        return "–"
    ratio = median(row["results"][name]["rounds"]) / best
    return f"**{ratio:.2f}**{'' if ratio <= target else f' (target {target})'}"


def pick(document, **wanted):
    return [row for row in document["rows"] if all(row[key] == value for key, value in wanted.items())]


def label(document, name):
    return {"tutti_symmetric": "Tutti, symmetric", "tutti_private": "Tutti, private", "tutti": "Tutti", "copy": "copy"}.get(
        name, document["labels"].get(name, name))


def table(document, rows, first_column):
    """One row per size: everyone's median with the range over the rounds, then Tutti's ratio to the best peer."""
    names = [name for name in rows[0]["results"] if not name.startswith(("copy", "floor"))]
    lines = ["| " + " | ".join([first_column, *[label(document, name) for name in names], "symmetric / best", "private / best"]) + " |",
             "|" + "---|" * (len(names) + 3)]
    for row in rows:
        targets = TARGETS.get(row["bytes"], (OTHERS, OTHERS)) if row["operation"] == "all_reduce" else (OTHERS, OTHERS)
        cells = [size_text(row["bytes"]) if first_column == "size" else f"{row['operation']}, {size_text(row['bytes'])}, {row['state']}"]
        cells += [figure(row["results"][name]) if name in row["results"] else "–" for name in names]
        cells += [ratio_text(row, "tutti_symmetric", targets[0]), ratio_text(row, "tutti_private", targets[1])]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


# ---- pictures ----

def tick_text(us):
    """A power of ten of microseconds as people write it: 10 ns, 1 µs, 1 s."""
    for unit, size in (("s", 1e6), ("ms", 1e3), ("µs", 1), ("ns", 1e-3)):
        if us >= size * 0.999:
            break
    return f"{us / size:g} {unit}"


def picture(document, rows, title, path):
    """Median over size, logarithmic both ways; bars are minimum to maximum over the rounds."""
    width, height, left, right, top, bottom = 900, 550, 75, 190, 55, 55
    names = [name for name in rows[0]["results"] if name != "copy_stream"]
    points = {name: [(row["bytes"], row["results"][name]) for row in rows if name in row["results"]] for name in names}
    x0, x1 = math.log2(rows[0]["bytes"]), math.log2(rows[-1]["bytes"])
    every = [value for curve in points.values() for _, one in curve for value in one["rounds"]]
    y0, y1 = math.floor(math.log10(min(every) / 1e3)), math.ceil(math.log10(max(every) / 1e3))

    def x(size):
        return left + (math.log2(size) - x0) / max(x1 - x0, 1) * (width - left - right)

    def y(ns):
        return height - bottom - (math.log10(ns / 1e3) - y0) / max(y1 - y0, 1) * (height - top - bottom)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
           f'<rect width="{width}" height="{height}" fill="#fff"/>', f'<text x="{left}" y="26" font-size="16">{title}</text>']
    machine = document["machine"]
    load = f", load {machine['load'][0]}" if "load" in machine else ""
    out.append(f'<text x="{left}" y="42" fill="#555">{machine["processor"]}, {machine["cpus"]} CPUs, {machine["system"]}{load}; '
               'median, bars from the least to the largest</text>')
    free = -math.inf  # where the label before ends
    for row in rows:
        at = x(row["bytes"])
        out.append(f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{height - bottom}" stroke="#eee"/>')
        half = 4.0 * len(size_text(row["bytes"]))
        if at - half > free:
            out.append(f'<text x="{at:.1f}" y="{height - bottom + 18}" text-anchor="middle">{size_text(row["bytes"])}</text>')
            free = at + half
    for power in range(y0, y1 + 1):
        at = y(10.0**power * 1e3)
        out.append(f'<line x1="{left}" y1="{at:.1f}" x2="{width - right}" y2="{at:.1f}" stroke="#ddd"/>'
                   f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{tick_text(10.0**power)}</text>')
    out.append(f'<text x="18" y="{height / 2:.0f}" text-anchor="middle" transform="rotate(-90 18 {height / 2:.0f})">time</text>'
               f'<text x="{(left + width - right) / 2:.0f}" y="{height - 14}" text-anchor="middle">message size</text>')
    for number, name in enumerate(names):
        colour, curve = COLOURS.get(name, "#000"), points[name]
        if not curve:
            continue
        dash = ' stroke-dasharray="5 4"' if name == "copy" else ""
        line = " ".join(f"{x(size):.1f},{y(median(one['rounds'])):.1f}" for size, one in curve)
        out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dash} points="{line}"/>')
        for size, one in curve:
            out.append(f'<line x1="{x(size):.1f}" y1="{y(min(one["rounds"])):.1f}" x2="{x(size):.1f}" y2="{y(max(one["rounds"])):.1f}" stroke="{colour}" '
                       f'stroke-opacity="0.5"/><circle cx="{x(size):.1f}" cy="{y(median(one["rounds"])):.1f}" r="3" fill="{colour}"/>')
        out.append(f'<rect x="{width - right + 12}" y="{top + 10 + 20 * number}" width="14" height="4" fill="{colour}"/>'
                   f'<text x="{width - right + 32}" y="{top + 16 + 20 * number}">{label(document, name)}</text>')
    out.append("</svg>")
    with open(path, "w") as file:
        file.write("\n".join(out) + "\n")


# ---- chapters ----

def all_reduce_part(document, ranks, docs, stem):
    lines = []
    for mode, how in (("isolated", "a barrier before each call"), ("streaming", "calls back to back")):
        for state, what in (("clean", "inputs untouched between calls"), ("dirty", "inputs rewritten before each call, not timed")):
            rows = sorted(pick(document, operation="all_reduce", type="f32", mode=mode, state=state, ranks=ranks), key=lambda row: row["bytes"])
            if len(rows) < 2:
                continue
            path = f"performance/{stem}-{ranks}-{mode}-{state}.svg"
            picture(document, rows, f"all-reduce, f32 sum, {ranks} ranks, {mode}, {state}", os.path.join(docs, path))
            lines += [f"#### {mode.capitalize()}, {state}", "", f"{how.capitalize()}; {what}.", "", *table(document, rows, "size"), "",
                      f"![all-reduce, {mode}, {state}]({path})", ""]
    return lines


def barrier_part(document, ranks):
    lines = []
    for row in pick(document, operation="barrier", ranks=ranks):
        name, best = best_peer(row)
        if not best or "tutti" not in row["results"]:
            continue
        mine = row["results"]["tutti"]
        lines.append(f"- {row['mode']}: Tutti {figure(mine)}, " +
                     ", ".join(f"{label(document, peer)} {figure(one)}" for peer, one in row["results"].items() if is_peer(peer)) +
                     f"; ratio to the best ({label(document, name)}) {ratio_text(row, 'tutti', TARGETS['barrier'][0])}")
    return ["#### Barrier", "", *lines, ""] if lines else []


def limit_part(document, ranks):
    """What the machine allows: for large sizes every rank copying as many bytes at the same time, for small ones the hand-over of a line."""
    lines = []
    for row in sorted(pick(document, operation="all_reduce", type="f32", mode="isolated", ranks=ranks), key=lambda row: (row["state"], row["bytes"])):
        results = row["results"]
        if "copy" not in results or row["bytes"] < 1 << 20:
            continue
        limit = min(median(results[name]["rounds"]) for name in ("copy", "copy_stream") if name in results)
        share = {name: limit / median(results[name]["rounds"]) for name in ("tutti_symmetric", "tutti_private") if name in results}
        lines.append(f"| {size_text(row['bytes'])}, {row['state']} | {time_text(limit)} | {row['bytes'] / limit:.1f} GB/s | " +
                     " | ".join(f"{share[name]:.0%}" if name in share else "–" for name in ("tutti_symmetric", "tutti_private")) + " |")
    if not lines:
        return []
    head = ["#### Next to the limit", "",
            "An all-reduce must read every input once and write every output once: as many bytes as a copy of the same size on every rank. The limit is such a "
            "copy by all ranks at once, measured in the same turns, the quicker of memcpy and stores past the cache.", "",
            "| size | copy on all ranks | of each rank | Tutti, symmetric: share | Tutti, private: share |", "|---|---|---|---|---|", *lines, ""]
    trips = document["handover"].get(str(ranks))
    if trips:
        eight = pick(document, operation="all_reduce", type="f32", mode="isolated", state="clean", ranks=ranks, bytes=8)
        more = f" An 8-byte all-reduce takes {median(eight[0]['results']['tutti_symmetric']['rounds']) / median(trips):.1f} of them." if eight else ""
        head.append(f"One cache line passes from rank 0 to rank 1 in {median(trips):.0f} ns ({min(trips):.0f} – {max(trips):.0f}).{more}")
        head.append("")
    overhead = document.get("overhead", {}).get(str(ranks))
    if overhead:
        pairs = list(zip(overhead["whole"], overhead["bare"]))  # turns that follow each other
        ratios = sorted(whole / bare for whole, bare in pairs)
        head += ["Deadlines, the check for mismatched calls, the look at the others' life and the flight recorder, in an 8-byte all-reduce (streaming) beside the "
                 f"same code without them, turn by turn: {median([whole - bare for whole, bare in pairs]):.0f} ns, ratio **{median(ratios):.2f}** (target 1.05; "
                 f"quartiles {ratios[len(ratios) // 4]:.2f} – {ratios[3 * len(ratios) // 4]:.2f}).", ""]
    return head


def floor_part(document, ranks):
    """What floor.c needs: the flags and copies that nobody can do without, and no more."""
    lines = []
    for row in document["rows"]:
        results, (_, best) = row["results"], best_peer(row)
        mine = [name for name in ("tutti", "tutti_symmetric", "tutti_private") if name in results]
        if row["ranks"] != ranks or "floor" not in results or not mine or not best:
            continue
        floor = median(results["floor"]["rounds"])
        what = row["operation"] + (f", {size_text(row['bytes'])}" if row["bytes"] else "")
        lines.append(f"| {what}, {row['mode']}, {row['state']} | {figure(results['floor'])} | {floor / best:.2f} | "
                     f"{median(results[mine[-1]]['rounds']) / floor:.2f} |")
    if not lines:
        return []
    return ["#### Next to the floor", "",
            "The floor is `bench/peers/floor.c`: each operation by the cache lines and copies through shared memory that two processes cannot do without, on private buffers, with no "
            "check, number, deadline, recorder or look at who lives; in the same turns. Tutti's column is that of private buffers.", "",
            "| operation | floor | floor / best peer | Tutti / floor |", "|---|---|---|---|", *lines, ""]


def small_types_part(document, ranks):
    lines = []
    for row in pick(document, operation="all_reduce", mode="isolated", state="dirty", ranks=ranks):
        if row["type"] == "f32":
            continue
        same = pick(document, operation="all_reduce", type="f32", mode="isolated", state="dirty", ranks=ranks, bytes=row["bytes"])
        if not same:
            continue
        cells = []
        for name in ("tutti_symmetric", "tutti_private"):
            cells.append(f"{figure(row['results'][name])}, {median(row['results'][name]['rounds']) / median(same[0]['results'][name]['rounds']):.2f} of f32")
        lines.append(f"| {row['type']}, {size_text(row['bytes'])} | " + " | ".join(cells) + " |")
    return ["#### 16-bit floats, per byte", "", "| | symmetric | private |", "|---|---|---|", *lines, ""] if lines else []


def others_part(document, ranks):
    rows = [row for row in document["rows"] if row["ranks"] == ranks and row["operation"] not in ("all_reduce", "barrier", "exchange")]
    return ["#### Other collectives", "", "Sizes are those of the larger buffer.", "", *table(document, rows, "operation"), ""] if rows else []


def growth_part(document, full):
    rows = [row for row in document["rows"] if row["mode"] == "streaming" and row["state"] == "clean" and row["type"] == "f32"]
    counts = sorted({row["ranks"] for row in rows})
    if len(counts) < 2:
        return []
    lines = ["### How it grows with ranks", "", "Streaming, clean; the ratio is Tutti's time (all-reduce: symmetric buffers) to the best peer's. An exchange sends half of its bytes to "
             "each neighbour in a ring and receives as much, as a batch, in private buffers. With more ranks than CPUs Open MPI runs with `mpi_yield_when_idle`.", "",
             "| ranks | barrier | 8 B | 64 KiB | 1 MiB | exchange 64 B | exchange 1 KiB | exchange 16 KiB |", "|---|---|---|---|---|---|---|---|"]
    for count in counts:
        cells = []
        for operation, size in (("barrier", 0), ("all_reduce", 8), ("all_reduce", 65536), ("all_reduce", 1 << 20),
                                ("exchange", 64), ("exchange", 1024), ("exchange", 16384)):
            found = [row for row in rows if row["ranks"] == count and row["operation"] == operation and row["bytes"] == size]
            mine = {"barrier": "tutti", "exchange": "tutti_private"}.get(operation, "tutti_symmetric")
            if not found or mine not in found[0]["results"]:
                cells.append("–")
                continue
            _, best = best_peer(found[0])
            own = median(found[0]["results"][mine]["rounds"])
            cells.append(f"{time_text(own)}" + (f", ratio {own / best:.2f}" if best else ""))
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def wrong_part(document):
    bad = [f"{label(document, name)}: {row['operation']} of {size_text(row['bytes'])}" for row in document["rows"] for name, one in row["results"].items()
           if one["wrong"] > 0]
    checked = sum(one["wrong"] >= 0 for row in document["rows"] for one in row["results"].values())
    missing = f" {document['left_out']} rows were left out for want of time." if document.get("left_out") else ""
    return [f"Results checked in {checked} turns: " + ("all right, Tutti's bit for bit." if not bad else "WRONG: " + "; ".join(bad)) + missing, ""]


def load_part(machine):
    if "load" not in machine:
        return []
    crowded = machine["load"][0] > machine["cpus"]
    return [f"- load average when it began: {', '.join(str(load) for load in machine['load'])}" +
            (": other work ran beside it, so that large sizes tell little" if crowded else "")]


def chapter(document, docs, stem):
    machine = document["machine"]
    caches = ", ".join(f"{level} {size}" for level, size in machine["caches"].items())
    lines = [f"## {machine['processor']}, {machine['cpus']} CPUs", "",
             f"- {machine['system']}, caches {caches}, memory {machine['memory']}",
             f"- commit {document['commit']}, {document['date']}, {document['rounds']} rounds",
             *load_part(machine),
             f"- `{document['command']}`",
             "- " + ", ".join(f"{name}: {version}" for name, version in document["versions"].items()), "", *wrong_part(document)]
    full = sorted({row["ranks"] for row in document["rows"] if row["operation"] == "all_reduce" and row["mode"] == "isolated"})
    for ranks in full:
        lines += [f"### All-reduce, f32 sum, {ranks} ranks", "", *barrier_part(document, ranks), *all_reduce_part(document, ranks, docs, stem),
                  *limit_part(document, ranks), *floor_part(document, ranks), *small_types_part(document, ranks), *others_part(document, ranks)]
    return lines + growth_part(document, full)


INTRODUCTION = """# How fast

Made by `bench/peers/report.py`; the numbers are those of `bench/peers/measure.py` on the machines named below.

Every figure is the median over the rounds of one run, with minimum and maximum in brackets; in a round each contender's figure is the median of its calls,
averaged over the ranks. All contenders are alive at once and take turns, row by row and round by round, on the same CPUs; those that wait
sleep. The *best peer* of a row is the quickest of Open MPI as it is installed, Open MPI with `ob1` and `vader`, MPICH and gloo. Ratios are Tutti's time to the best
peer's: below 1 Tutti is quicker; a target that is missed stands beside it.

MPI and Tutti go from one buffer to another; gloo's all-reduce and broadcast are in place, called through PyTorch, whose Python takes part of the
time of small messages. Results are checked in the first round of each row: Tutti's bit for bit against the serial loop in rank order, the peers' within
rounding, as they leave the order of additions open.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--docs", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs"))
    options = parser.parse_args()
    os.makedirs(os.path.join(options.docs, "performance"), exist_ok=True)
    lines = INTRODUCTION.splitlines()
    for path in options.files:
        with open(path) as file:
            lines += ["", *chapter(json.load(file), options.docs, os.path.splitext(os.path.basename(path))[0])]
    with open(os.path.join(options.docs, "performance.md"), "w") as file:
        file.write("\n".join(lines).rstrip() + "\n")
    print(os.path.normpath(os.path.join(options.docs, "performance.md")))


if __name__ == "__main__":
    main()

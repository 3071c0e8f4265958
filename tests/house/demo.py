# SPDX-License-Identifier: Apache-2.0
"""The demo, made short: a rank dies, the others go on, and the page holds what it shows."""
import html.parser
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

BUILD, SOURCE = pathlib.Path(os.environ["TEST_BUILD"]), pathlib.Path(os.environ["TEST_SOURCE"])
LIMIT = 240 * max(1, min(20, os.getloadavg()[0] / os.cpu_count()))  # seconds; a busy machine gets more
STEPS, RANKS, KILLED = 6, 4, 2


class Page(html.parser.HTMLParser):
    """Which elements have an id, and what is written in the scripts."""

    def __init__(self):
        super().__init__()
        self.ids, self.scripts, self.inside = set(), [], False

    def handle_starttag(self, tag, attributes):
        self.ids.update(value for name, value in attributes if name == "id")
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "script"

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data


def recorders(text):
    """The flight recorders in a piece of the page, by rank."""
    places = [match.start() for match in re.finditer(r'\{"tutti_flight_recorder"', text)]
    found = [json.JSONDecoder().raw_decode(text, place)[0] for place in places]
    return {one["rank"]: one for one in found} if len({one["rank"] for one in found}) == len(found) else {}


def goes_on(recorder, killed_ns):
    """A survivor's, around the death: it has worked before, it shrank, and worked again. One that came late to its next call was refused, and has nothing that failed."""
    entries = recorder["entries"]
    shrunk = [entry["ended_ns"] for entry in entries if entry["operation"] == "shrink" and entry["state"] == "completed"]
    return (len(shrunk) == 1 and entries[0]["ended_ns"] < killed_ns < shrunk[0]
            and any(entry["operation"] == "reduce_scatter" and entry["created_ns"] > shrunk[0] for entry in entries))


def main():
    if not (BUILD / "examples/gpt").exists():
        print("skipped: the example was not built")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "DEMO_STEPS": str(STEPS), "DEMO_LETTERS": "20", "DEMO_RESULTS": folder, "TUTTI_TIMEOUT": f"{LIMIT:.0f}s"}
        done = subprocess.run([SOURCE / "scripts/demo", BUILD], capture_output=True, text=True, errors="replace", timeout=LIMIT, env=environment)
        output = done.stdout + done.stderr
        page = Page()
        text = (pathlib.Path(folder) / "demo.html").read_text(errors="replace") if done.returncode == 0 else ""
        page.feed(text)
        data = next((script for script in page.scripts if script.startswith("const demo")), "")
        steps = re.findall(r"\[(\d+),([\d.]+),[\d.]+,(\d+)\]", data)
        losses, tokens = [float(step[1]) for step in steps], [int(step[2]) for step in steps]
        killed_ns = 1e9 * float((re.findall(r"killedAt: ([\d.]+)", data) or ["0"])[0])
        around, _, end = data.partition("around:")[2].partition("traces:")
        around, end = recorders(around), recorders(end)
        survivors = set(range(RANKS)) - {KILLED}
        checks = {
            "it ends well": done.returncode == 0,
            "the death is named": "rank 2" in output and "killed by signal 9" in output,
            "three ranks go on from memory": "3 ranks go on from memory" in output,
            "every step has a loss, and it falls": len(losses) == STEPS and losses[-1] < losses[0],
            "three ranks see fewer tokens in a step than four": tokens == [512 * RANKS] * (STEPS // 2) + [512 * (RANKS - 1)] * (STEPS - STEPS // 2),
            "the model is saved": (pathlib.Path(folder) / "gpt.safetensors").exists(),
            "the page has a place for everything": {"loss", "steps-around", "death", "time", "memory", "curve", "text"} <= page.ids,
            "three ranks tell their memory, and what they did at the end": data.count('"shards"') == 3 and set(end) == survivors,
            "all four tell what they did around the death": set(around) == set(range(RANKS)),
            "the dead one's time line ends where it was killed": KILLED in around and around[KILLED]["state"] == "dead"
            and around[KILLED]["entries"] and all(entry["created_ns"] < killed_ns for entry in around[KILLED]["entries"]),
            "the others' show steps before it, who was left, and steps after it": all(rank in around and goes_on(around[rank], killed_ns) for rank in survivors),
            "nothing is loaded from elsewhere": not re.search(r'(src|href)="', text),
        }
    for sentence, good in checks.items():
        print(f"{'ok     ' if good else 'FAILED '} {sentence}")
    passed = sum(map(bool, checks.values()))
    if passed < len(checks):
        print(output[-4000:])
    print(f"{passed} passed, {len(checks) - passed} failed, 0 skipped")
    return 0 if passed == len(checks) else 1


sys.exit(main())

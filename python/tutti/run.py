# SPDX-License-Identifier: Apache-2.0
"""python -m tutti.run -n 4 script.py: `tutti run`, which starts scripts by this very Python."""
import os
import pathlib
import shutil
import sys


def command():
    """The path of the command `tutti`: the package's own, or the one in PATH."""
    own = pathlib.Path(__file__).with_name("bin") / "tutti"
    found = str(own) if own.exists() else shutil.which("tutti")
    if found is None:
        raise SystemExit("tutti.run: the command tutti is neither in the package nor in PATH")
    return found


def main():
    arguments = sys.argv[1:]
    for at, argument in enumerate(arguments):
        if argument.endswith(".py") and os.path.exists(argument):
            arguments[at:at] = [sys.executable, "-u"]
            break
    path = command()
    os.execv(path, [path, "run", *arguments])


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""python -m tutti.run -n 4 script.py: `tutti run`, which starts scripts by this very Python."""
import os
import pathlib
import re
import shutil
import sys


def command():
    """The path of the command `tutti`: the package's own, or the one in PATH."""
    own = pathlib.Path(__file__).with_name("bin") / "tutti"
    found = str(own) if own.exists() else shutil.which("tutti")
    if found is None:
        raise SystemExit("tutti.run: the command tutti is neither in the package nor in PATH")
    return found


def execute(*arguments):
    """Goes on as the command. Importing the package has set the environment that its plug-ins need."""
    path = command()
    os.execv(path, [path, *arguments])


def tool():
    """The command `tutti` that pip installs: the package's own, with all that it can do."""
    execute(*sys.argv[1:])


def main():
    arguments = sys.argv[1:]
    for at, argument in enumerate(arguments):
        if re.fullmatch(r"python[\d.]*", pathlib.Path(argument).name):
            break  # who names a Python gets that one
        if argument.endswith(".py") and os.path.exists(argument):
            arguments[at:at] = [sys.executable, "-u"]
            break
    execute("run", *arguments)


if __name__ == "__main__":
    main()

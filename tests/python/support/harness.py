# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package share: which package is tested, and how tests run. Importing it makes `import tutti` find the package of the build tree;
with TEST_WHEEL the one of that virtual environment, where wheel.py could make it; with TEST_INSTALLED the one that pip has installed for this Python."""
import os
import pathlib
import signal
import sys
import time
import traceback

build = pathlib.Path(os.environ.get("TEST_BUILD", "build/release")).resolve()
wheel = pathlib.Path(os.environ.get("TEST_WHEEL", build / "wheel")).resolve()
installed = os.environ.get("TEST_INSTALLED") is not None
packages = None  # the folder that has the package, where this Python would not find it by itself


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def with_pytorch():
    """Goes on with a Python that has PyTorch, if TEST_PYTHON names one."""
    chosen = os.environ.pop("TEST_PYTHON", None)
    if chosen is not None:
        os.execv(chosen, [chosen, *sys.argv])


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in the background so, and so would all that is started here
    signal.signal(signal.SIGINT, signal.default_int_handler)
if os.environ.get("TEST_SANITIZE"):
    skip("a library with a sanitizer cannot be loaded late")
if not installed:
    if not (build / "python" / "tutti" / "_interface.py").exists():
        skip("the Python package was not built")
    packages = build / "python"
    if "TEST_WHEEL" in os.environ and list(wheel.glob("lib/python*/site-packages/tutti")):
        packages = next(wheel.glob("lib/python*/site-packages"))
        os.environ.pop("TUTTI_PLUGIN_PATH", None)  # it has its own
    sys.path.insert(0, str(packages))
    os.environ["PYTHONPATH"] = os.pathsep.join((str(packages), str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")))


def raises(kind, function, *arguments, **named):
    """What it raises, which must be of that kind."""
    try:
        function(*arguments, **named)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def run(tests):
    """Runs tests, and ends with what came of them. Arguments choose by parts of names."""
    passed = failed = 0
    for test in tests:
        if sys.argv[1:] and not any(part in test.__name__ for part in sys.argv[1:]):
            continue
        begin = time.monotonic()
        try:
            test()
            passed += 1
            print(f"ok      {test.__name__} ({time.monotonic() - begin:.2f} s)", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {test.__name__}\n{traceback.format_exc()}", flush=True)
    print(f"{passed} passed, {failed} failed, 0 skipped")
    sys.exit(failed > 0)

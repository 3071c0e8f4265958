#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How the C++ part of the backend is had: TUTTI_TORCH_SHIM, compilers that are missing or fail, and the cache. What it does is torch_peer.py's subject."""
import contextlib
import io
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import raises, run, skip, with_pytorch  # noqa: E402

with_pytorch()
try:
    import torch
    import torch.distributed as dist
except ImportError:
    skip("PyTorch is not installed (make test-peers installs it)")
import tutti.torch  # noqa: E402
from tutti.torch import shim  # noqa: E402


@contextlib.contextmanager
def place(**environment):
    """An empty cache, those variables, and what is said."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({"XDG_CACHE_HOME": folder, **environment})
        shim._loaded = None
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                yield pathlib.Path(folder), said
        finally:
            os.environ.clear()
            os.environ.update(before)
            shim._loaded = None


def another_value_is_an_error():
    with place(TUTTI_TORCH_SHIM="yes"):
        assert "auto, on or off" in str(raises(ValueError, shim.load))


def off_builds_nothing():
    with place(TUTTI_TORCH_SHIM="off", CXX="/no/compiler") as (folder, said):
        assert shim.load() is None and not said.getvalue() and not list(folder.iterdir())


def without_a_compiler_the_backend_is_python():
    with place(TUTTI_TORCH_SHIM="auto", CXX="/no/compiler") as (_, said):
        dist.init_process_group("tutti", rank=0, world_size=1, store=dist.HashStore())
        assert "/no/compiler" in said.getvalue() and isinstance(dist.group.WORLD, tutti.torch.ProcessGroup), said.getvalue()
        dist.all_reduce(tensor := torch.ones(2))
        assert tensor[0] == 1
        dist.destroy_process_group()
        assert shim.load() is None and said.getvalue().count("/no/compiler") == 1  # asked for once


def on_without_a_compiler_is_an_error():
    with place(TUTTI_TORCH_SHIM="on", CXX="/no/compiler"):
        text = str(raises(RuntimeError, dist.init_process_group, "tutti", rank=0, world_size=1, store=dist.HashStore()))
        assert "/no/compiler" in text and "TUTTI_TORCH_SHIM" in text, text


def a_compiler_that_fails_is_asked_once():
    with place(TUTTI_TORCH_SHIM="auto") as (folder, said):
        compiler = folder / "compiler"
        compiler.write_text(f"#!/bin/sh\necho once >>{folder}/count\necho 'backend.cpp:1: error: it is too late today'\nexit 1\n")
        compiler.chmod(0o700)
        os.environ["CXX"] = str(compiler)
        for _ in range(2):
            shim._loaded = None
            assert shim.load() is None
        assert said.getvalue().count("too late today") == 2 and (folder / "count").read_text() == "once\n", said.getvalue()
        (folder / "tutti" / "torch" / f"making-{shim._name()}-left").mkdir()  # by a process that was killed while it built
        os.environ["TUTTI_TORCH_SHIM"] = "on"  # tries again
        shim._loaded = None
        assert "too late today" in str(raises(RuntimeError, shim.load)) and (folder / "count").read_text() == "once\nonce\n"
        assert not list((folder / "tutti" / "torch").glob("making-*")) and not list((folder / "tutti" / "torch").glob("*.so"))


def what_was_built_badly_is_not_loaded():
    with place(TUTTI_TORCH_SHIM="auto", CXX="true") as (folder, said):
        (folder / "tutti" / "torch").mkdir(parents=True, mode=0o700)
        (folder / "tutti").chmod(0o700)
        (folder / "tutti" / "torch" / f"{shim._name()}.so").write_bytes(b"this is no library")
        assert shim.load() is None and "cannot be loaded" in said.getvalue(), said.getvalue()


def a_cache_that_others_can_write_is_not_used():
    with place(TUTTI_TORCH_SHIM="auto", CXX="true") as (folder, said):
        (folder / "tutti" / "torch").mkdir(parents=True)
        (folder / "tutti" / "torch").chmod(0o777)
        assert shim.load() is None and "not this user's alone" in said.getvalue(), said.getvalue()


if __name__ == "__main__":
    run((another_value_is_an_error, off_builds_nothing, without_a_compiler_the_backend_is_python, on_without_a_compiler_is_an_error,
         a_compiler_that_fails_is_asked_once, what_was_built_badly_is_not_loaded, a_cache_that_others_can_write_is_not_used))

"""torch_npu over a stand-in for CANN.

Real: torch_npu's Python, its allocator, streams and generators, and its ProcessGroupHCCL. Simulated: CANN's runtime
(``cann/*.cpp``: host memory, in-order queues), its kernels (``operators.py``) and HCCL's transport (unix sockets).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import subprocess
import warnings
from pathlib import Path

SOURCES = Path(__file__).parent / "cann"

# The libraries of CANN that libtorch_npu names. All symbols are in the first one, which they load.
LIBRARY = "libcann_stand_in"
LIBRARIES = ("libascendcl", "libhccl", "libacl_op_compiler", "libacl_tdt_channel", "libge_runner", "libgraph")


def build(folder: Path) -> Path:
    """Compile the stand-in, unless a folder in `folder` has it already. Returns that one.

    Raises:
        subprocess.CalledProcessError: g++ failed; it says why.
    """
    include = Path(str(importlib.metadata.distribution("torch-npu").locate_file("torch_npu/include")))
    sources = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in [*sources, Path(__file__)])).hexdigest()
    built = folder / digest[:16]
    if built.exists():
        return built
    making = folder / f"{built.name}.{os.getpid()}"
    making.mkdir(parents=True)
    shared = ["g++", "-shared", "-fPIC", f"-L{making}", "-Wl,-rpath,$ORIGIN"]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-pthread", f"-I{include}", f"-I{include}/third_party/acl/inc"]
    units = [str(source) for source in sources if source.suffix == ".cpp"]
    subprocess.run([*shared, *flags, *units, "-o", f"{making}/{LIBRARY}.so"], check=True)
    for library in LIBRARIES:
        named = [f"-Wl,-soname,{library}.so", "-Wl,--no-as-needed", "-lcann_stand_in", "-o", f"{making}/{library}.so"]
        subprocess.run([*shared, "-x", "c++", "/dev/null", *named], check=True)
    making.rename(built)
    return built


def load(folder: Path) -> None:
    """Import torch_npu over the stand-in that is in `folder`, with operators that work. For a process of its own."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    for library in LIBRARIES:
        ctypes.CDLL(f"{folder}/{library}.so", ctypes.RTLD_GLOBAL)
    import torch
    import torch_npu  # noqa: F401

    torch.npu.set_compile_mode(jit_compile=False)  # what is compiled has weights in layouts of its own

    from tests.npu.operators import redirect_operators

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch_npu's kernels are overridden
        redirect_operators()


def last_errors() -> str:
    """What the stand-in has complained of in this process; torch_npu does not repeat it everywhere."""
    function = ctypes.CDLL("libascendcl.so").aclGetRecentErrMsg
    function.restype = ctypes.c_char_p
    return function().decode()

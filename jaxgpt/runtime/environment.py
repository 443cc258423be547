"""What must stand in the environment before JAX starts: log levels, platform, memory pages.

Nothing here imports JAX, which reads its environment once, when it is imported.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

# Only our own lines are printed: TensorFlow and the XLA runtime announce themselves at "info", and
# TensorFlow's oneDNN notice ignores the level (it runs no arithmetic here, so oneDNN is no loss).
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0", "GRPC_VERBOSITY": "ERROR"}
# A run has its GPU to itself; of its memory JAX would take three quarters. The rest is for what is
# not allocated by JAX: the CUDA context, NCCL and cuDNN.
GPU_SHARE = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
HUGE_PAGES = "glibc.malloc.hugetlb"
REEXEC_GUARD = "JAXGPT_REEXEC"
# What the drivers of accelerators leave in /dev: NVIDIA's (dxg: in WSL), AMD's, and those of TPUs.
DEVICE_FILES = ("/dev/nvidia*", "/dev/dxg", "/dev/kfd", "/dev/accel*", "/dev/vfio/*")
# Set by whoever hands out accelerators; settings of a library, as TPU_LIBRARY_PATH, do not count.
DEVICE_VARIABLES = (
    "TPU_NAME",
    "TPU_WORKER_ID",
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_ADDRESSES_PATH",
    "TPU_ACCELERATOR_TYPE",
    "JAX_FORCE_TPU_INIT",
)


def prepare_environment(argv: Sequence[str] | None = None) -> None:
    """Settle what must stand in the environment before JAX starts; call it first in the command.

    Log levels, and the share of a GPU's memory, are set unless the user set them. On Linux without
    an accelerator so is JAX_PLATFORMS=cpu: installed plugins for GPUs and TPUs would look for
    theirs first, wait for a metadata server and fill a page with warnings. On Linux the same
    command is then executed once more with `glibc.malloc.hugetlb=1`: XLA:CPU takes its work buffers
    afresh from malloc at each step, and 2 MiB pages make that 4 to 6 times cheaper.
    `JAXGPT_NO_REEXEC=1` prevents it, and so does being called from Python (JAX already there, or
    `argv` not the process's own arguments).
    """
    for name, value in (QUIET | GPU_SHARE).items():
        os.environ.setdefault(name, value)
    if sys.platform == "linux" and not may_have_accelerator(
        (path for pattern in DEVICE_FILES for path in glob.iglob(pattern)),
        os.environ,
        _plugins(),
    ):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    called_from_python = "jax" in sys.modules or sys.gettrace() is not None
    not_the_command = argv is not None and list(argv) != sys.argv[1:]
    not_repeatable = sys.argv[0] in ("", "-", "-c")
    if called_from_python or not_the_command or not_repeatable or not _huge_pages_would_help():
        return
    tunables = ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), f"{HUGE_PAGES}=1"]))
    environment = os.environ | {"GLIBC_TUNABLES": tunables, REEXEC_GUARD: "1"}
    with contextlib.suppress(OSError):  # then it runs as it is, only slower
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def may_have_accelerator(
    files: Iterable[str], environ: Mapping[str, str], plugins: Iterable[str] = ()
) -> bool:
    """Tell whether JAX should look for more than the CPU; in doubt it should.

    `files` are those of `DEVICE_FILES` that exist, `plugins` the packages in `jax_plugins`: of a
    plugin for other hardware than GPUs of NVIDIA and AMD it is not known what it leaves where.
    """
    known = ("xla_cuda", "xla_rocm")
    return (
        any(True for _ in files)
        or any(environ.get(name) for name in DEVICE_VARIABLES)
        or environ.get("SLURM_GPUS_ON_NODE", "0") != "0"
        or any(not name.startswith(known) for name in plugins)
    )


def _plugins() -> list[str]:
    """Return the names of the packages in the namespace `jax_plugins`; nothing is imported."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = spec.submodule_search_locations or () if spec else ()
    paths = [path for folder in folders for path in Path(folder).glob("*")]
    return [path.name for path in paths if not path.name.startswith(("_", "."))]


def _huge_pages_would_help() -> bool:
    """Tell whether setting the tunable changes anything: glibc >= 2.35 and pages on request."""
    declined = os.environ.get("JAXGPT_NO_REEXEC", "0") not in ("", "0")
    settled = HUGE_PAGES in os.environ.get("GLIBC_TUNABLES", "") or REEXEC_GUARD in os.environ
    if sys.platform != "linux" or declined or settled:
        return False
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        pages = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except (OSError, ValueError):
        return False
    # With [always] the kernel gives them without being asked, with [never] not even then.
    return name == "glibc" and numbers >= (2, 35) and "[madvise]" in pages

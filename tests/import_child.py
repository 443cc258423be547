"""Import a Hugging Face folder and print by how many MiB that raised the peak of memory."""

from __future__ import annotations

import sys
from pathlib import Path

from jaxgpt.interop import hf


def peak() -> float:
    """Return the peak of resident memory so far, MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no VmHWM")


def main(small: str, large: str, out: str) -> None:
    hf.import_run(small, f"{out}/small", say=lambda line: None)  # what libraries take at first
    before = peak()
    hf.import_run(large, f"{out}/large", say=lambda line: None)
    print(peak() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])

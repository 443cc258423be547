"""Import or export a model, a small one first; print by how many MiB the second raised the peak."""

from __future__ import annotations

import sys
from pathlib import Path

from jaxgpt.interop import export, hf


def peak() -> float:
    """Return the peak of resident memory so far, MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no VmHWM")


def quiet(line: str) -> None:
    pass


def main(verb: str, small: str, large: str, out: str) -> None:
    def run(source: str, name: str) -> None:
        if verb == "import":
            hf.import_run(source, f"{out}/{name}", say=quiet)
        else:
            export.export_run(source, f"{out}/{name}", check="none", say=quiet)

    run(small, "small")  # what libraries take at first
    before = peak()
    run(large, "large")
    print(peak() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The hosts of a run: started as the command line and the launcher say, or only shown."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import jax

from jaxgpt.commands.terminal import say, show, table
from jaxgpt.config import Config
from jaxgpt.runtime import hosts, launchers
from jaxgpt.runtime.launchers import Launch
from jaxgpt.runtime.leaving import error_line


def start(args: argparse.Namespace) -> tuple[Launch | None, tuple[str, ...]]:
    """Start the processes of a run; return how they were found, and their host names in order."""
    flags = launchers.Flags(args.coordinator, args.process, args.processes)
    launch = launchers.detect(os.environ, flags, on_tpu=hosts.on_tpu())
    if launch is not None and launch.kind == "leftover":
        say(f"{launch.source}; {launchers.OFF}, and says nothing")
    return hosts.start(launch, say=lambda line: print(error_line(line), file=sys.stderr))


def dry_run(args: argparse.Namespace, cfg: Config) -> dict[str, Any]:
    raise NotImplementedError

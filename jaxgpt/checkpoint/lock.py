"""One writer per checkpoint folder: an advisory lock that the system drops when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO

from jaxgpt.errors import ConfigError

NAME = "lock"


def claim(root: Path, advice: str = "stop it or use another run.dir") -> IO[str]:
    """Lock `root` for the caller and return the open file; closing it, or dying, gives it back.

    Raises ConfigError naming host, process and start of another holder, and `advice`. On a file
    system without locks nothing is locked.
    """
    file = (root / NAME).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            return file
        file.seek(0)
        holder = file.read(1024).strip() or "which just started"
        file.close()
        raise ConfigError(f"{root}: in use by a job {holder}; {advice}") from None
    file.truncate(0)
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    entry = {"host": socket.gethostname(), "pid": os.getpid(), "since": started}
    file.write(json.dumps(entry) + "\n")
    file.flush()
    return file

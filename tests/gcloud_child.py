"""Stands in for gcloud: a slice is the folder $CLOUD, with its state and a home for each host.

A file `offline` means that the cloud does not answer this time, and one with text that it never
does. Commands for a host run in its home; a file `deaf` there means that it does not answer this
time. `next` holds the states that the slice will have, `refusal` why none can be made. $INTERRUPTED
is the exit code after Ctrl-C, or `lost`, as one is that comes while Python starts; `following` is
there when what the first host prints is asked for.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

cloud = Path(os.environ["CLOUD"])
verb, words = sys.argv[4], sys.argv[5:]
options = {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}
state_file, coming, refusal = cloud / "state", cloud / "next", cloud / "refusal"
state = state_file.read_text().strip() if state_file.exists() else ""
hosts = sorted(cloud.glob("host*"))
if options.get("--worker") == "0":
    hosts = hosts[:1]


def pass_on(source: BinaryIO, to: BinaryIO) -> None:
    for line in source:
        to.write(line)
        to.flush()


def run(host: Path) -> int:
    """Run a command on a host, in a session of its own; what it prints is passed on.

    Both streams are, as by ssh: what a command says after the connection has ended reaches nobody.
    """
    if (host / "deaf").exists():
        (host / "deaf").unlink()
        return 255
    remote = subprocess.Popen(
        ["bash", "-c", options["--command"]],
        cwd=host,
        env=os.environ | {"HOME": str(host)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    errors = threading.Thread(target=pass_on, args=(remote.stderr, sys.stderr.buffer), daemon=True)
    errors.start()
    pass_on(remote.stdout, sys.stdout.buffer)
    errors.join()
    return remote.wait()


# Not as KeyboardInterrupt, which Python drops where it comes inside one of its own callbacks.
interrupted = os.environ.get("INTERRUPTED", "130")
signal.signal(
    signal.SIGINT,
    signal.SIG_IGN if interrupted == "lost" else lambda *_: os._exit(int(interrupted)),
)
code = 0
if verb == "describe":
    if (cloud / "offline").exists():
        if not (cloud / "offline").read_text():
            (cloud / "offline").unlink()
        sys.exit("ERROR: gcloud crashed (ConnectionError): reset by peer")
    if not state:
        sys.exit("ERROR: (gcloud...describe) NOT_FOUND: Resource 'pod' was not found")
    print(state)
    if coming.exists() and (states := coming.read_text().split()):
        state_file.write_text(states[0])
        coming.write_text("\n".join(states[1:]))
elif verb == "create":
    if refusal.exists():
        sys.exit(refusal.read_text())
    for number in range(int(os.environ["HOSTS"])):
        (cloud / f"host{number}").mkdir(exist_ok=True)
    state_file.write_text(os.environ.get("NEW", "ACTIVE"))
elif verb == "delete":
    for host in hosts:
        host.rename(cloud / f"gone-{len(list(cloud.glob('gone-*')))}")
    state_file.unlink(missing_ok=True)
elif state != "ACTIVE":
    code = 1
elif verb == "scp":
    for host in hosts:
        shutil.copy(words[0], host / words[1].partition(":")[2])
elif verb == "ssh":
    if options["--command"].endswith(" follow"):
        (cloud / "following").touch()
    code = max([run(host) for host in hosts], default=1)
sys.stdout.flush()
os._exit(code)

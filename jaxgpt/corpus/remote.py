"""Files with a scheme (gs://, s3://, file://, memory:// and others) through fsspec.

Errors are those of the file system in question, of any type; `files` gives them a name and a
reason. fsspec's own walk and glob silently omit folders that they fail to list, so folders are
listed here.
"""

from __future__ import annotations

import datetime
import glob
import os
import re
from typing import Any

READ_AHEAD = 8 << 20  # bytes per request to an object store: hides its 50 to 100 ms of latency

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_VERSIONS = ("generation", "ETag", "etag", "VersionId", "md5Hash")  # of content, the surest first
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


def is_remote(path: str) -> bool:
    """Return whether a path has a scheme, such as gs://, s3:// or file://."""
    return _SCHEME.match(path) is not None


def open_file(path: str) -> Any:
    """Return a file opened for reading bytes, which can seek."""
    system, name = _resolve(path)
    return system.open(name, "rb", block_size=READ_AHEAD)


def exists(path: str) -> bool:
    """Return whether there is a file or folder of this name now."""
    system, name = _resolve(path)
    system.invalidate_cache(name)
    return system.exists(name)


def read_info(path: str) -> dict[str, Any]:
    """Return what fsspec says of a file now: at least its name, size and type."""
    system, name = _resolve(path)
    system.invalidate_cache(name)  # a cached listing would hide that the file has changed
    return system.info(name)


def find_files(source: str) -> list[tuple[str, dict[str, Any]]]:
    """Return URL and info of the files that a file, folder or pattern stands for, in byte order."""
    system, name = _resolve(source)
    system.invalidate_cache()
    try:
        info = system.info(name)
    except FileNotFoundError:
        found = _matching(system, name) if glob.has_magic(name) else {}
    else:
        found = _below(system, name, None) if info["type"] == "directory" else {name: info}
    urls = {
        system.unstrip_protocol(name): info
        for name, info in found.items()
        if info["type"] != "directory" and not name.endswith("/")  # a console's "empty folder"
    }
    return sorted(urls.items(), key=lambda item: os.fsencode(item[0]))


def version(info: dict[str, Any]) -> str:
    """Return what changes when the content of a file does, in words of its store; "" for none.

    It is the same from a listing and from a question about one file.
    """
    for key in _VERSIONS:
        if info.get(key):
            return str(info[key])
    for key in _TIMES:
        if time := info.get(key):
            seconds = time.timestamp() if isinstance(time, datetime.datetime) else time
            return f"{seconds:.6f}" if isinstance(seconds, float | int) else str(seconds)
    return ""


def _resolve(path: str) -> tuple[Any, str]:
    import fsspec

    return fsspec.core.url_to_fs(path)


def _matching(system: Any, pattern: str) -> dict[str, dict[str, Any]]:
    from fsspec.utils import glob_translate

    fixed = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
    depth = None if "**" in pattern else pattern[len(fixed) :].count("/")
    matches = re.compile(glob_translate(pattern)).match
    try:
        found = _below(system, fixed, depth)
    except FileNotFoundError:
        return {}
    return {name: info for name, info in found.items() if matches(name)}


def _below(system: Any, folder: str, depth: int | None) -> dict[str, dict[str, Any]]:
    """Return all files below a folder, or down to `depth` levels; raise where one is not listed."""
    if depth is None and _has_own_find(system):
        return system.find(folder, detail=True)  # of an object store: a request per 1000 files
    found, todo = {}, [(folder, 1)]
    while todo:
        folder, level = todo.pop()
        for info in system.ls(folder, detail=True):
            if info["type"] != "directory":
                found[info["name"]] = info
            elif info["name"].strip("/") != folder.strip("/") and level != depth:
                todo.append((info["name"], level + 1))
    return found


def _has_own_find(system: Any) -> bool:
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    if isinstance(system, AsyncFileSystem):
        return type(system)._find is not AsyncFileSystem._find
    return type(system).find is not AbstractFileSystem.find

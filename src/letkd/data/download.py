"""Files from the web that arrive whole or not at all, and go on where a download broke off."""

import errno
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from letkd.data.pictures import shown
from letkd.errors import DataError
from letkd.progress import bar

CHUNK = 1 << 20
TRIES = 5  # in a row without a byte more
SLOWEST, WINDOW = 1_000, 60.0  # bytes per second, taken over so many seconds
FAULTS = (http.client.HTTPException, OSError, ValueError)  # of a connection; ValueError for addresses and headers that are none


class _WebOnly(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to the web, and to nowhere else."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        secure = req.full_url.startswith("https:")
        if not newurl.startswith("https://" if secure else ("http://", "https://")):
            raise DataError(
                f"{req.full_url} redirects to {newurl[:200]!r}, which is no web address as safe as its own: refused"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """One that knows the web alone: no local files, no FTP."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
        _WebOnly(),
    ):
        opener.add_handler(handler)
    opener.addheaders = [("User-Agent", "letkd"), ("Accept-Encoding", "identity")]
    return opener


def md5_of(path: Path) -> str:
    """The file's MD5: what the data sets' authors publish. It tells damage, and no attacker knows a second file with the same."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


class _Pace:
    """Ends a download that is too slow to arrive, over all its connections.

    Args:
        window: seconds in which `SLOWEST` bytes per second must come.
    """

    def __init__(self, url: str, window: float):
        self.url, self.window = url, window
        self.since, self.had, self.came = time.monotonic(), 0, 0

    def count(self, n: int) -> None:
        """Some bytes came, or none."""
        self.came += n
        seconds = time.monotonic() - self.since
        if seconds < self.window:
            return
        rate = (self.came - self.had) / seconds
        if rate < SLOWEST:
            raise DataError(
                f"{self.url} sends {rate:,.0f} bytes per second, too few to wait for; what came is kept: run the same command "
                "again later to resume"
            )
        self.since, self.had = time.monotonic(), self.came


def download(url: str, path: Path, *, md5: str, limit: int, timeout: float = 30.0, window: float = WINDOW) -> None:
    """Fetches `url` into `path`; what has arrived waits in a `.part` file beside it, from which the next call goes on.

    Args:
        md5: checksum; a file that has another does not get its name.
        limit: bytes at most.
        timeout: seconds without a byte.
        window: seconds over which fewer than `SLOWEST` bytes per second are too few.
    """
    part, tag = (path.with_name(path.name + suffix) for suffix in (".part", ".part.tag"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _fetch(url, part, tag, limit, timeout, _Pace(url, window))
        found = md5_of(part)
        if found != md5:
            part.unlink()
            raise DataError(f"{url} gave a file with the MD5 {found}, not the published {md5}; it was removed: try again later")
        os.replace(part, path)
        tag.unlink(missing_ok=True)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full; free some space and call it again, it goes on from there" if full else error
        raise DataError(f"{path} cannot be written ({why})") from error


def _fetch(url: str, part: Path, tag: Path, limit: int, timeout: float, pace: _Pace) -> None:
    """Until the whole file is in `part`, over as many connections as it takes."""
    opener, tries = _opener(), TRIES
    with bar(part.stem, None) as tick:
        while True:
            before = part.stat().st_size if part.exists() else 0
            whole, why = _connect(opener, url, part, tag, limit=limit, timeout=timeout, tick=tick, pace=pace)
            if whole:
                return
            now = part.stat().st_size if part.exists() else 0
            tries = TRIES if now > before else tries - 1
            pace.count(0)
            if not tries:
                raise DataError(
                    f"{url} broke off {TRIES} times after {now:,} bytes ({shown(why[:200])}); call it again, it goes on from there"
                )


def _connect(
    opener: urllib.request.OpenerDirector,
    url: str,
    part: Path,
    tag: Path,
    *,
    limit: int,
    timeout: float,
    tick: Callable[..., None],
    pace: _Pace,
) -> tuple[bool, str]:
    """One connection: whether the file is whole after it, and if not, why."""
    version = _version(tag)
    have = part.stat().st_size if part.exists() and version else 0
    request = urllib.request.Request(url)
    if have:
        # The rest only of the file that the part is of; the server sends another one from its beginning.
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", version)
    try:
        answer = opener.open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:
            if error.headers.get("Content-Range") == f"bytes */{have}":
                return True, ""
            tag.unlink()
            return False, "the part was longer than the file"
        reason = shown(str(error.reason)[:200])
        raise DataError(f"{url} answers {error.code} {reason}; look whether the address is still right") from None
    except FAULTS as error:
        if have:
            return False, str(error) or type(error).__name__
        why = shown(str(getattr(error, "reason", error))[:200]) or type(error).__name__
        raise DataError(f"{url} cannot be reached ({why}); is there a network?") from None
    with answer:
        at, total = _extent(url, answer, have)
        if total is not None and total > limit:
            raise DataError(f"{url} offers {total:,} bytes, more than the {limit:,} that this file may have: refused")
        if not at:
            _note(tag, answer)
        with part.open("r+b" if at else "wb") as file:
            file.seek(at)
            tick(advance=0)
            while True:
                try:
                    chunk = answer.read1(CHUNK)  # what is there: a read that waits for more loses it when the connection stalls
                except FAULTS as error:
                    return False, str(error) or type(error).__name__
                if not chunk:
                    break
                at += len(chunk)
                if at > limit:
                    raise DataError(f"{url} sent more than the {limit:,} bytes that this file may have: refused")
                file.write(chunk)
                pace.count(len(chunk))
                tick(f"{at / 1e6:.0f} of {(total or limit) / 1e6:.0f} MB", advance=0)
            file.flush()
            os.fsync(file.fileno())
    return (total is None or at == total), f"{at:,} of {total or 0:,} bytes came"


def _extent(url: str, answer: Any, have: int) -> tuple[int, int | None]:
    """Where in the file the answer begins, and the length of the whole file where it is said."""
    if answer.status == 206:
        found = re.fullmatch(r"bytes (\d{1,15})-\d{1,15}/(\d{1,15}|\*)", answer.headers.get("Content-Range", ""), re.ASCII)
        if found is None or int(found[1]) != have:
            raise DataError(f"{url} answered with another part than was asked for; remove the .part file and call it again")
        return have, None if found[2] == "*" else int(found[2])
    length = answer.headers.get("Content-Length") or ""
    return 0, int(length) if re.fullmatch(r"\d{1,15}", length, re.ASCII) else None


def _note(tag: Path, answer: Any) -> None:
    """Which version of the file this is, for `If-Range`, which takes no weak tags. Without a name there is no going on."""
    etag, modified = answer.headers.get("ETag", ""), answer.headers.get("Last-Modified", "")
    name = etag if etag.startswith('"') else modified
    if _VERSION.fullmatch(name):
        tag.write_text(name)
    else:
        tag.unlink(missing_ok=True)


_VERSION = re.compile(r"[ -~]{1,300}")  # what can stand in a header


def _version(tag: Path) -> str:
    """What `_note` wrote; nothing if it is not there, or is something else."""
    try:
        text = tag.read_text("ascii")
    except (OSError, ValueError):
        return ""
    return text if _VERSION.fullmatch(text) else ""

"""Downloads that are complete or absent, and resume after an interruption."""

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

from letkd.data.pictures import printable
from letkd.errors import DataError
from letkd.progress import bar

CHUNK = 1 << 20
TRIES = 5  # consecutive attempts without progress
SLOWEST, WINDOW = 1_000, 60.0  # bytes per second, measured over this many seconds
FAULTS = (http.client.HTTPException, OSError, ValueError)  # of a connection; ValueError for invalid addresses and headers


class _WebOnly(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https addresses only, and never from https to http."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        secure = req.full_url.startswith("https:")
        if not newurl.startswith("https://" if secure else ("http://", "https://")):
            raise DataError(
                f"{req.full_url} redirects to {newurl[:200]!r}, which is not a web address of the same security: refused"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """An opener for http and https only: no local files, no FTP."""
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
    """MD5 of a file, the checksum that the data sets' authors publish. It detects damage; no second preimage of MD5 is known."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


class _Pace:
    """Stops a download that is too slow, measured over all its connections.

    Args:
        window: seconds over which at least `SLOWEST` bytes per second must arrive.
    """

    def __init__(self, url: str, window: float):
        self.url, self.window = url, window
        self.since, self.before, self.received = time.monotonic(), 0, 0

    def count(self, n: int) -> None:
        """Count `n` received bytes, which may be 0."""
        self.received += n
        seconds = time.monotonic() - self.since
        if seconds < self.window:
            return
        rate = (self.received - self.before) / seconds
        if rate < SLOWEST:
            raise DataError(
                f"{self.url} sends {rate:,.0f} bytes per second, which is too slow; what arrived is kept: run the same command "
                "again later to resume"
            )
        self.since, self.before = time.monotonic(), self.received


def download(url: str, path: Path, *, md5: str, limit: int, timeout: float = 30.0, window: float = WINDOW) -> None:
    """Download `url` to `path`. Partial data is kept in a `.part` file next to it, from which the next call resumes.

    Args:
        md5: checksum; a file with another checksum is removed.
        limit: largest accepted size in bytes.
        timeout: seconds to wait for data.
        window: seconds over which the rate must be at least `SLOWEST` bytes per second.
    """
    part, tag = (path.with_name(path.name + suffix) for suffix in (".part", ".part.tag"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _fetch(url, part, tag, limit, timeout, _Pace(url, window))
        found = md5_of(part)
        if found != md5:
            part.unlink()
            raise DataError(f"{url} sent a file with the MD5 {found}, not the published {md5}; it was removed: try again later")
        os.replace(part, path)
        tag.unlink(missing_ok=True)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full; free some space and run the same command again to resume" if full else error
        raise DataError(f"{path} cannot be written ({why})") from error


def _fetch(url: str, part: Path, tag: Path, limit: int, timeout: float, pace: _Pace) -> None:
    """Download until `part` is complete, over as many connections as needed."""
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
                    f"{url} broke off {TRIES} times after {now:,} bytes ({printable(why[:200])}); run the same command again to resume"
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
    """Download over one connection: whether the file is complete, and the reason if not."""
    version = _version(tag)
    have = part.stat().st_size if part.exists() and version else 0
    request = urllib.request.Request(url)
    if have:
        # If the file has changed since, the server sends the new one from its beginning.
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
        reason = printable(str(error.reason)[:200])
        raise DataError(f"{url} answers {error.code} {reason}; check whether the address is still right") from None
    except FAULTS as error:
        if have:
            return False, str(error) or type(error).__name__
        why = printable(str(getattr(error, "reason", error))[:200]) or type(error).__name__
        raise DataError(f"{url} cannot be reached ({why}); check the network connection") from None
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
                    chunk = answer.read1(CHUNK)  # returns available data; read() would lose it if the connection stalls
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
    return (total is None or at == total), f"{at:,} of {total or 0:,} bytes arrived"


def _extent(url: str, answer: Any, have: int) -> tuple[int, int | None]:
    """Offset at which the answer starts, and the length of the whole file if known."""
    if answer.status == 206:
        found = re.fullmatch(r"bytes (\d{1,15})-\d{1,15}/(\d{1,15}|\*)", answer.headers.get("Content-Range", ""), re.ASCII)
        if found is None or int(found[1]) != have:
            raise DataError(f"{url} sent another part than requested; remove the .part file and run the same command again")
        return have, None if found[2] == "*" else int(found[2])
    length = answer.headers.get("Content-Length") or ""
    return 0, int(length) if re.fullmatch(r"\d{1,15}", length, re.ASCII) else None


def _note(tag: Path, answer: Any) -> None:
    """Store the version of the file for `If-Range`, which does not accept weak tags. Without a version a download cannot resume."""
    etag, modified = answer.headers.get("ETag", ""), answer.headers.get("Last-Modified", "")
    name = etag if etag.startswith('"') else modified
    if _VERSION.fullmatch(name):
        tag.write_text(name)
    else:
        tag.unlink(missing_ok=True)


_VERSION = re.compile(r"[ -~]{1,300}")  # characters allowed in a header


def _version(tag: Path) -> str:
    """The version that `_note` wrote; empty if there is none or it is not valid."""
    try:
        text = tag.read_text("ascii")
    except (OSError, ValueError):
        return ""
    return text if _VERSION.fullmatch(text) else ""

"""Downloads from a server of our own that behaves badly, and archives that mean harm."""

import contextlib
import gzip
import hashlib
import io
import os
import re
import tarfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from letkd.data import download as module
from letkd.data import get
from letkd.data import unpack as unpack_module
from letkd.data.archives import ARCHIVES, Archive
from letkd.data.download import download, md5_of
from letkd.data.get import get_data
from letkd.data.unpack import unpack
from letkd.errors import DataError

CONTENT = bytes(i * i % 251 for i in range(50_000))
MD5 = hashlib.md5(CONTENT).hexdigest()
LIMIT = 100_000


class Server:
    """Answers with `content`; what else it does, the test sets."""

    def __init__(self):
        self.content, self.etag, self.modified = CONTENT, '"one"', None
        self.cuts = []  # after how many bytes each of the next answers breaks off
        self.ranges, self.lie, self.redirect, self.status = True, 0, None, None
        self.asked = []
        self.raw = None  # writes the next answers by hand, as long as it is set
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, format, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/files/x.bin"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def answer(self, handler):
        self.asked.append(dict(handler.headers))
        if self.raw:
            self.raw(handler)
            handler.close_connection = True
            return
        if self.status or (self.redirect and handler.path != "/else"):
            handler.send_response(self.status or 302)
            if self.redirect:
                handler.send_header("Location", self.redirect)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        first, wanted = 0, handler.headers.get("Range")
        if wanted and self.ranges and handler.headers.get("If-Range") in (self.etag, self.modified):
            first = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
        if first and first >= len(self.content):
            handler.send_response(416)
            handler.send_header("Content-Range", f"bytes */{len(self.content)}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        body = self.content[first:]
        handler.send_response(206 if first else 200)
        if first:
            handler.send_header("Content-Range", f"bytes {first}-{len(self.content) - 1}/{len(self.content)}")
        for name, value in (("ETag", self.etag), ("Last-Modified", self.modified)):
            if value:
                handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body) + self.lie))
        handler.end_headers()
        handler.wfile.write(body[: self.cuts.pop(0)] if self.cuts else body)
        handler.close_connection = True


@pytest.fixture
def server(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    served = Server()
    yield served
    served.http.shutdown()
    served.http.server_close()


def fetch(server, path, md5=MD5, limit=LIMIT, timeout=5, **options):
    download(server.url, path, md5=md5, limit=limit, timeout=timeout, **options)


def left_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_arrives_whole(server, tmp_path):
    fetch(server, tmp_path / "new" / "x.bin")
    assert (tmp_path / "new" / "x.bin").read_bytes() == CONTENT
    assert left_in(tmp_path / "new") == ["x.bin"]
    assert len(server.asked) == 1


def test_cut_connections_go_on_where_they_broke_off(server, tmp_path):
    server.cuts = [10_000, 5_000]
    fetch(server, tmp_path / "x.bin")
    assert (tmp_path / "x.bin").read_bytes() == CONTENT
    assert [headers.get("Range") for headers in server.asked] == [None, "bytes=10000-", "bytes=15000-"]
    assert {headers["If-Range"] for headers in server.asked[1:]} == {'"one"'}


def test_the_next_call_goes_on_too(server, tmp_path):
    server.cuts = [10_000] + [0] * 5
    with pytest.raises(DataError, match=r"broke off 5 times after 10,000 bytes \(.*\); run the same command again to resume"):
        fetch(server, tmp_path / "x.bin")
    assert left_in(tmp_path) == ["x.bin.part", "x.bin.part.tag"]
    server.asked.clear()
    fetch(server, tmp_path / "x.bin")
    assert [headers.get("Range") for headers in server.asked] == ["bytes=10000-"]
    assert left_in(tmp_path) == ["x.bin"]


def test_a_server_without_ranges_sends_it_all_again(server, tmp_path):
    server.cuts, server.ranges = [10_000], False
    fetch(server, tmp_path / "x.bin")
    assert (tmp_path / "x.bin").read_bytes() == CONTENT


def test_another_version_of_the_file_is_not_glued_to_the_first(server, tmp_path):
    server.cuts = [10_000] + [0] * 5
    with pytest.raises(DataError, match="broke off"):
        fetch(server, tmp_path / "x.bin")
    server.content, server.etag = CONTENT[::-1], '"two"'
    fetch(server, tmp_path / "x.bin", md5=hashlib.md5(CONTENT[::-1]).hexdigest())
    assert (tmp_path / "x.bin").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize(
    ("etag", "modified", "goes_on"), [('W/"weak"', None, False), (None, None, False), (None, "Mon, 01 Jan 2024", True)]
)
def test_going_on_needs_a_name_for_the_version(server, tmp_path, etag, modified, goes_on):
    server.etag, server.modified, server.cuts = etag, modified, [10_000]
    fetch(server, tmp_path / "x.bin")
    assert ("Range" in server.asked[1]) == goes_on
    assert (tmp_path / "x.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(("extra", "requests"), [(0, 1), (3, 2)])
def test_a_part_that_is_whole_or_too_long(server, tmp_path, extra, requests):
    (tmp_path / "x.bin.part").write_bytes(CONTENT + b"0" * extra)
    (tmp_path / "x.bin.part.tag").write_text('"one"')
    fetch(server, tmp_path / "x.bin")
    assert (tmp_path / "x.bin").read_bytes() == CONTENT
    assert len(server.asked) == requests


def test_a_wrong_checksum_gets_no_name(server, tmp_path):
    with pytest.raises(DataError, match=f"a file with the MD5 {MD5}, not the published 0123; it was removed"):
        fetch(server, tmp_path / "x.bin", md5="0123")
    assert "x.bin" not in left_in(tmp_path)
    assert "x.bin.part" not in left_in(tmp_path)


def test_a_wrong_length(server, tmp_path):
    server.lie, server.ranges = 7, False
    with pytest.raises(DataError, match="broke off 5 times after 50,000 bytes"):
        fetch(server, tmp_path / "x.bin")
    server.ranges = True  # now it can say that nothing is missing
    fetch(server, tmp_path / "x.bin")
    assert (tmp_path / "x.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("announced", [True, False])
def test_more_than_it_may_have(server, tmp_path, announced):
    server.lie = 0 if announced else -40_000
    if not announced:
        server.cuts = [50_000]
    message = "offers 50,000 bytes, more than the 20,000" if announced else "sent a file with the MD5"
    with pytest.raises(DataError, match=message):
        fetch(server, tmp_path / "x.bin", limit=20_000)
    assert "x.bin" not in left_in(tmp_path)


def test_no_such_page_and_no_server(server, tmp_path):
    server.status = 404
    with pytest.raises(DataError, match=r"answers 404 Not Found; check whether the address is still right"):
        fetch(server, tmp_path / "x.bin")
    with pytest.raises(DataError, match=r"cannot be reached \(.*refused.*\); check the network connection"):
        download("http://127.0.0.1:9/x", tmp_path / "x.bin", md5=MD5, limit=LIMIT)
    with pytest.raises(DataError, match=r"cannot be reached \(unknown url type: file\)"):
        download((tmp_path / "x").as_uri(), tmp_path / "x.bin", md5=MD5, limit=LIMIT)


def test_redirects_stay_on_the_web(server, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENT)
    for target in (secret.as_uri(), "ftp://127.0.0.1/x", "data:,x"):
        server.redirect = target
        with pytest.raises(DataError, match=re.escape(target) + ".*(refused|not allowed)"):
            fetch(server, tmp_path / "x.bin")
        assert not (tmp_path / "x.bin").exists()
    server.redirect = "/else"
    fetch(server, tmp_path / "x.bin")
    assert (tmp_path / "x.bin").read_bytes() == CONTENT


def test_a_full_disk_keeps_what_came(server, tmp_path, monkeypatch):
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(module.os, "fsync", lambda descriptor: (_ for _ in ()).throw(full))
    with pytest.raises(
        DataError, match=r"x\.bin cannot be written \(the disk is full; free some space and run the same command again"
    ):
        fetch(server, tmp_path / "x.bin")
    assert "x.bin.part" in left_in(tmp_path)
    assert "x.bin" not in left_in(tmp_path)


@pytest.mark.slow
def test_a_stalled_connection_loses_no_byte(server, tmp_path):
    """Each sends a tenth and falls silent: with anything dropped the file would never be whole."""
    done = threading.Event()

    def stall(handler):
        first = int((re.search(r"\d+", handler.headers.get("Range", "0")))[0])
        status, extent = ("206", f"Content-Range: bytes {first}-49999/50000\r\n") if first else ("200", "")
        head = f'HTTP/1.1 {status} OK\r\nETag: "one"\r\n{extent}Content-Length: {50_000 - first}\r\n\r\n'
        handler.wfile.write(head.encode() + CONTENT[first : first + 5_000])
        done.wait(3)

    server.raw = stall
    try:
        fetch(server, tmp_path / "x.bin", timeout=0.15)
    finally:
        done.set()
    assert (tmp_path / "x.bin").read_bytes() == CONTENT
    assert [headers.get("Range") for headers in server.asked] == [None, *(f"bytes={at}-" for at in range(5_000, 50_000, 5_000))]


CHUNKED = b'HTTP/1.1 200 OK\r\nETag: "one"\r\nTransfer-Encoding: chunked\r\n\r\n'


@pytest.mark.parametrize(
    "body",
    [b"", b"zz\r\n", b"5\r\nab", b"3\r\nabcX", b"-5\r\nabc", b"f" * 70_000, b"5" * 5_000 + b"\r\n", b"ffffffffffff\r\nab"],
)
def test_faults_in_chunks_are_a_sentence(server, tmp_path, body):
    server.raw = lambda handler: handler.wfile.write(CHUNKED + body)
    with pytest.raises(
        DataError, match=r"broke off 5 times after \d+ bytes \(.+\); run the same command again to resume|with the MD5"
    ):
        fetch(server, tmp_path / "x.bin")
    assert not (tmp_path / "x.bin").exists()


def test_chunks_arrive(server, tmp_path):
    parts = [CONTENT[at : at + 7_001] for at in range(0, 50_000, 7_001)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    server.raw = lambda handler: handler.wfile.write(CHUNKED + body)
    fetch(server, tmp_path / "x.bin")
    assert (tmp_path / "x.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "target",
    [
        "http://[::1",
        "http://127.0.0.1:99999999/",
        "http://127.0.0.1:x/",
        "http://" + "a" * 70 + ".invalid/",
        "http://\x1b[31mred/",
        "http:///x",
        "/files/x.bin",
        "",
    ],
)
def test_faults_in_redirects_are_a_sentence(server, tmp_path, target):
    server.redirect = target or "\x20"
    with pytest.raises(DataError, match=r"cannot be reached \(.+\); check the network|answers 302 |redirects to") as caught:
        fetch(server, tmp_path / "x.bin")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5_000,
        b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-1/" + b"9" * 5_000,
        b"HTTP/1.1 404 \x1b[31mgone\x07",
        b"HTTP/1.1 xxx",
        b"\x00\xff",
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70_000,
        b"HTTP/1.1 200 OK\r\n" + b"A: a\r\n" * 200,
    ],
)
def test_answers_that_are_none_are_a_sentence(server, tmp_path, head):
    server.raw = lambda handler: handler.wfile.write(head + b"\r\n\r\n")
    with pytest.raises(DataError) as caught:
        fetch(server, tmp_path / "x.bin")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("tag", ['"a\n b"', '"\xe9"', "\x00", '"' + "x" * 400 + '"'])
def test_a_version_that_cannot_stand_in_a_header_is_none(server, tmp_path, tag):
    (tmp_path / "x.bin.part").write_bytes(b"old")
    (tmp_path / "x.bin.part.tag").write_bytes(tag.encode("latin1"))
    fetch(server, tmp_path / "x.bin")
    assert "Range" not in server.asked[0]
    assert (tmp_path / "x.bin").read_bytes() == CONTENT


def test_a_server_too_slow_to_wait_for(server, tmp_path):
    """Also one that gives a few bytes to each of many connections."""

    def drip(handler):
        handler.wfile.write(b'HTTP/1.1 200 OK\r\nETag: "one"\r\nContent-Length: 50000\r\n\r\n')
        with contextlib.suppress(OSError):
            for at in range(0, 300, 10):
                handler.wfile.write(CONTENT[at : at + 10])
                time.sleep(0.02)

    sentence = (
        r"sends \d+ bytes per second, which is too slow; what arrived is kept: run the same command again later to resume"
    )
    server.raw = drip
    with pytest.raises(DataError, match=sentence):
        fetch(server, tmp_path / "x.bin", window=0.2)
    had = (tmp_path / "x.bin.part").stat().st_size
    assert had > 0
    server.raw, server.cuts = None, [1] * 1_000_000
    with pytest.raises(DataError, match=sentence):
        fetch(server, tmp_path / "x.bin", window=0.2)
    assert (tmp_path / "x.bin.part").stat().st_size > had
    server.cuts = []
    fetch(server, tmp_path / "x.bin", window=0.2)
    assert (tmp_path / "x.bin").read_bytes() == CONTENT


def a_tar(path, *members, folder="set"):
    """Members are (name, content) or a TarInfo made by hand."""
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            archive.addfile(info, io.BytesIO(member[1]))
    return path


def a_zip(path, *members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def out_of(archive, root, limit=1000, files=10):
    return unpack(archive, root, folder="set", limit=limit, files=files)


MAKERS = {"x.tar.gz": a_tar, "x.zip": a_zip}
each_kind = pytest.mark.parametrize("kind", MAKERS)


@each_kind
def test_unpacking_makes_the_folder(tmp_path, kind):
    archive = MAKERS[kind](tmp_path / kind, ("set/a.txt", b"one"), ("set/deep/b.txt", b"two"))
    home = out_of(archive, tmp_path / "root")
    assert (home / "a.txt").read_bytes() == b"one"
    assert (home / "deep" / "b.txt").read_bytes() == b"two"
    assert left_in(tmp_path / "root") == ["set"]
    with pytest.raises(DataError, match="already exists; remove it to unpack"):
        out_of(archive, tmp_path / "root")


def refused(archive, tmp_path, message, **limits):
    root = tmp_path / "root"
    with pytest.raises(DataError, match=message):
        out_of(archive, root, **limits)
    assert left_in(root) == []
    assert not list(tmp_path.rglob("evil*"))


@each_kind
@pytest.mark.parametrize(
    "name", ["../evil", "set/../../evil", "/evil-letkd", "evil", "set\\..\\..\\evil", "C:evil", "set/../evil", ".."]
)
def test_names_that_lead_elsewhere(tmp_path, kind, name):
    archive = MAKERS[kind](tmp_path / kind, ("set/a.txt", b"one"), (name, b"evil"))
    refused(archive, tmp_path, "is outside set: refused, and nothing was kept")
    assert not os.path.exists("/evil-letkd")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar(tmp_path, kind):
    info = tarfile.TarInfo("set/link")
    info.type, info.linkname = kind, "../../evil"
    archive = a_tar(tmp_path / "x.tar.gz", ("set/a.txt", b"one"), info, ("set/link/evil", b"x"))
    refused(archive, tmp_path, "'set/link', a link or a device: refused")


def test_links_in_a_zip(tmp_path):
    info = zipfile.ZipInfo("set/link")
    info.external_attr = 0o120777 << 16
    refused(a_zip(tmp_path / "x.zip", (info, "../../evil")), tmp_path, "'set/link', a link or a device: refused")


@each_kind
def test_bombs(tmp_path, kind):
    bomb = MAKERS[kind](tmp_path / kind, ("set/a", b"0"), ("set/b", bytes(2000)))
    refused(bomb, tmp_path, "would unpack to more bytes than it may have: refused")
    many = MAKERS[kind](tmp_path / kind, *((f"set/{i}", b"") for i in range(20)))
    refused(many, tmp_path, "more than 10 entries: refused")


@pytest.mark.parametrize("announced", [1, 5000])
def test_a_zip_that_lies_about_a_length(tmp_path, announced):
    archive = a_zip(tmp_path / "x.zip", ("set/b", bytes(2000)))
    content = bytearray(archive.read_bytes())
    true = (2000).to_bytes(4, "little")
    assert content.count(true) == 2
    archive.write_bytes(bytes(content.replace(true, announced.to_bytes(4, "little"))))
    refused(
        archive,
        tmp_path,
        "damaged or cut short|shorter than its header says|longer than its header says|cannot be unpacked",
        limit=10_000,
    )


@each_kind
def test_the_same_name_twice(tmp_path, kind):
    with pytest.warns(UserWarning, match="Duplicate name") if kind == "x.zip" else open(os.devnull):
        archive = MAKERS[kind](tmp_path / kind, ("set/a", b"0"), ("set/a", b"1"))
    refused(archive, tmp_path, r"cannot be unpacked \(.*File exists")


@each_kind
def test_damaged_archives(tmp_path, kind):
    archive = MAKERS[kind](tmp_path / kind, ("set/a", os.urandom(900)), ("set/b", b"1"))
    content = archive.read_bytes()
    for broken in (content[:500], b"", b"no archive at all", content[:300] + bytes(100) + content[400:]):
        archive.write_bytes(broken)
        refused(archive, tmp_path, r"damaged or cut short|cannot be unpacked|shorter than its header says")
    refused(MAKERS[kind](tmp_path / kind), tmp_path, "does not contain set: it is another archive|damaged")


def test_a_changed_byte_that_only_the_checksum_shows(tmp_path):
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=0) as archive:  # stored as it is: a changed byte decompresses well
        info = tarfile.TarInfo("set/a")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"one"))
    assert path.read_bytes().count(b"one") == 1
    path.write_bytes(path.read_bytes().replace(b"one", b"two"))
    refused(path, tmp_path, r"cannot be unpacked \(CRC check failed")


def test_an_archive_that_does_not_end(tmp_path):
    path = a_tar(tmp_path / "x.tar.gz", ("set/a", b"one"))
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(20 << 20)))
    refused(path, tmp_path, "too much data follows its last file")


def test_getting_a_data_set(server, tmp_path, monkeypatch, said):
    archive = a_tar(tmp_path / "x.bin", ("set/a.txt", b"one"))
    server.content = archive.read_bytes()
    limits = {"limit": LIMIT, "unpacked": 1000, "files": 10}
    monkeypatch.setitem(get.ARCHIVES, "cifar10", Archive(server.url, md5_of(archive), "set", **limits))
    root = tmp_path / "data"
    assert get_data("cifar10", root) == root / "set"
    assert left_in(root) == ["set", "x.bin"]
    assert f"downloading {server.url}" in said()
    get_data("cifar10", root)
    assert "already exists" in said()
    (root / "set" / "a.txt").unlink()
    (root / "set").rmdir()
    get_data("cifar10", root)  # from the archive that lies there
    assert (root / "set" / "a.txt").read_bytes() == b"one"
    assert len(server.asked) == 1


def test_scraps_of_killed_calls_are_swept_and_nothing_else(server, tmp_path, monkeypatch):
    archive = a_tar(tmp_path / "x.bin", ("set/a.txt", b"one"))
    server.content = archive.read_bytes()
    limits = {"limit": LIMIT, "unpacked": 1000, "files": 10}
    monkeypatch.setitem(get.ARCHIVES, "cifar10", Archive(server.url, md5_of(archive), "set", **limits))
    root, precious = tmp_path / "data", tmp_path / "precious"
    scrap, other, link, busy = (
        root / f".{name}.tmp" for name in (f"set.{'0' * 32}", "set.mine", f"set.{'1' * 32}", f"set.{'2' * 32}")
    )
    for folder in (scrap, other, busy, precious):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    (scrap / "out").symlink_to(precious)
    link.symlink_to(precious)
    (root / f".sets.{'0' * 32}.tmp").mkdir()
    with unpack_module._locked(busy):
        get_data("cifar10", root)
    assert left_in(root) == sorted([".set.mine.tmp", link.name, busy.name, f".sets.{'0' * 32}.tmp", "set", "x.bin"])
    assert left_in(precious) == ["file"]
    get_data("cifar10", root)  # it already exists; the process that held the scrap has ended
    assert busy.name not in left_in(root)


def test_what_cannot_be_got_says_why(tmp_path):
    for name, message in (
        ("imagenet", "agreeing to its terms"),
        ("digits", "come with scikit-learn"),
        ("folder", "your own tree of images"),
    ):
        with pytest.raises(DataError, match=message):
            get_data(name, tmp_path)
    with pytest.raises(DataError, match="no data set 'cifar11' to get; nearest: cifar10"):
        get_data("cifar11", tmp_path)
    assert set(ARCHIVES) == {"cifar10", "cifar100", "tiny-imagenet"}

"""The official CIFAR files, made small: both versions, unpacked and as archives; damaged, foreign and hostile ones."""

import io
import os
import pickle
import struct
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from letkd.data import cifar, load_data, pickles, unpack
from letkd.data.pickles import Unpickler, read_pickle
from letkd.errors import DataError

PER_FILE = 12
NAMES10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
NAMES100 = [f"thing_{c}" for c in range(100)]
FOLDERS = {
    ("cifar10", "binary"): "cifar-10-batches-bin",
    ("cifar10", "python"): "cifar-10-batches-py",
    ("cifar100", "binary"): "cifar-100-binary",
    ("cifar100", "python"): "cifar-100-python",
}


def python2_pickle(value) -> bytes:
    """As Python 2's cPickle wrote the official files: protocol 2, byte strings, numpy under its old module name."""

    def put(v) -> bytes:
        if isinstance(v, dict):
            return b"}(" + b"".join(put(k) + put(item) for k, item in v.items()) + b"u"
        if isinstance(v, list):
            return b"](" + b"".join(map(put, v)) + b"e"
        if isinstance(v, int):
            return b"J" + struct.pack("<i", v)
        if isinstance(v, bytes):
            return b"U" + bytes([len(v)]) + v if len(v) < 256 else b"T" + struct.pack("<i", len(v)) + v
        if isinstance(v, str):
            return put(v.encode())
        rows, columns = v.shape
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        return made + b"(K\x01" + put(rows) + put(columns) + b"\x86" + dtype + b"\x89" + put(v.tobytes()) + b"tb"

    return b"\x80\x02" + put(value) + b"."


def a_part(k: int, C: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(k)
    return random.randint(0, 256, (PER_FILE, 3072)).astype(np.uint8), random.randint(0, C, PER_FILE)


def content(name: str, version: str) -> dict[str, bytes]:
    """Every file of a small data set by its name, as the official archive has them."""
    C = 10 if name == "cifar10" else 100
    train = [f"data_batch_{k}" for k in range(1, 6)] if C == 10 else ["train"]
    test = "test_batch" if C == 10 else "test"
    files = {}
    for k, file in enumerate([*train, test]):
        pixels, labels = a_part(k, C)
        coarse = labels // 5
        if version == "binary":
            columns = [labels] if C == 10 else [coarse, labels]
            records = np.concatenate([np.stack(columns, 1).astype(np.uint8), pixels], 1)
            files[f"{file}.bin"] = records.tobytes()
        else:
            keys = {"labels": labels} if C == 10 else {"fine_labels": labels, "coarse_labels": coarse}
            batch = {"batch_label": file, **{key: v.tolist() for key, v in keys.items()}, "data": pixels}
            files[file] = python2_pickle(batch | {"filenames": [f"{i}.png" for i in range(PER_FILE)]})
    if version == "binary":
        meta, names = ("batches.meta.txt", NAMES10) if C == 10 else ("fine_label_names.txt", NAMES100)
        files[meta] = ("\n".join(names) + "\n\n").encode()
    elif C == 10:
        files["batches.meta"] = python2_pickle({"num_cases_per_batch": 10000, "label_names": NAMES10, "num_vis": 3072})
    else:
        files["meta"] = python2_pickle({"fine_label_names": NAMES100, "coarse_label_names": [f"c{k}" for k in range(20)]})
    return files


def unpacked(root: Path, name: str, version: str, **changed: bytes | None) -> Path:
    """The files in their official folder below `root`; `changed` replaces (or, with None, leaves out) files."""
    folder = root / FOLDERS[name, version]
    folder.mkdir(parents=True)
    for file, data in (content(name, version) | changed).items():
        if data is not None:
            (folder / file).write_bytes(data)
    return folder


def archived(root: Path, name: str, version: str, *, backwards: bool = False, prefix: str = "", level: int = 9) -> Path:
    path = root / f"{name.replace('cifar', 'cifar-')}-{version}.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=level) as archive:
        files = list(content(name, version).items())
        for file, data in reversed(files) if backwards else files:
            member = tarfile.TarInfo(f"{prefix}{FOLDERS[name, version]}/{file}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def fingerprints(data) -> list[str]:
    return [split.fingerprint() for split in (data.train, data.val, data.test)]


both = pytest.mark.parametrize("name", ["cifar10", "cifar100"])
versions = pytest.mark.parametrize("version", ["binary", "python"])


@both
@versions
def test_images_labels_and_names_are_those_written(tmp_path, name, version):
    unpacked(tmp_path, name, version)
    data = load_data(name, root=tmp_path, val=0.0)
    C = 10 if name == "cifar10" else 100
    parts = [a_part(k, C) for k in range(6 if C == 10 else 2)]
    *train, test = parts
    assert np.array_equal(data.train.images.numpy(), np.concatenate([p for p, _ in train]).reshape(-1, 3, 32, 32))
    assert data.train.labels.tolist() == [int(label) for _, labels in train for label in labels]
    assert np.array_equal(data.test.images.numpy(), test[0].reshape(-1, 3, 32, 32))
    assert data.test.labels.tolist() == test[1].tolist()
    assert data.classes == tuple(NAMES10 if C == 10 else NAMES100)
    assert (data.name, data.flip, len(data.val)) == (name, True, 0)


@both
def test_folder_folder_above_and_archive_of_both_versions_read_equal(tmp_path, name):
    read = []
    for version in ("binary", "python"):
        folder = unpacked(tmp_path / version, name, version)
        for k, how in enumerate(({}, {"backwards": True}, {"prefix": "./"})):
            packed = tmp_path / f"{version}-{k}"
            packed.mkdir()
            archive = archived(packed, name, version, **how)
            read += [load_data(name, root=packed), load_data(name, root=archive)]
        read += [load_data(name, root=folder), load_data(name, root=str(tmp_path / version))]
    assert len(read) == 16
    assert all(fingerprints(data) == fingerprints(read[0]) and data.classes == read[0].classes for data in read)


def test_reading_an_archive_writes_nothing(tmp_path):
    archived(tmp_path, "cifar10", "python")
    before = sorted(tmp_path.rglob("*"))
    load_data("cifar10", root=tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_batches_pickled_again_by_python_3_read_equal(tmp_path, protocol, order):
    expected = load_data("cifar10", root=unpacked(tmp_path / "a", "cifar10", "python"))
    again = {}
    for k in range(5):
        pixels, labels = a_part(k, 10)
        batch = {"data": np.asarray(pixels, order=order), "labels": labels.tolist()}
        again[f"data_batch_{k + 1}"] = pickle.dumps(batch, protocol)
    data = load_data("cifar10", root=unpacked(tmp_path / "b", "cifar10", "python", **again))
    assert fingerprints(data) == fingerprints(expected)


@versions
def test_names_without_a_meta_file(tmp_path, version):
    ten = {"binary": "batches.meta.txt", "python": "batches.meta"}[version]
    hundred = {"binary": "fine_label_names.txt", "python": "meta"}[version]
    unpacked(tmp_path, "cifar10", version, **{ten: None})
    unpacked(tmp_path, "cifar100", version, **{hundred: None})
    assert load_data("cifar10", root=tmp_path).classes == tuple(NAMES10)
    assert load_data("cifar100", root=tmp_path).classes == tuple(str(c) for c in range(100))


@both
def test_without_a_folder_it_says_how_to_get_the_files(name, tmp_path):
    archive = name.replace("cifar", "cifar-")
    says = rf"get it with `letkd data get {name}`, or download {archive}-binary.tar.gz or {archive}-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html.*`root=FOLDER`"
    with pytest.raises(DataError, match=f"no folder was named; {says}"):
        load_data(name)
    with pytest.raises(DataError, match=f"does not exist, so {name} cannot be read from it; {says}"):
        load_data(name, root=tmp_path / "nowhere")
    with pytest.raises(DataError, match=f"has neither the files of {name} nor its archive; {says}"):
        load_data(name, root=tmp_path)


def test_the_other_data_set_s_files_are_not_mistaken(tmp_path):
    folder = unpacked(tmp_path, "cifar100", "binary")
    with pytest.raises(DataError, match=r"has neither the files of cifar10 nor its archive"):
        load_data("cifar10", root=tmp_path)
    ten = content("cifar10", "binary")
    (folder / "train.bin").write_bytes(ten["data_batch_1.bin"])
    with pytest.raises(DataError, match=r"train.bin has 36,876 bytes, not a whole number of records of 3,074"):
        load_data("cifar100", root=tmp_path)


@versions
def test_a_missing_file_is_named(tmp_path, version):
    file = {"binary": "data_batch_3.bin", "python": "data_batch_3"}[version]
    unpacked(tmp_path, "cifar10", version, **{file: None})
    with pytest.raises(DataError, match=rf"lacks {file} of cifar10; download cifar-10-{version}.tar.gz again"):
        load_data("cifar10", root=tmp_path)


@pytest.mark.parametrize("lost", [1, 3072, 3073 * PER_FILE])
def test_truncated_binary_file(tmp_path, lost):
    whole = content("cifar10", "binary")["data_batch_2.bin"]
    unpacked(tmp_path, "cifar10", "binary", **{"data_batch_2.bin": whole[: len(whole) - lost]})
    left = f"{len(whole) - lost:,} bytes"
    with pytest.raises(
        DataError, match=rf"data_batch_2.bin has {left}, not a whole number of records of 3,073 bytes: it is cut"
    ):
        load_data("cifar10", root=tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 30, 5000, -1])
def test_truncated_python_file(tmp_path, kept):
    whole = content("cifar100", "python")["train"]
    unpacked(tmp_path, "cifar100", "python", train=whole[:kept])
    with pytest.raises(DataError, match=r"cifar-100-python.train is not a readable pickle .* cut short or another file"):
        load_data("cifar100", root=tmp_path)


@both
@versions
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_archive(tmp_path, name, version, share):
    path = archived(tmp_path, name, version)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(DataError, match=rf"{path.name} (cannot be read .* download {path.name} again|lacks .*)"):
        load_data(name, root=tmp_path)


@pytest.mark.parametrize("level", [9, 0])  # where nothing is compressed, only the checksum at the end shows it
def test_flipped_bits_in_an_archive(tmp_path, level):
    path = archived(tmp_path, "cifar10", "binary", level=level)
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, len(data) // 2 + 64):
        data[at] ^= 0x55
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz"):
        load_data("cifar10", root=tmp_path)


def test_links_in_an_archive_are_not_followed(tmp_path):
    path = tmp_path / "cifar-100-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file in ("train.bin", "test.bin"):
            member = tarfile.TarInfo(f"cifar-100-binary/{file}")
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
            archive.addfile(member)
    with pytest.raises(DataError, match=r"lacks train.bin, test.bin of cifar100"):
        load_data("cifar100", root=tmp_path)


@pytest.mark.parametrize(("column", "value", "C"), [(0, 20, 20), (1, 100, 100), (1, 255, 100)])
def test_binary_labels_out_of_range(tmp_path, column, value, C):
    records = np.frombuffer(content("cifar100", "binary")["train.bin"], np.uint8).reshape(-1, 3074).copy()
    records[7, column] = value
    unpacked(tmp_path, "cifar100", "binary", **{"train.bin": records.tobytes()})
    with pytest.raises(DataError, match=rf"train.bin has the label {value} at image 7, but {C} classes .* 0 to {C - 1}"):
        load_data("cifar100", root=tmp_path)


PIXELS = np.zeros((4, 3072), np.uint8)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"data": PIXELS, "labels": [0, 1, 2, 10]}, "has the label 10 at image 3, but 10 classes"),
        ({"data": PIXELS, "labels": [0, -1, 2, 3]}, "has the label -1 at image 1"),
        ({"data": PIXELS, "labels": [0, 1, 2]}, r"has data of shape \[4, 3072\] and 3 labels"),
        ({"data": PIXELS[:, :-1], "labels": [0, 1, 2, 3]}, r"has data of shape \[4, 3071\] and 4 labels"),
        ({"data": PIXELS[:0], "labels": []}, "is not a readable pickle|has data of shape"),
        ({"data": PIXELS, "labels": ["a", "b", "c", "d"]}, "has labels that are not integers"),
        ({"data": PIXELS, "fine_labels": [0, 1, 2, 3]}, "has the entries 'data', 'fine_labels', not the array 'data' and"),
        ({"data": [1, 2], "labels": [0, 1]}, "has the entries 'data', 'labels', not the array 'data' and the list 'labels'"),
        ({}, "has no entries, not the array 'data'"),
        ([1, 2], "holds a list, not the entries"),
    ],
)
def test_foreign_batches(tmp_path, batch, message):
    unpacked(tmp_path, "cifar10", "python", data_batch_4=python2_pickle(batch))
    with pytest.raises(DataError, match=rf"cifar-10-batches-py.data_batch_4 ({message})"):
        load_data("cifar10", root=tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (PIXELS.astype(np.float32), "numbers of type 'f4', not bytes"),
        (np.array([["x"]], object), "numbers of type 'O8', not bytes"),
        (2**70, "not integers of up to 64 bits"),
    ],
)
def test_arrays_and_numbers_of_other_types(tmp_path, value, message):
    entry = {"data": PIXELS, "labels": [value] * 4} if isinstance(value, int) else {"data": value, "labels": [0]}
    unpacked(tmp_path, "cifar10", "python", test_batch=pickle.dumps(entry, 2))
    with pytest.raises(DataError, match=rf"test_batch .*{message}"):
        load_data("cifar10", root=tmp_path)


@both
@versions
def test_wrong_class_names(tmp_path, name, version):
    file, key = {
        ("cifar10", "binary"): ("batches.meta.txt", ""),
        ("cifar10", "python"): ("batches.meta", "label_names"),
        ("cifar100", "binary"): ("fine_label_names.txt", ""),
        ("cifar100", "python"): ("meta", "fine_label_names"),
    }[name, version]
    few = b"cat\ndog\n" if version == "binary" else python2_pickle({key: ["cat", "dog"]})
    unpacked(tmp_path, name, version, **{file: few})
    with pytest.raises(DataError, match=rf"{file} has 2 class names for {10 if name == 'cifar10' else 100} classes"):
        load_data(name, root=tmp_path)
    if version == "python":
        unpacked(tmp_path / "other", name, version, **{file: python2_pickle({"names": ["cat"]})})
        with pytest.raises(DataError, match=rf"{file} has the entries 'names', not the list '{key}'"):
            load_data(name, root=tmp_path / "other")


class Reduced:
    """Pickles to a call of whatever it is given."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def by_name(module: str, name: str, argument: str) -> bytes:
    return f"c{module}\n{name}\n(X".encode() + struct.pack("<I", len(argument)) + argument.encode() + b"tR."


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("function", "refused"),
    [
        (os.system, "(posix|nt).system"),
        (subprocess.check_call, "(subprocess|commands).check_call"),
        (eval, "(__builtin__|builtins).eval"),
    ],
)
@pytest.mark.parametrize("file", ["data_batch_1", "test_batch", "batches.meta"])
def test_a_hostile_pickle_is_refused_by_name_and_not_run(tmp_path, protocol, function, refused, file):
    proof = tmp_path / "ran"
    command = {
        os.system: f"echo > {proof}",
        subprocess.check_call: ["touch", str(proof)],
        eval: f"open({str(proof)!r}, 'w').close()",
    }
    evil = pickle.dumps({b"data": Reduced(function, command[function]), b"labels": [1]}, protocol)
    unpacked(tmp_path, "cifar10", "python", **{file: evil})
    with pytest.raises(DataError, match=rf"{file} asks to load {refused}, .* it was refused and nothing was run"):
        load_data("cifar10", root=tmp_path)
    assert not proof.exists()
    pickle.loads(evil)
    assert proof.exists(), "the pickle was harmless: this test shows nothing"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("numpy", "load"),
        ("numpy.core.multiarray", "fromfile"),
        ("numpy.lib.npyio", "load"),
        ("numpy", "ndarray.tofile"),
        ("_codecs", "decode"),
        ("_codecs", "encode.__self__"),
        ("copyreg", "_reconstructor"),
        ("copy_reg", "_reconstructor"),
        ("builtins", "getattr"),
        ("letkd.data.pickles", "Unpickler"),
        ("torch", "load"),
    ],
)
def test_no_other_name_gets_through(tmp_path, module, name):
    unpacked(tmp_path, "cifar100", "python", test=by_name(module, name, "x"))
    with pytest.raises(DataError, match=f"test asks to load {module}.{name}, which no official CIFAR file does"):
        load_data("cifar100", root=tmp_path)


def test_the_admitted_names_cannot_be_bent_or_misused(tmp_path):
    state = b"N}X\x06\x00\x00\x00valuesX\x01\x00\x00\x00xs\x86b."  # (None, {"values": "x"}) set on what lies below
    names = (b"numpy\nndarray", b"numpy\ndtype", b"_codecs\nencode", b"numpy.core.multiarray\n_reconstruct")
    attacks = [b"\x80\x02c" + name + b"\n" + state for name in names]
    attacks += [
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R.",  # any other codec
        b"Psomething\n.",  # a persistent id
        b"\x80\x02\x82\x01.",  # a registered extension
        b"\x80\x02cnumpy\nndarray\n)R(K\x01J\xff\xff\xff\x7f\x85cnumpy\ndtype\nU\x02u1\x85RK\x00U\x01xtb.",  # 1 byte as 2 GB
    ]
    for k, attack in enumerate(attacks):
        unpacked(tmp_path / str(k), "cifar100", "python", train=attack)
        with pytest.raises(DataError, match="train is not a readable pickle"):
            load_data("cifar100", root=tmp_path / str(k))
    assert not any("values" in vars(known) for known in Unpickler.STAND_INS.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param(b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s.", id="a key nested many times"),
        pytest.param(b"\x80\x02}(" + b")" + b"\x85" * 200_000 + b"K\x01u.", id="the same among others"),
        pytest.param(b"\x80\x02()" + b"\x85" * 200_000 + b"K\x01d.", id="the same in protocol 0"),
        pytest.param(b"\x80\x04\x8f(" + b")" + b"\x85" * 200_000 + b"\x90.", id="the same in a set"),
        pytest.param(
            b"\x80\x02]c_codecs\nencode\n(X\x00\x00\x10\x00"
            + b"x" * (1 << 20)
            + b"X\x06\x00\x00\x00latin1tq\x00Ra"
            + b"("
            + b"c_codecs\nencode\nh\x00R" * 100
            + b"e.",
            id="one text a hundred times",
        ),
        pytest.param(b"\x80\x04" + b"]" * 400_000 + b".", id="many lists"),
        pytest.param(b"\x80\x04\x95" + (400_001).to_bytes(8, "little") + b"]" * 400_000 + b".", id="many lists in a frame"),
        pytest.param(b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.", id="a bytearray of a terabyte"),
    ],
)
def test_pickles_that_would_fill_memory_or_end_the_process(monkeypatch, bomb):
    """Each is small; what it would become is not."""
    monkeypatch.setattr(pickles._Counted, "left", 300_000)
    with pytest.raises(DataError, match="x is not a readable pickle"):
        read_pickle("x", bomb)


def test_a_memo_with_a_large_number_takes_no_memory():
    """The reader in C would make it two thousand million places long."""
    assert read_pickle("x", b"\x80\x02}r\xff\xff\xff\x7f.") == {}


def test_archives_and_files_larger_than_the_official_ones_are_refused(tmp_path, monkeypatch):
    """Before they are decompressed or read; a header of megabytes, too, which the tar reader takes whole."""
    monkeypatch.setattr(cifar, "LARGEST", 1 << 20)
    monkeypatch.setattr(unpack, "SLACK", 1 << 20)
    path = tmp_path / "cifar-10-binary.tar.gz"
    large = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
    large.size = 40 << 20
    other = tarfile.TarInfo("cifar-10-batches-bin/other")
    other.size = 40 << 20
    header = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
    header.pax_headers = {"comment": "x" * (5 << 20)}
    for member in (large, other, header):
        with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT, compresslevel=1) as archive:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
        with pytest.raises(DataError, match=r"binary\.tar\.gz would unpack to more bytes than it may have: refused"):
            load_data("cifar10", root=tmp_path)
    path.unlink()
    with (unpacked(tmp_path, "cifar10", "binary") / "data_batch_2.bin").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: it takes no room
    with pytest.raises(
        DataError, match="cifar-10-batches-bin has files of more than 1,048,576 bytes in all, which CIFAR does not"
    ):
        load_data("cifar10", root=tmp_path)


def test_validation_is_held_out_of_the_training_files_alone(tmp_path):
    unpacked(tmp_path, "cifar10", "binary")
    whole, split = load_data("cifar10", root=tmp_path, val=0.0), load_data("cifar10", root=tmp_path, val=0.3)
    assert len(split.train) + len(split.val) == len(whole.train) == 5 * PER_FILE
    both_parts = torch.cat([split.train.images, split.val.images]).flatten(1)
    assert {row.numpy().tobytes() for row in both_parts} == {row.numpy().tobytes() for row in whole.train.images.flatten(1)}
    assert split.test.fingerprint() == whole.test.fingerprint()

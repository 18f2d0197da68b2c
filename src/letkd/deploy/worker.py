"""Worker process that opens one model file and runs it on batches of images; started by `letkd.deploy.process`.

It runs as a script and imports nothing from letkd, so an ONNX file opens without importing torch. File writes, memory and
processor time are limited, and it ends with the process that started it.
"""

import io
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

KEY = "letkd"  # key of the facts in a file: ONNX metadata under KEY; in an exported program, the extra file KEY.json
LARGEST_HEAD = 64 * 2**20  # bytes of a message's head; enough for facts with a million class names

# The parts of an ONNX file (onnx.proto) that may contain tensors: field number → kind of the field.
PARTS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
EXTERNAL_DATA, DATA_LOCATION = 13, 14  # fields of a tensor


@dataclass(frozen=True)
class OpenedFile:
    """A model file that is ready to run.

    Args:
        run: from images to logits, in the file's own types.
        facts: the facts in the file, as JSON; None if it has none.
        inputs, outputs: type and shape of each, if the file contains them; dynamic sizes are None.
    """

    run: Callable[[np.ndarray], np.ndarray]
    facts: str | None
    inputs: list[tuple[str, list[int | None]]]
    outputs: list[tuple[str, list[int | None]]]


def open_onnx(content: bytes, threads: int) -> OpenedFile:
    """Open an ONNX file with onnxruntime, on the CPU. Weights in other files are refused: a foreign file could name any path."""
    import onnxruntime

    if has_external_data(content):
        raise ValueError("its weights are in other files, which are not read; save it as one file")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.load_model_format", "ONNX")
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name if session.get_inputs() else ""

    def ports(found: Any) -> list[tuple[str, list[int | None]]]:
        return [(port.type, [size if isinstance(size, int) else None for size in port.shape]) for port in found]

    return OpenedFile(
        run=lambda x: np.asarray(session.run(None, {name: x})[0]),
        facts=session.get_modelmeta().custom_metadata_map.get(KEY),
        inputs=ports(session.get_inputs()),
        outputs=ports(session.get_outputs()),
    )


def open_program(content: bytes, threads: int) -> OpenedFile:
    """Open a `torch.export` file. This can run any code it contains, so use it only for trusted files."""
    import torch

    torch.set_num_threads(threads)
    extra: dict[str, Any] = {f"{KEY}.json": ""}
    run: Any = torch.export.load(io.BytesIO(content), extra_files=extra).module()
    facts = extra[f"{KEY}.json"]

    def logits(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return run(torch.from_numpy(x)).numpy()

    return OpenedFile(logits, facts.decode("utf-8", errors="replace") if isinstance(facts, bytes) else facts, [], [])


OPEN = {".onnx": open_onnx, ".pt2": open_program}
LARGEST_FILE = {
    ".onnx": 0,
    ".pt2": 2**20,
}  # bytes that may be written; importing torch writes a small test file


def has_external_data(content: bytes) -> bool:
    """Whether any tensor of an ONNX file has its values in another file. ValueError if the content is not a protobuf message."""
    waiting = [("model", memoryview(content))]
    while waiting:
        kind, message = waiting.pop()
        for number, value in _fields(message):
            if kind == "tensor" and (number == EXTERNAL_DATA or (number == DATA_LOCATION and value != 0)):
                return True
            if number in PARTS[kind] and isinstance(value, memoryview):
                waiting.append((PARTS[kind][number], value))
    return False


def _fields(message: memoryview) -> Any:
    """Number and value of each field of a protobuf message. Values: a view of the bytes, an int, or None for fixed-width numbers."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
        elif kind == 2:
            length, at = _varint(message, at)
            value, at = message[at : at + length], at + length
        elif kind in (1, 5):
            value, at = None, at + (8 if kind == 1 else 4)
        else:
            raise ValueError("not a protobuf message")
        if at > len(message):
            raise ValueError("truncated protobuf message")
        yield key >> 3, value


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for k, byte in enumerate(message[at : at + 10]):
        value |= (byte & 127) << 7 * k
        if byte < 128:
            return value, at + k + 1
    raise ValueError("protobuf number without an end")


def send(stream: IO[bytes], head: dict[str, Any], body: bytes = b"") -> None:
    """Write a message: a JSON object and bytes. Nothing in a message is ever unpickled."""
    text = json.dumps(head).encode()
    stream.write(struct.pack("<QQ", len(text), len(body)) + text)
    stream.write(body)
    stream.flush()


def receive(stream: IO[bytes], largest: int) -> tuple[dict[str, Any], bytes]:
    """Read a message with a body of at most `largest` bytes. EOFError if the stream ends, ValueError if it is not a message."""
    n_head, n_body = struct.unpack("<QQ", _exactly(stream, 16))
    if n_head > LARGEST_HEAD or n_body > largest:
        raise ValueError("message too long")
    head = json.loads(_exactly(stream, n_head))
    if not isinstance(head, dict):
        raise ValueError("message without a head")
    return head, _exactly(stream, n_body)


def _exactly(stream: IO[bytes], n: int) -> bytes:
    content = stream.read(n)
    if len(content) < n:
        raise EOFError
    return content


def set_limits(memory: int, largest_file: int) -> None:
    """Limit the size of written files and the memory, and disable core dumps, if the system supports such limits."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for kind, limit in ((resource.RLIMIT_FSIZE, largest_file), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, memory)):
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def allow_seconds(seconds: float) -> None:
    """Allow this many seconds on every processor for the next answer; after that the system ends this process."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds * (os.cpu_count() or 1)) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def end_with(parent: int) -> None:
    """Wait until the parent process has ended, then end this process immediately."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def reason(error: BaseException) -> str:
    """The reason of an error, in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300] if first else type(error).__name__


def answer(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Open the file named in the first message, then answer each batch of images with logits until the stream ends."""
    head, _ = receive(requests, 0)
    threading.Thread(target=end_with, args=(head["parent"],), daemon=True).start()
    set_limits(head["memory"], LARGEST_FILE[head["kind"]])
    allow_seconds(head["seconds"])
    try:
        with open(head["path"], "rb") as file:
            opened = OPEN[head["kind"]](file.read(), head["threads"])
    except Exception as error:  # a hostile file can fail in any way
        send(answers, {"error": reason(error)})
        return
    send(answers, {"facts": opened.facts, "inputs": opened.inputs, "outputs": opened.outputs})
    while True:
        batch, content = receive(requests, sys.maxsize)
        allow_seconds(head["seconds"])
        try:
            x = np.frombuffer(content, batch["type"]).reshape(batch["shape"]).copy()
            logits = np.ascontiguousarray(opened.run(x), dtype=np.float32)
        except Exception as error:
            send(answers, {"error": reason(error)})
        else:
            send(answers, {"shape": logits.shape}, logits.tobytes())


def main() -> None:
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # keeps output printed by the model file out of the answers
        try:
            answer(sys.stdin.buffer, answers)
        except (EOFError, BrokenPipeError, KeyboardInterrupt):
            os._exit(0)


if __name__ == "__main__":
    main()

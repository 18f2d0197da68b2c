"""A model file that runs in a process of its own, so that whatever it does can be ended: a crash or an endless loop is one sentence."""

import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from letkd.deploy import worker
from letkd.errors import CheckpointError
from letkd.limits import LARGEST

SECONDS = 600.0  # that opening a file, or one batch of images, may take
KINDS = {".onnx": "ONNX", ".pt2": "torch.export"}


class ModelProcess:
    """A model file, opened by `letkd.deploy.worker`. The process ends with this object, on any error, and with this process.

    Args:
        path: ends in a suffix of `KINDS`.
        seconds: that opening the file, or one batch, may take.
    """

    def __init__(self, path: Path, seconds: float = SECONDS):
        self.path, self.seconds, self.late = path, seconds, False
        self.child = subprocess.Popen(
            [sys.executable, "-P", worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C comes to us, and we end it
        )
        self.end = weakref.finalize(self, _end, self.child)
        question = {"path": str(path.absolute()), "kind": path.suffix, "threads": torch.get_num_threads()}
        self.about, _ = self._ask({**question, "seconds": seconds, "memory": most_memory(), "parent": os.getpid()})
        if "error" in self.about:
            self.end()
            raise CheckpointError(f"{path} is damaged or no {KINDS[path.suffix]} file ({self.about['error']}); export it again")

    def __call__(self, images: Tensor) -> Tensor:
        """Logits of a batch."""
        x = images.contiguous().numpy()
        head, body = self._ask({"type": str(x.dtype), "shape": x.shape}, x.tobytes(), largest=4 * LARGEST * len(x))
        if "error" in head:
            raise CheckpointError(f"{self.path} does not run on images of {list(x.shape)} ({head['error']}); export it again")
        try:
            return torch.from_numpy(np.frombuffer(body, np.float32).reshape(head["shape"]).copy())
        except (KeyError, TypeError, ValueError):
            raise self._gone() from None

    def _ask(self, head: dict[str, Any], body: bytes = b"", *, largest: int = 0) -> tuple[dict[str, Any], bytes]:
        questions, answers = self.child.stdin, self.child.stdout
        assert questions is not None
        assert answers is not None
        timer = threading.Timer(self.seconds, self._stop)
        timer.daemon = True
        timer.start()
        try:
            worker.send(questions, head, body)
            return worker.receive(answers, largest)
        except (EOFError, OSError, ValueError, RecursionError, MemoryError):
            raise self._gone() from None
        except BaseException:  # Ctrl-C and SIGTERM among them
            self.end()
            raise
        finally:
            timer.cancel()

    def _stop(self) -> None:
        self.late = True
        self.child.kill()

    def _gone(self) -> CheckpointError:
        """Why there was no answer; the process is ended."""
        try:
            code = self.child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = 0
        self.end()
        if self.late or -code == getattr(signal, "SIGXCPU", None):
            return CheckpointError(
                f"{self.path} gave no answer within {self.seconds:g} seconds and was stopped; allow more with `timeout=`, or do not use it"
            )
        why = f"killed by {signal.Signals(-code).name}" if code < 0 else "without an answer"
        return CheckpointError(
            f"{self.path} ended the process that ran it ({why}): it is damaged, or needs more memory than there is; do not use it"
        )


def most_memory() -> int:
    """Bytes that a model's process may take: three quarters of the machine's."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return 2**34


def _end(child: subprocess.Popen) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        try:
            if stream is not None:
                stream.close()
        except OSError:  # what was not sent yet
            pass

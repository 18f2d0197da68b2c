"""A model file in a separate process, so that a crash or an endless loop of the model ends in a one-sentence error."""

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

SECONDS = 600.0  # time limit for opening a file, and for each batch of images
KINDS = {".onnx": "ONNX", ".pt2": "torch.export"}


class ModelProcess:
    """A model file opened by `letkd.deploy.worker`. The worker ends when this object or this process ends, and on any error.

    Args:
        path: a file with a suffix of `KINDS`.
        seconds: time limit for opening the file, and for each batch.
    """

    def __init__(self, path: Path, seconds: float = SECONDS):
        self.path, self.seconds, self.late = path, seconds, False
        self.child = subprocess.Popen(
            [sys.executable, "-P", worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the worker
        )
        self.end = weakref.finalize(self, _end, self.child)
        request = {"path": str(path.absolute()), "kind": path.suffix, "threads": torch.get_num_threads()}
        self.about, _ = self._ask({**request, "seconds": seconds, "memory": memory_limit(), "parent": os.getpid()})
        if "error" in self.about:
            self.end()
            raise CheckpointError(
                f"{path} is damaged or not in {KINDS[path.suffix]} format ({self.about['error']}); export it again"
            )

    def __call__(self, images: Tensor) -> Tensor:
        """Logits of a batch."""
        x = images.contiguous().numpy()
        head, body = self._ask({"type": str(x.dtype), "shape": x.shape}, x.tobytes(), largest=4 * LARGEST * len(x))
        if "error" in head:
            raise CheckpointError(
                f"{self.path} does not run on images of shape {list(x.shape)} ({head['error']}); export it again"
            )
        try:
            return torch.from_numpy(np.frombuffer(body, np.float32).reshape(head["shape"]).copy())
        except (KeyError, TypeError, ValueError):
            raise self._gone() from None

    def _ask(self, head: dict[str, Any], body: bytes = b"", *, largest: int = 0) -> tuple[dict[str, Any], bytes]:
        requests, answers = self.child.stdin, self.child.stdout
        assert requests is not None
        assert answers is not None
        timer = threading.Timer(self.seconds, self._stop)
        timer.daemon = True
        timer.start()
        try:
            worker.send(requests, head, body)
            return worker.receive(answers, largest)
        except (EOFError, OSError, ValueError, RecursionError, MemoryError):
            raise self._gone() from None
        except BaseException:  # including Ctrl-C and SIGTERM
            self.end()
            raise
        finally:
            timer.cancel()

    def _stop(self) -> None:
        self.late = True
        self.child.kill()

    def _gone(self) -> CheckpointError:
        """End the worker; returns the error that explains the missing answer."""
        try:
            code = self.child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = 0
        self.end()
        if self.late or -code == getattr(signal, "SIGXCPU", None):
            return CheckpointError(
                f"{self.path} did not answer within {self.seconds:g} seconds and was stopped; raise the limit with "
                "`timeout=`, or do not use the file"
            )
        why = f"killed by {signal.Signals(-code).name}" if code < 0 else "without an answer"
        return CheckpointError(
            f"{self.path} ended its process ({why}): the file is damaged or needs more memory than is available; do not use it"
        )


def memory_limit() -> int:
    """Memory limit of a worker in bytes: three quarters of the machine's memory."""
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
        except OSError:  # data that was not sent yet
            pass

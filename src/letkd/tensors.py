"""Tensors as bytes: reproducible safetensors, checksums, fingerprints."""

import hashlib
import json
from collections.abc import Mapping

import safetensors.torch
import torch
from torch import Tensor, nn


def as_safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The content of a safetensors file, the same bytes every time; safetensors itself writes metadata in random order."""
    content = safetensors.torch.save(dict(tensors), metadata=dict(metadata))
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors' bytes are aligned
    return b"".join([len(text).to_bytes(8, "little"), text, memoryview(content)[end:]])


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of a model's parameters and buffers, sorted by name, without BN's batch counters."""
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor) and not is_counter(name)}
    unsaved = {f"{name} (not saved)": buffer for name, buffer in model.named_buffers() if name not in model.state_dict()}
    return checksum({**state, **unsaved})


def checksum(tensors: Mapping[str, Tensor], *text: str) -> str:
    """SHA-256 over names, types, shapes and bytes of tensors, sorted by name, and over the given texts."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for part in text:
        digest.update(f"\0{len(part)}\0{part}".encode())
    return digest.hexdigest()


def is_counter(name: str) -> bool:
    return name.rpartition(".")[2] == "num_batches_tracked"

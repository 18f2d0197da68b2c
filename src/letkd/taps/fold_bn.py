"""A faster frozen teacher: batch normalisation folded into the preceding convolutions."""

import copy
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from letkd.modules import copied
from letkd.progress import say
from letkd.taps.grafts import replace_module
from letkd.taps.outputs import logits_in
from letkd.taps.tap import Tap, Taps, run_once


@torch.no_grad()
def fold_teacher(teacher: nn.Module, taps: Mapping[str, Tap], example: Tensor) -> nn.Module:
    """A copy of a teacher in eval mode, with each BN that is the only reader of a convolution folded into it.

    Args:
        taps: their features do not change. A convolution whose own output is tapped is not folded.
        example: an input, to check that copy and teacher agree.

    `torch.fx` shows what reads each output. If it cannot trace the network, or the copy's features differ, a message says so and the
    teacher itself is returned.
    """
    folded = copied(teacher).eval()
    try:
        pairs = _pairs(folded)
    except Exception as error:  # a forward pass may fail in any way under a tracer
        say(f"the teacher {type(teacher).__name__} keeps its BN: torch.fx cannot trace it ({str(error).splitlines()[0]})")
        return teacher
    fixed = {tap.path for tap in taps.values() if tap.io == "output"}, {tap.path for tap in taps.values() if tap.io == "input"}
    for conv_path, bn_path in pairs:
        if conv_path not in fixed[0] and bn_path not in fixed[1]:
            fold_bn(folded, conv_path, bn_path)
    if not _agree(teacher, folded, taps, example):
        say(f"the teacher {type(teacher).__name__} keeps its BN: its features would change if it were folded")
        return teacher
    return folded


def fold_bn(model: nn.Module, conv_path: str, bn_path: str) -> bool:
    """Fold a BN in eval mode into the convolution before it, in place.

        BN(w ∗ x) = (γ/σ · w) ∗ x + (β − γ μ/σ)

    Returns whether it was folded: not if either is another kind of module, has several names or has a grafted child or a hook, which a
    replacement would lose, or if the BN has no running statistics. The caller must make sure that nothing else reads the convolution.
    """
    conv, bn = model.get_submodule(conv_path), model.get_submodule(bn_path)
    if type(conv) is not nn.Conv2d or type(bn) is not nn.BatchNorm2d:
        return False
    if any(part._modules or part._forward_hooks or part._forward_pre_hooks for part in (conv, bn)):
        return False
    names = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    if max(names[conv], names[bn]) > 1 or bn.running_mean is None or bn.running_var is None:
        return False
    dtype = conv.weight.dtype
    fused = fuse_conv_bn_eval(copy.deepcopy(conv).double(), copy.deepcopy(bn).double())  # parameters may be shared
    replace_module(model, conv_path, fused.to(dtype))
    replace_module(model, bn_path, nn.Identity())
    return True


def _pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Paths of convolutions and of the BN that is the only reader of each; modules that run more than once are left out."""
    modules, nodes = dict(model.named_modules()), list(fx.Tracer().trace(model).nodes)
    runs = [node.target for node in nodes if node.op == "call_module"]

    def once(node: fx.Node, kind: type[nn.Module]) -> bool:
        return node.op == "call_module" and type(modules[str(node.target)]) is kind and runs.count(node.target) == 1

    return [
        (str(conv.target), str(bn.target))
        for bn in nodes
        if once(bn, nn.BatchNorm2d)
        for conv in bn.all_input_nodes
        if once(conv, nn.Conv2d) and len(conv.users) == 1
    ]


def _agree(one: nn.Module, two: nn.Module, taps: Mapping[str, Tap], example: Tensor) -> bool:
    x = torch.rand(2, *example.shape[1:], generator=torch.Generator().manual_seed(0)).to(example)
    seen = []
    for model in (one, two):
        output, features = run_once(Taps(model, taps), x)
        logits = logits_in(output)
        seen.append(features if logits is None else {**features, "logits": logits})
    return all(bool((f - seen[1][role]).abs().max() <= 1e-3 * f.abs().max().clamp_min(1e-6)) for role, f in seen[0].items())

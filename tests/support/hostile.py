"""Hostile model files, each of which does harm in a reader that trusts it: shared by the tests of every verb that opens such files."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from letkd.distiller.facts import Facts

FACTS = Facts(num_classes=3, size=(8, 8), input="uint8", dynamic=("batch",))


class Touch:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Mean(nn.Module):
    """Three classes: which colour an image has most of."""

    def forward(self, images):
        return images.float().mean(dim=(2, 3))


# ------------------------------------------------------------------------------------------------ torch.export


def honest_program() -> dict[str, bytes]:
    """The parts of an exported program that does no harm."""
    shapes = ({0: torch.export.Dim.AUTO},)
    example = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    program, stream = torch.export.export(Mean(), (example,), dynamic_shapes=shapes), io.BytesIO()
    torch.export.save(program, stream, extra_files={"letkd.json": FACTS.as_json()})
    with zipfile.ZipFile(stream) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def as_program(parts: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return stream.getvalue()


def edited(parts: dict[str, bytes], end: str, edit: Callable[[dict], None]) -> dict[str, bytes]:
    """The parts with another JSON table in the one whose name ends so."""
    (name,) = (name for name in parts if name.endswith(end))
    table = json.loads(parts[name])
    edit(table)
    return {**parts, name: json.dumps(table).encode()}


def in_a_guard(parts: dict[str, bytes], mark: Path) -> dict[str, bytes]:
    """`program.module()` evaluates guards as Python."""
    code = f"__import__('pathlib').Path('{mark}').touch() or True"
    return edited(parts, "models/model.json", lambda table: table.update(guards_code=[code]))


def in_a_constant(parts: dict[str, bytes], mark: Path) -> dict[str, bytes]:
    """Opaque constants are pickles."""
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    parts = edited(parts, "model_constants_config.json", lambda table: table["config"].update(x=entry))
    return {**parts, "archive/data/constants/opaque_obj_0": pickle.dumps(Touch(mark))}


def in_a_name(parts: dict[str, bytes], mark: Path) -> dict[str, bytes]:
    """Names of inputs become source text."""
    code = f"images=__import__('pathlib').Path('{mark}').touch()"

    def edit(table: dict) -> None:
        table["graph_module"]["module_call_graph"][0]["signature"]["forward_arg_names"] = [code]

    return edited(parts, "models/model.json", edit)


def in_a_library(parts: dict[str, bytes], mark: Path) -> dict[str, bytes]:
    """Compiled parts are loaded as shared libraries."""
    return {
        **parts,
        "archive/data/aotinductor/model/model.so": b"\x7fELF" + bytes(1000),
        "archive/data/aotinductor/model/x.wrapper.cpp": b"",
    }


def in_an_operation(parts: dict[str, bytes], mark: Path) -> dict[str, bytes]:
    """Operations of the graph map files and write to them."""
    mark.write_bytes(b"precious")

    def edit(table: dict) -> None:
        graph = table["graph_module"]["graph"]
        node = graph["nodes"][1]
        names = {
            "filename": {"as_string": str(mark)},
            "shared": {"as_bool": True},
            "size": {"as_int": 8},
            "dtype": {"as_scalar_type": 1},
        }
        mapped = [{"name": name, "arg": arg, "kind": 2 if name == "dtype" else 1} for name, arg in names.items()]
        meta = {**graph["tensor_values"]["to"], "dtype": 1, "sizes": [{"as_int": 8}], "strides": [{"as_int": 1}]}
        fill = [
            {"name": "self", "arg": {"as_tensor": {"name": "file"}}, "kind": 1},
            {"name": "value", "arg": {"as_int": 0}, "kind": 1},
        ]
        for target, name, inputs in (("from_file.default", "file", mapped), ("fill_.Scalar", "filled", fill)):
            made = {
                **node,
                "target": f"torch.ops.aten.{target}",
                "inputs": inputs,
                "outputs": [{"as_tensor": {"name": name}}],
                "name": name,
            }
            graph["nodes"].insert(len(graph["nodes"]) - 1, made)
            graph["tensor_values"][name] = meta

    return edited(parts, "models/model.json", edit)


PROGRAMS: dict[str, Callable[[dict[str, bytes], Path], dict[str, bytes]]] = {
    "guard": in_a_guard,
    "constant": in_a_constant,
    "name": in_a_name,
    "library": in_a_library,
    "operation": in_an_operation,
}


# ------------------------------------------------------------------------------------------------ ONNX


def onnx_file(nodes: list, *, facts: str | None = None, initializers: tuple = (), size: int = 8, classes: int = 3) -> bytes:
    """A file from uint8 `images` to `logits`: float images in `x`, then these nodes."""
    from onnx import TensorProto, helper

    images = helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", 3, size, size])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes])
    cast = helper.make_node("Cast", ["images"], ["x"], to=TensorProto.FLOAT)
    graph = helper.make_graph([cast, *nodes], "graph", [images], [logits], list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    if facts is not None:
        helper.set_model_props(model, {"letkd": facts})
    return model.SerializeToString()


def mean_of(name: str) -> object:
    from onnx import helper

    return helper.make_node("ReduceMean", [name, "axes"], ["logits"], keepdims=0)


def constants(**values: torch.Tensor) -> tuple:
    from onnx import numpy_helper

    axes = {"axes": torch.tensor([2, 3])}
    return tuple(numpy_helper.from_array(value.numpy(), name) for name, value in {**axes, **values}.items())


def honest_onnx(facts: str | None = None) -> bytes:
    return onnx_file([mean_of("x")], facts=FACTS.as_json() if facts is None else facts, initializers=constants())


def endless_onnx() -> bytes:
    """A loop of 2^62 rounds over the images."""
    from onnx import TensorProto, helper

    scalar = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Neg", ["now"], ["then"])],
        "body",
        [scalar("round", TensorProto.INT64, []), scalar("go", TensorProto.BOOL, []), scalar("now", TensorProto.FLOAT, None)],
        [scalar("on", TensorProto.BOOL, []), scalar("then", TensorProto.FLOAT, None)],
    )
    loop = helper.make_node("Loop", ["rounds", "yes", "x"], ["last"], body=body)
    values = constants(rounds=torch.tensor(2**62), yes=torch.tensor(True))
    return onnx_file([loop, mean_of("last")], facts=FACTS.as_json(), initializers=values)


def nan_onnx() -> bytes:
    """Logits that are 0/0."""
    from onnx import helper

    nodes = [helper.make_node("Sub", ["x", "x"], ["zero"]), helper.make_node("Div", ["zero", "zero"], ["nan"]), mean_of("nan")]
    return onnx_file(nodes, facts=FACTS.as_json(), initializers=constants())


def foreign_onnx(where: str) -> bytes:
    """Weights in another file."""
    from onnx import TensorProto, helper

    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=where)
    nodes = [helper.make_node("Mul", ["x", "w"], ["scaled"]), mean_of("scaled")]
    return onnx_file(nodes, facts=FACTS.as_json(), initializers=(*constants(), weight))


def foreign_in_a_subgraph(where: str) -> bytes:
    """Weights in another file, named inside of a branch."""
    from onnx import TensorProto, helper

    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=where)
    out = helper.make_tensor_value_info("scaled", TensorProto.FLOAT, None)
    branches = {
        "then_branch": helper.make_graph([helper.make_node("Mul", ["x", "w"], ["scaled"])], "a", [], [out], [weight]),
        "else_branch": helper.make_graph([helper.make_node("Identity", ["x"], ["scaled"])], "b", [], [out]),
    }
    nodes = [helper.make_node("If", ["yes"], ["scaled"], **branches), mean_of("scaled")]
    return onnx_file(nodes, facts=FACTS.as_json(), initializers=constants(yes=torch.tensor(True)))


def false_facts(**wrong: object) -> bytes:
    return honest_onnx(json.dumps({**json.loads(FACTS.as_json()), **wrong}))


ONNX: dict[str, Callable[[Path], bytes]] = {
    "no protobuf": lambda mark: b"damaged",
    "cut short": lambda mark: honest_onnx()[:-5],
    "no facts": lambda mark: honest_onnx("null"),
    "facts nested deeply": lambda mark: honest_onnx("[" * 100_000),
    "other classes": lambda mark: false_facts(num_classes=4),
    "too many classes": lambda mark: false_facts(num_classes=10**12),
    "classes of another type": lambda mark: false_facts(classes=[1, 2, 3]),
    "names for other classes": lambda mark: false_facts(classes=["a"]),
    "another size": lambda mark: false_facts(size=[16, 16]),
    "a huge size": lambda mark: false_facts(size=[10**6, 10**6]),
    "a size of text": lambda mark: false_facts(size="8x8"),
    "one mean": lambda mark: false_facts(mean=[0.5]),
    "a mean of NaN": lambda mark: false_facts(mean=[float("nan")] * 3),
    "a std of 0": lambda mark: false_facts(std=[0, 0, 0]),
    "another input": lambda mark: false_facts(input="normalised", mean=[0, 0, 0], std=[1, 1, 1]),
    "an axis that is none": lambda mark: false_facts(dynamic=["depth"]),
    "NaN logits": lambda mark: nan_onnx(),
    "weights at an absolute path": lambda mark: foreign_onnx(str(mark)),
    "weights outside the folder": lambda mark: foreign_onnx("../secret"),
    "weights beside it": lambda mark: foreign_onnx("secret"),
    "weights in a branch": lambda mark: foreign_in_a_subgraph(str(mark)),
    "an endless loop": lambda mark: endless_onnx(),
}


# ------------------------------------------------------------------------------------------------ .pth


def torch_file(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def torch_file_of(pickled: bytes, method: int = zipfile.ZIP_STORED, **records: bytes) -> bytes:
    """A file whose content is this pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little", **records}.items():
            archive.writestr(f"archive/{name}", content)
    return stream.getvalue()


def nested_key(n: int) -> bytes:
    """{((((…)))): 1}, which Python hashes by recursion in C."""
    return b"\x80\x02}()" + b"\x85" * n + b"K\x01u."


def doubled_key(n: int, *, memo: bool) -> bytes:
    """{(x, x): 1} where x = (y, y), y = (z, z), …: 2^n parts to hash."""
    double = b"".join(b"q%ch%c\x86" % (k, k) for k in range(n)) if memo else b"2\x86" * n
    return b"\x80\x02}()" + double + b"K\x01u."


PTH: dict[str, Callable[[Path], bytes]] = {
    "a pickle": lambda mark: pickle.dumps({"model": Touch(mark)}),
    "a pickle in zip": lambda mark: torch_file({"state_dict": Touch(mark)}),
    "a deep key": lambda mark: torch_file_of(nested_key(1_000_000)),
    "a deep key without zip": lambda mark: nested_key(1_000_000),
    "a wide key": lambda mark: torch_file_of(doubled_key(60, memo=True)),
    "a wide key without zip": lambda mark: doubled_key(60, memo=False),
    "a zip bomb": lambda mark: torch_file_of(b"\x80\x02}.", zipfile.ZIP_DEFLATED, x=bytes(2**24)),
    "meta tensors": lambda mark: torch_file({"conv1.weight": torch.empty(8, 3, 3, 3, device="meta")}),
    "sparse tensors": lambda mark: torch_file({"conv1.weight": torch.eye(3).to_sparse()}),
    "no tensors": lambda mark: torch_file({"a": 1}),
    "a list": lambda mark: torch_file([1, 2]),
    "nothing": lambda mark: b"",
}

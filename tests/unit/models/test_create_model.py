"""`create_model`: zoo names, a user's own models by file or package, and one sentence for each way to get it wrong."""

import copy
import importlib
import inspect
import pickle
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from letkd.errors import CheckpointError, LetkdError
from letkd.models import create_model, list_models, save_weights
from letkd.models.base import MODELS, register_model
from letkd.models.extras import set_image_size

OWN = """
    import dataclasses
    from torch import nn

    class Net(nn.Module):
        def __init__(self, num_classes=1000):
            super().__init__()
            self.fc = nn.Linear(4, num_classes)
        def forward(self, x):
            return self.fc(x)

    @dataclasses.dataclass
    class Settings:
        width: int = 4

    def build(*, num_classes):
        return Net(num_classes)

    def build_any(**options):
        return Net(**options)

    def build_fixed():
        return nn.Linear(Settings().width, 17)

    def build_positional(num_classes=6, /):
        return nn.Linear(4, num_classes)

    def needs_more(width, num_classes):
        return nn.Linear(width, num_classes)

    def gives_class(num_classes):
        return Net

    def fails():
        raise ValueError("first line\\nsecond line")

    ready = Net(3)
    number = 3
"""


@pytest.fixture
def own(tmp_path) -> Path:
    path = tmp_path / "my-nets.py"
    path.write_text(textwrap.dedent(OWN))
    return path


@pytest.fixture
def package(tmp_path, monkeypatch) -> Iterator[str]:
    folder = tmp_path / "letkd_test_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "nets.py").write_text(textwrap.dedent(OWN))
    (folder / "broken.py").write_text("import letkd_no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "letkd_test_package"
    for name in [name for name in sys.modules if name.startswith("letkd_test_package")]:
        del sys.modules[name]


def sentence(name: str, match: str, num_classes: int = 5) -> str:
    with pytest.raises(LetkdError, match=match) as caught:
        create_model(name, num_classes=num_classes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_zoo_names_are_sorted_and_build():
    names = list_models()
    assert names == sorted(names)
    assert {"resnet8", "resnet56", "resnet32x4", "resnet14_tiny"} <= set(names)
    assert create_model("resnet8_tiny", num_classes=13).fc.out_features == 13


def test_unknown_name_offers_the_nearest_and_the_way_to_ones_own():
    text = sentence("resnet21", "there is no model 'resnet21' in the zoo; nearest: ")
    assert "resnet20" in text.split("nearest: ")[1]
    assert "path/to/file.py:callable" in text


@pytest.mark.parametrize("num_classes", [0, -3])
def test_class_count_below_one(num_classes):
    sentence("resnet8", f"num_classes={num_classes}: a classifier needs at least 1 class", num_classes=num_classes)


def test_weights_are_loaded(tmp_path):
    source = create_model("resnet8_tiny", num_classes=5)
    save_weights(source, tmp_path / "w.safetensors")
    model = create_model("resnet8_tiny", num_classes=5, weights=tmp_path / "w.safetensors")
    assert torch.equal(model.fc.weight, source.fc.weight)
    assert torch.equal(
        create_model("resnet8_tiny", num_classes=5, weights=str(tmp_path / "w.safetensors")).fc.bias, source.fc.bias
    )
    with pytest.raises(CheckpointError, match="wrong shapes"):
        create_model("resnet8_tiny", num_classes=6, weights=tmp_path / "w.safetensors")


def test_weights_are_loaded_into_ones_own_model(tmp_path, own):
    source = create_model(f"{own}:Net", num_classes=5)
    save_weights(source, tmp_path / "w.safetensors")
    model = create_model(f"{own}:Net", num_classes=5, weights=tmp_path / "w.safetensors")
    assert torch.equal(model.fc.weight, source.fc.weight)


@pytest.mark.parametrize("attribute", ["Net", "build", "build_any"])
def test_own_model_by_file_is_given_the_class_count(own, attribute):
    model = create_model(f"{own}:{attribute}", num_classes=5)
    assert model(torch.zeros(2, 4)).shape == (2, 5)


@pytest.mark.parametrize(("attribute", "classes"), [("build_fixed", 17), ("build_positional", 6)])
def test_own_callable_that_does_not_take_the_class_count_is_called_without(own, attribute, classes):
    assert create_model(f"{own}:{attribute}", num_classes=5).out_features == classes


@pytest.mark.parametrize("attribute", ["Net", "build", "build_any"])
def test_own_model_by_package(package, attribute):
    assert create_model(f"{package}.nets:{attribute}", num_classes=5).fc.out_features == 5


def test_relative_path_and_home(own, monkeypatch):
    monkeypatch.chdir(own.parent)
    assert create_model("my-nets.py:Net", num_classes=5).fc.out_features == 5
    monkeypatch.setenv("HOME", str(own.parent))
    monkeypatch.chdir("/")
    assert create_model("~/my-nets.py:Net", num_classes=5).fc.out_features == 5


def test_own_models_copy_and_pickle(own):
    model = create_model(f"{own}:Net", num_classes=5)
    x = torch.randn(2, 4)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    assert type(create_model(f"{own}:Net", num_classes=5)) is type(model)
    assert type(model).__module__.startswith("letkd_own_model_")


def test_files_of_the_same_name_do_not_meet_and_edits_are_seen(tmp_path):
    files = []
    for folder, classes in (("a", 3), ("b", 4)):
        (tmp_path / folder).mkdir()
        files.append(tmp_path / folder / "random.py")
        files[-1].write_text(f"from torch import nn\ndef build():\n    return nn.Linear(2, {classes})\n")
    known = sys.modules.get("random")
    assert [create_model(f"{file}:build", num_classes=5).out_features for file in files] == [3, 4]
    files[0].write_text(files[0].read_text().replace("3", "9"))
    assert [create_model(f"{file}:build", num_classes=5).out_features for file in files] == [9, 4]
    assert sys.modules.get("random") is known


def test_file_missing(tmp_path):
    sentence(f"{tmp_path}/nets.py:build", r"there is no file .*nets\.py; name your own model as path/to/file\.py:callable")


def test_attribute_missing_offers_the_nearest(own, package):
    assert "build_fixed" in sentence(f"{own}:build_fixd", r"my-nets\.py has no 'build_fixd'; nearest: ").split("nearest: ")[1]
    assert "Net" in sentence(f"{package}.nets:Nett", "letkd_test_package.nets has no 'Nett'; nearest: ").split("nearest: ")[1]


def test_not_callable(own):
    sentence(f"{own}:number", r"my-nets\.py:number' is a int and cannot be called; name a function or class")


def test_a_model_that_is_built_already(own):
    sentence(f"{own}:ready", "is a model, and a function or class that builds a new model is needed; name one")


def test_result_is_no_module(own):
    sentence(f"{own}:gives_class", "gives_class' returned a type; it must return an nn.Module")
    sentence(f"{own}:Settings", "Settings' returned a Settings; it must return an nn.Module")


def test_callable_that_fails_says_how_it_was_called_and_why(own):
    text = sentence(f"{own}:needs_more", "needs_more', called with num_classes=5, failed with TypeError: .*missing 1 required")
    assert "'width'" in text
    assert sentence(f"{own}:fails", "fails', called with no arguments, failed with ValueError: ").endswith("first line")


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("def build(:\n", "importing .*bad.py failed with SyntaxError: "),
        ("import letkd_no_such_dependency\n", "importing .*bad.py failed with ModuleNotFoundError: No module named 'letkd_no"),
        ("raise RuntimeError\n", "importing .*bad.py failed with RuntimeError$"),
        ("import sys\nsys.exit(3)\n", "importing .*bad.py failed with SystemExit: 3"),
    ],
)
def test_file_that_cannot_be_imported(tmp_path, source, match):
    (tmp_path / "bad.py").write_text(source)
    known = set(sys.modules)
    sentence(f"{tmp_path}/bad.py:build", match)
    assert not [name for name in set(sys.modules) - known if name.startswith("letkd_own_model")]


def test_package_missing():
    sentence(
        "letkd_no_such_package.nets:build",
        "there is no module 'letkd_no_such_package.nets'; install it, put its",
    )


def test_module_missing_in_a_package_that_exists(package):
    sentence(f"{package}.absent:build", "there is no module 'letkd_test_package.absent'; install it")


def test_package_whose_own_import_is_missing_names_that_import(package):
    sentence(f"{package}.broken:build", "importing .*broken failed with ModuleNotFoundError: No module named 'letkd_no")


@pytest.mark.parametrize("name", [":build", "file.py:", ":"])
def test_half_a_name(name):
    sentence(name, "does not name a callable; write package.module:callable or path/to/file.py:callable")


class Sized(nn.Module):
    """A network with the part of timm's interface that changes the image size."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Identity()
        self.patch_embed.img_size = (224, 224)

    def set_input_size(self, img_size):
        if img_size[0] % 16:
            raise ValueError("not a multiple of 16")
        self.patch_embed.img_size = img_size


def test_a_network_for_one_image_size_is_changed_to_another():
    model = Sized()
    assert set_image_size(model, (64, 32)) is model
    assert model.patch_embed.img_size == (64, 32)
    with pytest.raises(
        LetkdError, match=r"Sized is a network for images of 64x32 and cannot be changed to 20x20 \(ValueError: not a"
    ):
        set_image_size(model, (20, 20))
    plain = nn.Linear(2, 2)
    assert set_image_size(plain, (64, 32)) is plain


def test_registering_a_name_twice_is_refused():
    before = dict(MODELS)

    def resnet20(num_classes):
        return nn.Linear(1, num_classes)

    with pytest.raises(LetkdError, match=r"a model 'resnet20' is already registered by letkd\.models\.resnet; choose another"):
        register_model(resnet20)
    assert before == dict(MODELS)


def test_registered_function_is_found_and_stays_itself(monkeypatch):
    monkeypatch.setattr(MODELS, "_items", dict(MODELS))

    def fresh_net(num_classes):
        return nn.Linear(1, num_classes)

    assert register_model(fresh_net) is fresh_net
    assert "fresh_net" in list_models()
    assert create_model("fresh_net", num_classes=3).out_features == 3


LAYERS = """
    from torch import nn
    SCALE = {scale}

    def scaled(x):
        return SCALE * x

    class Act(nn.Module):
        class Inner(nn.Identity):
            pass

        def __init__(self):
            super().__init__()
            self.inner = Act.Inner()

        def forward(self, x):  # of {scale}
            return self.inner(scaled(x))
"""
NET = """
    from own_layers import Act
    def net():
        return Act()
"""
LAZY = """
    def net():
        from own_layers import Act
        return Act()
"""


def write(folder: Path, **files: str) -> Path:
    """A folder with these Python files; in a file's name `__` is the border of a folder."""
    for name, text in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def scale_of(path: Path) -> float:
    return create_model(f"{path}:net", num_classes=3)(torch.ones(1)).item()


@pytest.fixture
def program(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder from which the program itself imports."""
    (tmp_path / "program").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "program")
    yield tmp_path / "program"
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    """Two folders whose files have the same names."""
    return [
        write(tmp_path / name, model=NET, other=NET, lazy=LAZY, own_layers=LAYERS.format(scale=scale))
        for name, scale in (("a", 2.0), ("b", 3.0))
    ]


@pytest.mark.parametrize("file", ["model.py", "lazy.py"])
def test_a_file_imports_others_next_to_it(folders, file):
    known, path = set(sys.modules), list(sys.path)
    for _ in range(2):
        assert [scale_of(folder / file) for folder in folders] == [2, 3]
    assert sys.path == path
    assert all(name.startswith("letkd_own_") for name in set(sys.modules) - known)


def test_files_of_one_folder_share_what_they_import(folders):
    files = [folder / name for name in ("model.py", "other.py", "lazy.py") for folder in folders]
    kinds = [type(create_model(f"{file}:net", num_classes=3)) for file in files + files]
    assert kinds == kinds[:2] * 6
    assert kinds[0] is not kinds[1]


def test_a_file_does_not_see_those_of_another_folder(tmp_path, folders):
    scale_of(folders[0] / "model.py")
    write(tmp_path / "c", model=NET)
    sentence(f"{tmp_path}/c/model.py:net", "failed with ModuleNotFoundError: No module named 'own_layers'")


def test_models_of_imported_files_copy_pickle_and_show_their_source(folders):
    models = [create_model(f"{folder}/model.py:net", num_classes=3) for folder in folders]
    for model, scale in zip(models, (2, 3), strict=True):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(twin) is type(model)
            assert twin(torch.ones(1)) == scale
        __import__(type(model).__module__)  # as the pickler written in Python does
        assert f"# of {scale}.0" in inspect.getsource(type(model))


@pytest.mark.slow
def test_models_of_imported_files_compile(folders):
    for folder, scale in zip(folders, (2, 3), strict=True):
        model = create_model(f"{folder}/model.py:net", num_classes=3)
        assert torch.compile(nn.Sequential(model), backend="eager", fullgraph=True)(torch.ones(1)) == scale


def test_packages_next_to_a_file_with_and_without_an_init(tmp_path):
    net = """
        def net(num_classes):
            from own_nets import heads
            from own_nets.heads import Head
            assert Head is heads.Head
            return Head()
    """
    other = "from own_nets.deep.base import Base\ndef net():\n    return Base()\n"
    head = "from .deep.base import Base\nclass Head(Base):\n    scale = {}\n"
    base = "from torch import nn\nclass Base(nn.Module):\n    def forward(self, x):\n        return x * self.scale\n"
    for name, scale in (("a", 2), ("b", 3), ("c", 4)):
        write(
            tmp_path / name,
            other=other,
            model=net,
            own_nets__heads=head.format(scale),
            own_nets__deep__base=base,
        )
    (tmp_path / "b" / "own_nets" / "__init__.py").touch()
    for name in "abc":
        create_model(f"{tmp_path}/{name}/other.py:net", num_classes=3)
    for _ in range(2):
        assert [scale_of(tmp_path / name / "model.py") for name in "abc"] == [2, 3, 4]


def test_a_file_comes_before_a_module_of_the_program_but_not_for_the_program(program, tmp_path, folders):
    write(program, own_layers="Act = 'of the program'")
    path = list(sys.path)
    assert scale_of(folders[0] / "model.py") == 2
    of_program = importlib.import_module("own_layers")
    assert of_program.Act == "of the program"
    apart = (
        write(tmp_path / "c", own_layers="", apart="from torch import nn\ndef net():\n    return nn.Identity()\n") / "apart.py"
    )
    assert [scale_of(apart), *(scale_of(folder / "lazy.py") for folder in folders)] == [1, 2, 3]
    assert sys.modules["own_layers"] is of_program
    assert sys.path == path


def test_a_program_shares_the_modules_of_a_folder_that_it_can_import_from(program, folders):
    write(program, model=NET, own_layers=LAYERS.format(scale=4.0))
    model = create_model(f"{program}/model.py:net", num_classes=3)
    of_program = importlib.import_module("own_layers")
    assert type(model) is of_program.Act
    assert scale_of(folders[0] / "model.py") == 2
    assert sys.modules["own_layers"] is of_program


def test_installed_packages_come_before_files_of_their_names_and_stay_imported(program, tmp_path, monkeypatch):
    installed = write(tmp_path / "a" / ".venv" / "site-packages", own_installed="from torch import nn\nnet = nn.Identity\n")
    write(tmp_path / "a", own_installed="from own_installed import net\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    assert type(create_model(f"{tmp_path}/a/own_installed.py:net", num_classes=3)) is nn.Identity
    assert sys.modules["own_installed"].__file__ == f"{installed}/own_installed.py"


def test_a_file_named_as_letkd_does_not_replace_it(tmp_path):
    write(
        tmp_path, letkd="from letkd import create_model\ndef net():\n    return create_model('resnet8_tiny', num_classes=3)\n"
    )
    (tmp_path / "__main__.py").touch()
    known = sys.modules["__main__"]
    assert create_model(f"{tmp_path}/letkd.py:net", num_classes=3).num_classes == 3
    assert sys.modules["__main__"] is known


def test_a_package_that_is_installed_later_does_not_replace_a_file(program, tmp_path, folders, monkeypatch):
    assert scale_of(folders[0] / "model.py") == 2
    installed = write(tmp_path / "site-packages", own_layers="")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    of_program = importlib.import_module("own_layers")
    assert scale_of(folders[0] / "lazy.py") == 2
    assert sys.modules["own_layers"] is of_program


def test_installed_packages_that_a_file_adds_to_the_path_stay_there(program, tmp_path, monkeypatch):
    installed = write(tmp_path / "site-packages", own_installed="from torch import nn\nnet = nn.Identity\n")
    write(tmp_path, model=f"import sys\nsys.path.append({str(installed)!r})\nfrom own_installed import net\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    create_model(f"{tmp_path}/model.py:net", num_classes=3)
    assert str(installed) in sys.path
    assert sys.modules["own_installed"].net is nn.Identity


def test_folders_that_a_file_adds_to_the_path_are_its_own(tmp_path):
    net = """
        import os, sys
        sys.path.insert(0, os.path.join(os.path.dirname(__file__), "source"))
        from own_layers import Act
        def net():
            import own_lazy
            return Act()
    """
    path = list(sys.path)
    for name, scale in (("a", 2.0), ("b", 3.0)):
        write(tmp_path / name, model=net, source__own_layers=LAYERS.format(scale=scale), source__own_lazy="")
    for _ in range(2):
        assert [scale_of(tmp_path / name / "model.py") for name in "ab"] == [2, 3]
    assert sys.path == path


def test_a_file_builds_a_network_from_a_file_in_another_folder(tmp_path, folders):
    net = f"""
        from own_layers import SCALE
        from letkd import create_model
        inner = create_model("{folders[1]}/model.py:net", num_classes=3)
        def net():
            import own_more
            from torch import nn
            return nn.Sequential(create_model("{folders[0]}/lazy.py:net", num_classes=3), inner, own_more.Act())
    """
    write(folders[0], outer=net, own_more="from own_layers import Act")
    assert scale_of(folders[0] / "outer.py") == 2 * 3 * 2
    write(tmp_path / "c", model=NET)
    write(folders[0], failing=net.replace(f"{folders[1]}/model", f"{tmp_path}/c/model"))
    sentence(f"{folders[0]}/failing.py:net", "No module named 'own_layers'")


def test_files_imported_next_to_a_file_that_fails_are_taken_back(tmp_path, folders):
    known, path = set(sys.modules), list(sys.path)
    write(
        folders[0],
        bad="import own_layers\nimport letkd_no_such_dependency\n",
        bad_net="def net():\n    import own_layers\n    1 / 0\n",
    )
    sentence(f"{folders[0]}/bad.py:net", "No module named 'letkd_no_such")
    sentence(f"{folders[0]}/bad_net.py:net", "failed with ZeroDivisionError")
    assert sys.path == path
    assert all(name.startswith("letkd_own_") for name in set(sys.modules) - known)
    assert scale_of(folders[1] / "model.py") == 3


def test_threads_get_the_modules_of_their_folders(folders):
    for folder in folders:
        write(folder, slow="import time\ntime.sleep(0.05)\nfrom own_layers import Act\ndef net():\n    return Act()\n")
    path = list(sys.path)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(scale_of, [folder / "slow.py" for folder in folders] * 2)) == [2, 3, 2, 3]
    assert sys.path == path

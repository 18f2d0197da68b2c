"""Networks of timm, transformers and torchvision as teacher and as student: places, steps, resuming, student files, exports."""

import importlib.util
import io

import pytest
import torch

from letkd.deploy.export import as_program, trace
from letkd.distiller.facts import Facts
from letkd.errors import UnsupportedPair
from letkd.layer.folded import fold_student
from letkd.taps import as_logits
from letkd.taps.layouts import Tokens
from tests.support.networks import METHODS, NETWORKS, C, batches, distiller, run, size_of

TOKENS = [name for name in NETWORKS if name.endswith(("vit", "distilled", "reg", "dinov2", "siglip")) and "mobile" not in name]
PREFIX = {"timm_deit_distilled": 2, "timm_dinov2_reg": 5, "transformers_dinov2_reg": 5, "transformers_siglip": 0}


@pytest.fixture(autouse=True)
def _installed(request):
    library = request.getfixturevalue("name").partition("_")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: `make test-extras`, or pip install 'letkd[{library}]'")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("role", ["teacher", "student"])
@pytest.mark.parametrize("name", NETWORKS)
def test_fit_step_resume_and_ship(name, role, method, tmp_path):
    added = run(name, role, method, tmp_path)
    assert (added > 0) == (method in ("letkd-1", "letkd-2"))


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_before_the_patches_are_known(name):
    made = distiller(name, "student", "quest")
    assert made.student_reads["penultimate"].layout == "tokens"
    assert made._student_reads.layouts["penultimate"] == Tokens(PREFIX.get(name, 1), (4, 4))


@pytest.mark.parametrize("name", ["timm_vit", "timm_swin", "transformers_dinov2", "transformers_swin", "torchvision_vit"])
def test_a_graph_of_the_student_with_its_layers(name):
    stream = batches(size_of(name))
    made = distiller(name, "student", "letkd-2").fit(stream).train()
    made(stream[0]).loss.backward()
    student, x = made.export(), stream[0].x
    traced = trace(fold_student(student), Facts(num_classes=C, size=(size_of(name),) * 2))
    program = torch.export.load(io.BytesIO(as_program(traced))).module()
    with torch.no_grad():
        torch.testing.assert_close(program(x), as_logits(student(x), student), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["letkd-1", "letkd-2", "quest", "fitnet"])
@pytest.mark.parametrize(
    "name", ["timm_dinov2_reg", "transformers_dinov2", "transformers_siglip", "timm_swin", "timm_convnext"]
)
def test_backbones_teach_features(name, method):
    stream = batches(size_of(name))
    step = distiller(name, "teacher", method, headless=True).fit(stream).train()(stream[0])
    step.loss.backward()
    assert torch.isfinite(step.loss)


@pytest.mark.parametrize("name", ["timm_dinov2_reg", "transformers_dinov2"])
def test_kd_with_a_backbone_gets_a_sentence(name):
    with pytest.raises(UnsupportedPair, match=r"kd reads the teacher's logits, and \w+ has no classifier"):
        distiller(name, "teacher", "kd", headless=True)

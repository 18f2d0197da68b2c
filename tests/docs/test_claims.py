"""What the questions page promises and no other test shows."""

import pytest

from letkd.methods import METHODS
from letkd.recipes import resolve
from letkd.recipes.schedule import phase_at
from letkd.training import finish, loop


@pytest.mark.slow
def test_the_test_split_is_read_after_the_last_epoch_only(tmp_path, monkeypatch):
    seen = []

    def looking(real):
        def look(student, loader, *, description, **options):
            seen.append(description.rpartition(" ")[2])
            return real(student, loader, description=description, **options)

        return look

    monkeypatch.setattr(finish, "score", looking(finish.score))
    settings = ["train.epochs=2", "data.fraction=0.05", "student.model='resnet8_tiny'"]
    result = loop.train(resolve("digits/tiny/ce", settings=settings), tmp_path / "run")
    first = seen.index("test")
    assert seen[:first] == ["val", "val"]  # one an epoch
    assert result.best_val_test is not None


def test_fitnet_in_two_stages(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        """
        data = {name = "digits"}
        student = {model = "resnet8_tiny"}
        teacher = {model = "resnet14_tiny"}
        weights = {ce = 1.0, fitnet = 0.0}

        [[phases]]
        epochs = 40
        weights = {ce = 0.0, fitnet = 1.0}
        """
    )
    recipe = resolve(path, method="fitnet")
    assert list(recipe.methods) == ["fitnet"]
    assert METHODS["fitnet"].from_recipe(recipe.methods["fitnet"]).role == "stage2"
    assert phase_at(40, recipe)[1].weights == {"ce": 0.0, "fitnet": 1.0}
    assert phase_at(41, recipe) == (1, None)
    assert recipe.weights == {"ce": 1.0, "fitnet": 0.0}


@pytest.mark.parametrize("pair", ["cifar100/rn56-rn20", "imagenet/rn34-rn18", "tiny-imagenet/rn56-rn20"])
def test_the_papers_cells_train_on_all_images_and_own_runs_hold_some_out(pair):
    assert resolve(pair, method="kd").data.val == 0
    own = {"data.name": "folder", "student.model": "resnet20"}
    assert resolve(None, method="ce", overrides=own).data.val == 0.1

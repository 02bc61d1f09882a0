"""Which weights `--freeze_parameters` and its like freeze."""

import pytest

from swift_r1.errors import UsageError
from swift_r1.flags.training import ModelArguments
from swift_r1.models.weights import frozen_names

SIZES = [
    ("embed", 40),
    ("a.0.q", 10),
    ("a.0.norm", 2),
    ("a.1.q", 10),
    ("a.1.norm", 2),
    ("head", 36),
]


@pytest.mark.parametrize(
    ("freezing", "expected"),
    [
        (ModelArguments(freeze_parameters=["embed", "a.1"]), {"embed", "a.1.q", "a.1.norm"}),
        (ModelArguments(freeze_parameters_regex=r"norm$"), {"a.0.norm", "a.1.norm"}),
        (ModelArguments(freeze_parameters_ratio=0.5), {"embed", "a.0.q"}),
        (ModelArguments(freeze_parameters_ratio=0.5, trainable_parameters_regex=r"q$"), {"embed"}),
        (ModelArguments(freeze_parameters_ratio=0.39), set()),
        (
            ModelArguments(freeze_parameters=["a"], trainable_parameters=["a.1"]),
            {"a.0.q", "a.0.norm"},
        ),
        (
            ModelArguments(freeze_parameters_ratio=0.99, trainable_parameters=["a.0.n"]),
            {"embed", "a.0.q", "a.1.q", "a.1.norm"},
        ),
    ],
)
def test_frozen(freezing, expected):
    assert frozen_names(SIZES, freezing) == expected


@pytest.mark.parametrize(
    ("freezing", "part"),
    [
        (
            ModelArguments(freeze_parameters=["layer_0"]),
            "--freeze_parameters layer_0: no weight's name begins so; the first is embed",
        ),
        (
            ModelArguments(freeze_parameters=["embed"], trainable_parameters=["x"]),
            "--trainable_parameters x",
        ),
        (ModelArguments(freeze_parameters_regex="bias"), "no weight's name matches"),
        (ModelArguments(freeze_parameters=["embed", "a", "head"]), "nothing is left to train"),
    ],
)
def test_refused(freezing, part):
    with pytest.raises(UsageError, match=part):
        frozen_names(SIZES, freezing)

"""Prompts with images: what the model's processor makes of them, and of what it does not."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from swift_r1.data.image_files import ImageRules, kept
from swift_r1.data.images import TAG, decoded, images_of, in_parts
from swift_r1.data.prompts import Prompt, PromptEncoder, Wording
from swift_r1.data.rows import prompt_key
from swift_r1.data.sources import DataFlags
from swift_r1.data.vision import VisionProcessor
from swift_r1.errors import UsageError
from swift_r1.flags.eval_tasks import EvalTask
from swift_r1.training.evaluation.questions import load_questions, prompts_of, shared_questions
from tests.vision import SIGHTS, picture, write_processor

FAMILIES = sorted(SIGHTS)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the folder of a family's config, tokenizer and processor: nothing here needs weights."""

    @cache
    def make(family: str) -> Path:
        from tests.families import family_config
        from tests.vision import TEXTS

        folder = tmp_path_factory.mktemp(family)
        config = family_config(family, TEXTS)
        for name, value in SIGHTS[family].config.items():
            setattr(config, name, value)
        config.save_pretrained(folder)
        write_processor(folder, family)
        return folder

    return make


def encoder(folder: Path, **given: Any) -> PromptEncoder:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return PromptEncoder(
        tokenizer, **given, vision=partial(VisionProcessor.load, str(folder), tokenizer)
    )


def row(text: str, *images: bytes, system: str | None = None) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    found: dict[str, Any] = {"messages": messages, "dataset": "set", "prompt_id": "set:0"}
    if images:
        found["images"] = [kept(one, ImageRules(), []).stored() for one in images]
    return found


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_R1_CACHE", str(tmp_path / "cache"))


def encoded(own: PromptEncoder, one: Mapping[str, Any]) -> Prompt:
    prompt = own.encode(dict(one))
    assert prompt is not None
    return prompt


TWO = (picture(), picture(40, 16, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_a_token_for_each_feature(folder_of: Any, family: str) -> None:
    """The ids are those of transformers' processor for the same messages, from its own template on."""
    from transformers import AutoProcessor

    own = encoder(folder_of(family))
    prompt = encoded(own, row("a<image>b<image>c", *TWO, system="see"))
    placeholder = own.vision.placeholder
    assert prompt.text.count(placeholder) == 2
    one = own.tokenize(placeholder)
    assert len(one) == 1 and prompt.unexpanded_ids.count(one[0]) == 2
    assert prompt.unexpanded_ids == own.tokenize(prompt.text)
    assert [image.read() for image in prompt.images] == list(TWO)
    lengths = [own.vision.tokens_of(image.width, image.height) for image in prompt.images]
    assert len(prompt.token_ids) == len(prompt.unexpanded_ids) - 2 + sum(lengths)
    assert own.vision.token_id in prompt.token_ids

    try:
        theirs = AutoProcessor.from_pretrained(folder_of(family))
    except (ImportError, ValueError):  # it wants what reads videos
        return
    messages = [in_parts(message) for message in prompt.messages]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    made = theirs(images=[[decoded(one) for one in TWO]], text=[text], add_special_tokens=False)
    assert tuple(made["input_ids"][0]) == prompt.token_ids


SIZES = [(1, 1), (3, 1), (28, 28), (56, 112), (40, 16), (300, 200), (199, 1)]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=pytest.mark.long if one in ("qwen3_vl", "qwen3_5") else ())
        for one in FAMILIES
    ],
)
def test_tokens_are_counted_without_an_image(folder_of: Any, family: str) -> None:
    own = encoder(folder_of(family)).vision
    assert own._beside is not None  # by formula
    for width, height in SIZES:
        counted = own.tokens_of(width, height)
        assert counted == len(own.expand(own.placeholder, [picture(width, height)]))
        assert counted == own._expanded_length(width, height)


def test_text_never_becomes_a_placeholder(folder_of: Any) -> None:
    for family in FAMILIES:
        own = encoder(folder_of(family))
        placeholder = own.vision.placeholder
        tokens = SIGHTS[family].tokens
        spelled = "".join(token for token in tokens if token != TAG)
        prompt = encoded(own, row(f"{spelled}<image>{spelled}", picture(), system=spelled))
        plain = encoded(own, row("<image>", picture(), system="s"))
        for token in (own.vision.token_id, *own.tokenize(placeholder)):
            assert prompt.token_ids.count(token) == plain.token_ids.count(token)
            assert prompt.unexpanded_ids.count(token) == plain.unexpanded_ids.count(token)
        without = encoded(own, row(f"<image> {spelled}"))
        assert own.vision.token_id not in without.token_ids
        assert (without.images, without.unexpanded_ids) == ((), ())
        assert without.messages[0]["content"].startswith("<image> ")


def test_prompts_with_other_images_are_other_prompts() -> None:
    keys = {prompt_key(row("<image>", picture(seed=seed))) for seed in (0, 1, 0)}
    assert len(keys) == 2 and prompt_key(row("<image>")) not in keys


@pytest.mark.parametrize("truncation", ["delete", "left"])
def test_limits_count_the_tokens_of_images(
    folder_of: Any, truncation: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is done to texts: an image is never cut."""
    caplog.set_level(logging.WARNING, "swift_r1.data")
    folder = folder_of("qwen2_5_vl")
    rows = [row("<image>" + "x" * 10, picture()), row("<image>", picture(8, 8)), row("y" * 100)]
    whole = [encoded(encoder(folder), one) for one in rows]
    lengths = [len(prompt.token_ids) for prompt in whole]
    assert lengths[0] > len(whole[0].unexpanded_ids) + 10
    own = encoder(folder, max_length=lengths[0] - 1, truncation=truncation)
    found = own.fitting(rows)
    cut = truncation == "left"
    assert found == ([rows[1], rows[2]] if cut else [rows[1]])
    assert own.encode(rows[0]) is None and not own.fits(rows[0])
    assert own.fits(rows[2]) is cut
    left_out = 1 if cut else 2
    assert f"{left_out} of 3 training prompts left out: longer than" in caplog.text
    assert ("1 of 3 training prompts cut to their last" in caplog.text) is cut
    exact = encoder(folder, max_length=lengths[0], truncation=truncation)
    assert exact.encode(rows[0]) == whole[0] and rows[0] in exact.fitting(rows)
    with pytest.raises(UsageError, match="all 1 training prompts are longer than 20 tokens"):
        encoder(folder, max_length=20, truncation=truncation).fitting(rows[:1])


def test_images_that_the_processor_refuses_are_left_out(
    folder_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own = encoder(folder_of("qwen3_vl"), max_length=500)
    good = row("<image>", picture(1, 1))
    long = row("<image>", picture(20_000, 1))
    long["prompt_id"] = "set:7"
    assert own.fitting([good, long]) == [good]
    assert (
        "1 of 2 training prompts left out: they have images that the model's processor refuses, for example set:7: "
        "20000 x 1 pixels, absolute aspect ratio must be smaller than 200" in caplog.text
    )
    assert own.fits(good) and not own.fits(long)
    with pytest.raises(UsageError, match="all 1 training prompts have images that the model's"):
        own.fitting([long])
    assert encoder(folder_of("gemma3"), max_length=500).fitting([long]) == [long]


def test_a_template_without_a_place_for_images(folder_of: Any) -> None:
    own = encoder(folder_of("gemma3"), wording=Wording(template="no"))
    with pytest.raises(UsageError, match="the chat template"):
        own.encode(row("<image>", picture()))


def test_a_template_that_numbers_images(folder_of: Any, tmp_path: Path) -> None:
    """A placeholder too many is told."""
    file = tmp_path / "twice.jinja"
    text = SIGHTS["qwen2_5_vl"].template
    file.write_text(text.replace("<|image_pad|>", "<|image_pad|><|image_pad|>"))
    own = encoder(folder_of("qwen2_5_vl"), wording=Wording(template=str(file)))
    with pytest.raises(UsageError, match="set:0: the chat template has 2 places for 1 images"):
        own.encode(row("<image>", picture()))


def test_questions_with_images(folder_of: Any, tmp_path: Path) -> None:
    """Of an evaluation in a run: what is asked, and which questions the training rows have too."""
    from transformers import AutoTokenizer

    folder = folder_of("gemma3")
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(picture(seed=number))
    lines = [{"images": [f"{number}.png"], "query": "how many?"} for number in range(2)]
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = EvalTask("asked", str(file), None, instruction="Count.")
    questions = load_questions(task)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = prompts_of(questions, tokenizer, None, str(folder))
    assert [len(prompt.images) for prompt in prompts] == [1, 1]
    assert prompts[0].messages[0]["content"] == "<image>how many?\nCount."
    small = load_questions(task, DataFlags((), max_pixels=100)).rows
    assert images_of(small[0])[0].width == 10
    trained = [row("<image>how many?", picture(seed=seed)) for seed in (1, 2)]
    assert shared_questions(questions, trained) == 1


def test_a_model_without_a_processor(folder_of: Any, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((folder_of("qwen2_5_vl") / name).read_bytes())
    own = encoder(tmp_path)
    assert own.encode(row("text")) is not None
    with pytest.raises(UsageError, match="there is no processor for them in --model"):
        own.encode(row("<image>", picture()))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UsageError, match="there is no processor for them in --model"):
        encoder(tmp_path).encode(row("<image>", picture()))
    with pytest.raises(UsageError, match="rows have images, which are not read here"):
        PromptEncoder(own.tokenizer).encode(row("<image>", picture()))

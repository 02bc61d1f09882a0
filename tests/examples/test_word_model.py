"""`examples/mini`: what the model of the word problems is taught."""

from __future__ import annotations

import re
import sys

from swift_r1.data.conversations import ConversationEncoder
from swift_r1.data.loading import load_rows
from swift_r1.data.prompts import PromptEncoder
from swift_r1.data.sources import DataFlags
from swift_r1.plugins import load_plugins
from tests.conftest import REPO

sys.path += [str(REPO / "examples" / one) for one in ("mini", "countdown_demo")]

import word_model
import word_problems


def test_its_prompts_are_those_of_the_recipes() -> None:
    load_plugins([str(REPO / "examples/mini/word_plugin.py")])
    tokenizer = word_model.make_tokenizer()
    encoder = ConversationEncoder(tokenizer)
    forms = word_problems.FORMS
    prompts = {name: PromptEncoder(tokenizer, form.wording) for name, form in forms.items()}
    met = set()
    for row in load_rows(DataFlags(dataset=["word_traces#200"], whole=True)).train:
        (sequence,) = encoder.encode(row).sequences
        assert tokenizer.unk_token_id not in sequence.token_ids
        text = tokenizer.decode(sequence.token_ids)
        (question,) = re.findall(r"(?:Question: |user\n)(.*\?)", text.partition("####")[0])
        asked = [{"role": "user", "content": question}]
        # As `swift rlhf` asks: another form's prompt is another text.
        (name,) = (
            name
            for name, one in prompts.items()
            if sequence.token_ids[: len(one.tokenize(one.render(asked)))]
            == tuple(one.tokenize(one.render(asked)))
            and ("boxed" in text) == (name == "boxed")
        )
        prefix = forms[name].wording.response_prefix
        prompt = prompts[name].render(asked).removesuffix(prefix)
        learned = [token for token, is_learned in zip(*sequence[:2], strict=True) if is_learned]
        assert prompt + tokenizer.decode(learned) == text
        assert learned[-1] == tokenizer.eos_token_id
        met.add(name)
    assert met == set(forms)

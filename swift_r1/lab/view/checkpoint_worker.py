"""`python -m swift_r1.lab.view.checkpoint_worker FOLDER DEVICE IDLE_S`: a checkpoint that answers the page's questions.

A line of JSON on standard input is a question, one on standard output its answer. It gives way to every other process
of the machine: a training may run beside it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from swift_r1.errors import EXIT_OK, SwiftError, one_line
from swift_r1.runtime.libraries import large_imports
from swift_r1.runtime.processes import end_with_parent, leave

_NICE = 19
_SEEDS = 2**63


class Checkpoint:
    """A model folder through transformers in this process."""

    def __init__(self, folder: str, device: str) -> None:
        with large_imports():
            import torch

            from swift_r1.lab.folder_engine import load_folder_engine
            from swift_r1.models.loading import load_tokenizer

        device = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu"
        if device == "cpu":
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
        self.tokenizer = load_tokenizer(folder)
        self.engine = load_folder_engine(folder, self.tokenizer, None, device)

    def ask(self, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Answers a `PageQuestion`. Raises ValueError: the prompt has no tokens, or the model cannot take it."""
        from swift_r1.serving.engines.base import PromptTokenizer
        from swift_r1.wire.protocol import RolloutRequest, SamplingParams

        prompts = PromptTokenizer(self.tokenizer)
        ends = set(self.engine.eos.tolist())
        if asked["chat"]:
            tokens = prompts.render([{"role": "user", "content": asked["prompt"]}])
            if prompts.turn_end is not None:
                ends.add(prompts.turn_end)
        else:  # as training does: the text has its special tokens
            tokens = tuple(self.tokenizer(asked["prompt"], add_special_tokens=False)["input_ids"])
        longest = getattr(self.engine.config, "max_position_embeddings", None)
        if not tokens:
            raise ValueError("the prompt has no tokens")
        self._refuse_images(tokens)
        if longest is not None and len(tokens) + asked["max_tokens"] > longest:
            raise ValueError(
                f"{len(tokens)} prompt + {asked['max_tokens']} new tokens, the model takes {longest}"
            )
        sampling = SamplingParams(
            max_tokens=asked["max_tokens"],
            temperature=asked["temperature"],
            stop_token_ids=tuple(sorted(ends)),
        )
        seeds = tuple(int.from_bytes(os.urandom(8)) % _SEEDS for _ in range(asked["n"]))
        request = RolloutRequest(
            request_id="try",
            prompt_token_ids=tokens,
            n=asked["n"],
            seeds=seeds,
            sampling=sampling,
        )
        [output] = self.engine.generate([request], 0)
        return [
            {
                "text": self.tokenizer.decode(one.token_ids, skip_special_tokens=True),
                "pieces": self._pieces(one.token_ids),
                "logps": one.logprobs,
                "finish_reason": one.finish_reason,
            }
            for one in output.completions
        ]

    def alternatives(self, asked: Mapping[str, Any]) -> list[tuple[str, float]]:
        """Returns the likeliest next tokens and their log-probs after temperature (0: at 1, as of a sample)."""
        import torch

        self._refuse_images(asked["token_ids"])
        if max(asked["token_ids"], default=0) >= self.engine.config.vocab_size:
            raise ValueError("the tokens are not of this model's vocabulary")
        with torch.inference_mode():
            model = self.engine.model
            tokens = torch.tensor([asked["token_ids"]], device=model.device)
            logits = (
                model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[0, -1].float()
            )
        logps, ids = (logits / (asked["temperature"] or 1.0)).log_softmax(-1).topk(asked["count"])
        return list(zip(self._pieces(ids.tolist()), logps.tolist(), strict=True))

    def _refuse_images(self, token_ids: Sequence[int]) -> None:
        """Raises ValueError where a prompt has places for images: without them the answer would be to another one."""
        from swift_r1.models.multimodal import placeholders

        if not set(token_ids).isdisjoint(placeholders(self.engine.model.config)):
            raise ValueError("the prompt has images, which a checkpoint is not shown here")

    def _pieces(self, token_ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([one]) for one in token_ids]


def main(argv: Sequence[str]) -> int:
    """Answers until its input ends, or nothing was asked for `IDLE_S` seconds."""
    end_with_parent(signal.SIGKILL)
    folder, device, idle_s = argv
    os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(content: Mapping[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        checkpoint = Checkpoint(folder, device)
    except SwiftError as error:
        answer({"error": one_line(error)})
        return error.exit_code
    answer({"answer": "ready"})
    questions = {"ask": checkpoint.ask, "alternatives": checkpoint.alternatives}
    while select.select([sys.stdin], [], [], float(idle_s))[0] and (line := sys.stdin.readline()):
        [(kind, asked)] = json.loads(line).items()
        try:
            answer({"answer": questions[kind](asked)})
        except Exception as error:  # noqa: BLE001 - shown on the page, which goes on
            answer({"error": one_line(error)})
    return EXIT_OK


if __name__ == "__main__":
    leave(main(sys.argv[1:]))

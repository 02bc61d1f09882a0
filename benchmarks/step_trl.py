"""TRL's side of `train_step.py`: its own GRPOTrainer, handed the same completions. Runs in TRL's environment."""

from __future__ import annotations

import os
import sys
import tempfile
import time

import torch
from step_work import Clock, Work, peak_bytes, report

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    """Whole optimizer steps, from the first micro-batch (with scoring) to the updated weights."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.steps, self.started = clock, [], 0.0

    def on_step_begin(self, *args, **kwargs) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *args, **kwargs) -> None:
        self.steps.append(self.clock.take() | {"train": time.perf_counter() - self.started})


def main() -> None:
    work = Work.read(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    completions = len(work.completion_ids)
    by_prompt = {str(n): ids for n, ids in enumerate(work.prompt_ids)}

    def given(prompts, trainer):
        numbers = [int(prompt) for prompt in prompts]
        return {
            "prompt_ids": [by_prompt[prompt] for prompt in prompts],
            "completion_ids": [
                work.completion_ids[number * work.generations + place % work.generations]
                for place, number in enumerate(numbers)
            ],
            "logprobs": None,
        }

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=work.micro,
            gradient_accumulation_steps=completions // work.micro,
            num_generations=work.generations,
            max_completion_length=work.new_tokens,
            max_steps=work.steps,
            learning_rate=1e-6,
            beta=0.0,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
            gradient_checkpointing="kept" not in sys.argv[1],
            model_init_kwargs={"dtype": work.dtype},
            bf16=work.dtype == "bfloat16",
            generation_kwargs={"min_new_tokens": work.new_tokens},
        )
        clock = Clock()
        times = StepTimes(clock)
        trainer = GRPOTrainer(
            model=work.model,
            args=config,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": list(by_prompt) * work.steps}),
            reward_funcs=lambda completions, **kwargs: [
                float(number % 2) for number in range(len(completions))
            ],
            rollout_func=given,
            callbacks=[times],
        )
        clock.wrap(trainer, "_get_per_token_logps_and_entropies", "forward")
        clock.wrap(trainer.accelerator, "backward", "backward")
        trainer.create_optimizer()
        clock.wrap(trainer.optimizer, "step", "optimizer")
        trainer.train()
        peak, generate = peak_bytes(), None
        if work.generate:
            prompts = [ids for ids in work.prompt_ids for _ in range(work.generations)]
            with clock.part("generate"):
                trainer._generate_single_turn(prompts, None, {}, work.generations)
            generate = clock.take()["generate"]
    report(times.steps, peak, generate, trainer.model, work.dtype)


if __name__ == "__main__":
    main()

"""torchrun --nproc-per-node 2 -m fsdp_c examples/07_huggingface.py

Fine-tunes a small Llama, built from a config, with the Trainer of transformers on CPU ranks, stops
half way and resumes; then trains LoRA adapters (PEFT) on top of it. It knows torch, transformers
and peft only: the launcher puts fsdp_c behind torch's `fully_shard` and lets accelerate shard on
CPU ranks.

    torchrun --nproc-per-node 2 -m fsdp_c --fsdp1 examples/07_huggingface.py --version 1

does the same through FSDP1's FullyShardedDataParallel.
"""

import argparse
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist

try:
    import accelerate  # noqa: F401
    import peft
    import transformers
except ImportError as error:
    print(f"skipped: {error}; pip install transformers peft accelerate")
    sys.exit(0)


class Patterns(torch.utils.data.Dataset):
    """Sequences that repeat three tokens: the second half can be told from the first."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([(index % 8 * step) % 61 for step in (3, 5, 7)] * 4)
        return {"input_ids": tokens, "labels": tokens}


def build() -> transformers.PreTrainedModel:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def trainer_for(model: Any, folder: str, version: int, steps: int) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        save_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        use_cpu=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={"version": version, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        disable_tqdm=True,
        report_to="none",
        seed=0,
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=Patterns())


def losses_of(trainer: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def fine_tune(folder: str, version: int) -> Any:
    """Eight steps in one go, and again from the checkpoint after four."""
    trainer = trainer_for(build(), folder, version, steps=8)
    trainer.train()
    resumed = trainer_for(build(), folder, version, steps=8)
    resumed.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-4"))
    whole, second = losses_of(trainer), losses_of(resumed)
    if dist.get_rank() == 0:
        print(f"runs as {type(trainer.model_wrapped).__name__}")
        print(f"loss {whole[0]:.3f} -> {whole[-1]:.3f}, resumed at step 4 -> {second[-1]:.3f}")
    assert abs(whole[-1] - second[-1]) < 1e-3
    return resumed.accelerator.get_state_dict(resumed.model_wrapped)


def adapt(weights: Any, folder: str, version: int) -> None:
    """LoRA on the tuned model: frozen and trainable parameters in the same units."""
    box = [weights if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    model = build()
    model.load_state_dict(box[0])
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = trainer_for(peft.get_peft_model(model, lora), folder, version, steps=4)
    trainer.train()
    losses = losses_of(trainer)
    if dist.get_rank() == 0:
        print(f"LoRA: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", type=int, default=2, choices=(1, 2), help="of FSDP's API")
    version = parser.parse_args().version
    transformers.logging.set_verbosity_error()
    box = [tempfile.mkdtemp() if os.environ.get("RANK", "0") == "0" else None]
    dist.init_process_group("gloo")
    dist.broadcast_object_list(box)
    weights = fine_tune(os.path.join(box[0], "tuned"), version)
    adapt(weights, os.path.join(box[0], "lora"), version)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

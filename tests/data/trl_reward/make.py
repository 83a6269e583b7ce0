"""Makes the reward models beside it with TRL's own trainer: ``python make.py`` where ``trl==1.16.0`` is installed.

One is trained with a pad token of its own and one with ``pad_token == eos_token``. ``scores.json`` holds the scores
that TRL's model gives for a few pairs, tokenized and batched by TRL's own trainer.
"""

import json
import random
import shutil
import string
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import RewardConfig, RewardTrainer

HERE = Path(__file__).parent
SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")


def tokenizer(pad):
    letters = string.ascii_letters + string.digits + " .,:!?#\n"
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *letters))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token=pad
    )


def pairs(count, seed):
    draw = random.Random(seed)

    def word():
        return "".join(draw.choices("abcdefgh", k=draw.randint(2, 6)))

    return [{"prompt": f"say {word()}: ", "chosen": f"{word()}{word()}!", "rejected": word()} for _ in range(count)]


def make(name, pad):
    torch.manual_seed(0)
    text = tokenizer(pad)
    config = LlamaConfig(
        vocab_size=len(text),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        num_labels=1,
        initializer_range=0.3,
    )
    options = RewardConfig(
        output_dir=str(HERE / name),
        max_steps=40,
        save_steps=40,
        save_only_model=True,
        learning_rate=3e-3,
        per_device_train_batch_size=8,
        bf16=False,
        use_cpu=True,
        report_to="none",
        seed=0,
    )
    trainer = RewardTrainer(
        LlamaForSequenceClassification(config),
        options,
        train_dataset=Dataset.from_list(pairs(160, 0)),
        processing_class=text,
    )
    trainer.train()
    trainer.save_model()
    model = trainer.model.eval()
    held_out = pairs(6, 1)
    rows = trainer._prepare_dataset(Dataset.from_list(held_out), text, options, "held-out")
    batch = trainer.data_collator([{key: row[key] for key in ("chosen_ids", "rejected_ids")} for row in rows])
    with torch.no_grad():
        scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].tolist()
    found = {"pairs": held_out, "chosen": scores[: len(held_out)], "rejected": scores[len(held_out) :]}
    (HERE / name / "scores.json").write_text(json.dumps(found, indent=1) + "\n")
    shutil.rmtree(HERE / name / "checkpoint-40")
    (HERE / name / "training_args.bin").unlink()


for name, pad in (("own_pad", "<pad>"), ("pad_is_eos", "</s>")):
    shutil.rmtree(HERE / name, ignore_errors=True)
    make(name, pad)

"""Measures what docs/differences.md says of CoMLRL's gradients. Runs where CoMLRL 1.4.3 is installed.

    python tests/comlrl/compare_gradients.py MODEL

``MODEL`` is the directory of a tokenizer, such as that of ``builtin:tiny``; the models are small and random.
"""

import sys

import torch
from comlrl.trainers import MAACConfig, MAACTrainer, MAGRPOConfig, MAGRPOTrainer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

RETURNS = [1.0, 0.0, 2.0, 0.5]
LENGTHS = {"6, without EOS": (6, 6, 6, 6), "48, without EOS": (48, 48, 48, 48)}
ENDED = {"2 to 6, with EOS": (1, 5, 3, 2), "6 to 48, with EOS": (5, 47, 20, 33)}


def model(tokenizer, seed, spread):
    """A random model."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=spread, **sizes, **ids)).double()


def no_reward(first, second):
    """Nothing is trained on it."""
    return [0.0 for _ in zip(first, second, strict=True)]


def gradient(policy, loss):
    """All gradients of a loss as one vector."""
    policy.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def every_token(policy, prompt, responses, eos):
    """The loss over all tokens of each response up to its EOS, written out."""
    total = 0.0
    for response, value in zip(responses, RETURNS, strict=True):
        ids = response.tolist()
        tokens = torch.tensor(ids[: ids.index(eos) + 1] if eos in ids else ids)
        logps = policy(torch.cat([prompt, tokens])[None]).logits[0].log_softmax(-1)
        advantage = value - sum(RETURNS) / len(RETURNS)
        total -= advantage * logps[len(prompt) - 1 : -1].gather(1, tokens[:, None]).sum()
    return total / len(responses)


def magrpo(tokenizer):
    """How far a group's gradient is from that of all response tokens."""
    args = MAGRPOConfig(num_turns=1, agent_devices="cpu", advantage_normalization=False)
    agents = [model(tokenizer, seed, spread=0.2) for seed in (1, 2)]
    trainer = MAGRPOTrainer(agents=agents, tokenizer=tokenizer, reward_func=no_reward, args=args)
    prompt, policy = torch.tensor(tokenizer("ab").input_ids), agents[0]

    def loss(responses):
        data = {"prompt_input_ids": prompt[None], "completion_input_ids": [responses], "reference_kls": []}
        return trainer._compute_loss_with_gradients(policy, data, RETURNS)

    torch.manual_seed(0)
    for name, lengths in (LENGTHS | ENDED).items():
        rows = [
            torch.randint(70, 110, (length,)).tolist() + [tokenizer.eos_token_id] * (name in ENDED)
            for length in lengths
        ]
        longest = max(map(len, rows))
        padded = [torch.tensor(row + [tokenizer.pad_token_id] * (longest - len(row))) for row in rows]
        wanted = gradient(policy, every_token(policy, prompt, padded, tokenizer.eos_token_id))
        difference = (gradient(policy, loss(padded)) - wanted).norm() / wanted.norm()
        print(f"responses of {name}: the gradient differs by {difference:.0%}")  # noqa: T201
    exchanged = [torch.cat([row[:-1], row[-1:] + 1]) for row in padded]
    print("another last token, the same loss:", bool(loss(padded) == loss(exchanged)))  # noqa: T201


def maac(tokenizer):
    """Where a response ends if the pad token is EOS."""
    tokenizer.pad_token = tokenizer.eos_token
    options = {"top_p": 1.0, "temperature": 1.0, "top_k": 0, "max_new_tokens": 400, "num_generations": 8}
    args = MAACConfig(num_turns=1, agent_devices="cpu", **options)
    models = [model(tokenizer, seed, spread=0.02) for seed in (1, 2, 3)]
    trainer = MAACTrainer(agents=models[:2], critics=models[2:], tokenizer=tokenizer, reward_func=no_reward, args=args)
    rollout = trainer._generate(models[0], "ab", 0)
    rows = rollout["sequences"][:, rollout["prompt_len"] :].tolist()
    ended = [(row, count) for row, count in zip(rows, rollout["response_lens"], strict=True)
             if tokenizer.eos_token_id in row]  # fmt: skip
    print("index of EOS, and tokens trained:", [(row.index(tokenizer.eos_token_id), n) for row, n in ended])  # noqa: T201


if __name__ == "__main__":
    magrpo(AutoTokenizer.from_pretrained(sys.argv[1]))
    maac(AutoTokenizer.from_pretrained(sys.argv[1]))

"""Write small Hugging Face checkpoints to try the recipes on: a base and three agents.

    python example_yamls/make_agents.py [DIR]

writes DIR/base, DIR/coder, DIR/tool_user and DIR/reader (DIR is ``agents`` if not given), about 1
MB together. The base is a Qwen2 of random weights with a tokenizer trained on the spot; every agent
differs from it in about 20 % of the elements, part of which other agents changed too. That is how
agents trained by reinforcement learning differ from their base; the updates themselves mean
nothing.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

AGENTS = ("coder", "tool_user", "reader")
SEED = 0

# Of all elements, how many an agent changes alone or by chance with others, and how many of a pool
# it draws from.
PRIVATE, POOL, DRAWN = 0.12, 0.16, 0.5
UPDATE_STD = 0.02

CORPUS = (
    "Reinforced agent merging keeps what only one agent learned.",
    "def merge(base, agents): return base + sum(agent - base for agent in agents)",
    '{"tool": "search", "arguments": {"query": "task vectors"}}',
    "The document is long; read it part by part and remember what the question needs.",
)


def train_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )


def make_base(vocabulary: int) -> Qwen2ForCausalLM:
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


@torch.no_grad()
def change(parameter: torch.Tensor, pool: torch.Tensor) -> None:
    """Add noise to some elements: some of the pool, which all agents draw from, and some others."""
    drawn = pool & (torch.rand(pool.shape) < DRAWN)
    changed = drawn | (torch.rand(pool.shape) < PRIVATE)
    parameter += torch.randn(pool.shape) * UPDATE_STD * changed


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write small checkpoints, a base and three agents, to try the recipes on."
    )
    parser.add_argument("dir", nargs="?", default="agents", type=Path, metavar="DIR")
    directory = parser.parse_args().dir

    tokenizer = train_tokenizer()
    base = make_base(len(tokenizer))
    base.save_pretrained(directory / "base")
    tokenizer.save_pretrained(directory / "base")
    pools = [torch.rand(parameter.shape) < POOL for parameter in base.parameters()]
    for name in AGENTS:
        agent = make_base(len(tokenizer))
        torch.manual_seed(SEED + 1 + AGENTS.index(name))
        for parameter, pool in zip(agent.parameters(), pools, strict=True):
            change(parameter, pool)
        agent.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    print(f"wrote {', '.join(str(directory / name) for name in ('base', *AGENTS))}")


if __name__ == "__main__":
    main()

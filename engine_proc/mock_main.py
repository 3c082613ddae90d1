"""The engine process without a model: `python -m engine_proc.mock_main`, started by the launcher. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from engine_proc import assembly
from engine_proc.assembly import Facts, Loaded
from engine_proc.config import EngineConfig
from engine_proc.memory import enough_blocks
from engine_proc.mock_model import MockRunner, read_model
from wire.child import Child

MOST_BLOCKS = 1 << 18  # they are numbers only, but numbers take memory too


def load(child: Child, config: EngineConfig) -> Loaded:
    """Vocabulary, EOS ids and context length of the model folder. Raises ValueError in one line."""
    child.phase("reading the model's configuration")
    model = read_model(Path(config.model_dir), config.block_tokens)
    one_context = -(-model.context_length // config.block_tokens)
    enough = max(one_context, min(MOST_BLOCKS, enough_blocks(config, model.context_length, config.block_tokens)))
    facts = Facts(
        model.digest, model.spec, model.vocab_size, model.context_length, model.eos_ids, dtype="none", device="none"
    )
    return Loaded(
        facts,
        config.device_blocks or enough,
        lambda _: MockRunner(model, config.max_running, config.mock_model, config.mock_step_ms),
        depth=0,
    )


if __name__ == "__main__":
    assembly.run(Child.start(), load)

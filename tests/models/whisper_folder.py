"""A tiny Whisper of drawn weights, a whole folder in the layout of Hugging Face."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

MELS, SLOTS, POSITIONS = 80, 20, 48
FRAMES = 2 * SLOTS
"""Frames of a window."""
END, START, ENGLISH, GERMAN = 60, 61, 62, 63
VOCAB = 100
_SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|transcribe|>",
    "<|translate|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
    *(f"<|{n / 50:.2f}|>" for n in range(SLOTS + 1)),
]
_GENERATION: dict[str, Any] = {
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "pad_token_id": END,
    "bos_token_id": END,
    "no_timestamps_token_id": 68,
    "prev_sot_token_id": 66,
    "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"transcribe": 64, "translate": 65},
    "is_multilingual": True,
    "suppress_tokens": [1, 2, 61, 62, 63, 64, 65, 66, 67],
    "begin_suppress_tokens": [3, 60],
    "max_initial_timestamp_index": 5,
}


def tokenizer() -> Tokenizer:
    """Return a tokenizer of 60 characters and the special ids."""
    characters = [chr(n) for n in range(ord("A"), ord("z") + 1)] + ["Ġ", "."]
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(characters)}, []))
    assert len(characters) == END
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_SPECIAL)
    return backend


def save(folder: Path) -> WhisperForConditionalGeneration:
    """Write a whole checkpoint into ``folder`` and return its model."""
    generator = torch.Generator().manual_seed(5)
    sides: dict[str, Any] = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 48))
    }
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCAB,
            d_model=32,
            num_mel_bins=MELS,
            max_source_positions=SLOTS,
            max_target_positions=POSITIONS,
            decoder_start_token_id=START,
            eos_token_id=END,
            pad_token_id=END,
            bos_token_id=END,
            **sides,
        )
    ).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.ndim == 1:
                value.copy_(0.2 * noise + ("norm" in name and name.endswith("weight")))
            elif "embed_tokens" in name or "proj_out" in name:
                value.copy_(noise * value.shape[1] ** -0.5)
            elif "embed_positions" in name:
                value.copy_(0.5 * noise)
            else:
                value.copy_(2.0 * noise * value[0].numel() ** -0.5)
    model.generation_config = GenerationConfig(**_GENERATION)
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    assert isinstance(model, WhisperForConditionalGeneration)
    return model

"""Thirty-odd Hugging Face architectures of different families, small and with random weights, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.models import lit

BATCH_SIZE, NUM_BATCHES = 8, 2
_WIDTH = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48}
_TEXT = {"vocab_size": 64, "max_position_embeddings": 16, "use_cache": False, **_WIDTH}
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "head_dim": 16}
_SEQ2SEQ = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 16,
    "use_cache": False, "decoder_start_token_id": 1,
}  # fmt: skip
_IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": 4, **_WIDTH}
_SPEECH = {
    **_WIDTH, "vocab_size": 16, "conv_dim": (16, 16), "conv_kernel": (8, 3), "conv_stride": (4, 2),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_labels": 4,
    "classifier_proj_size": 16, "apply_spec_augment": False, "feat_proj_dropout": 0.0, "do_stable_layer_norm": True,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """One model: the names of its classes before "Config" and of its model, what the config takes, and its batches."""

    family: str
    model: str
    options: dict[str, Any]
    batch: Callable[[torch.Generator], dict[str, Tensor]]

    def build(self) -> Any:
        """The LightningModule, without dropout, so that the reference may be a run of plain Lightning."""
        config = getattr(transformers, f"{self.family}Config")(**self.options)
        for part in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
            for name, value in list(vars(part).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
        options = {"return_loss": True} if self.family == "CLIP" else {}
        return lit.HuggingFace(getattr(transformers, self.model)(config).train(), **options)

    def batches(self) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(7)
        return [self.batch(generator) for _ in range(NUM_BATCHES)]


def _tokens(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (BATCH_SIZE, 12), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _classified(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(0, 4, (BATCH_SIZE,), generator=generator)
    return {"input_ids": torch.randint(3, 64, (BATCH_SIZE, 12), generator=generator), "labels": labels}


def _images(size: int = 16) -> Callable[[torch.Generator], dict[str, Tensor]]:
    def make(generator: torch.Generator) -> dict[str, Tensor]:
        labels = torch.randint(0, 4, (BATCH_SIZE,), generator=generator)
        return {"pixel_values": torch.randn(BATCH_SIZE, 3, size, size, generator=generator), "labels": labels}

    return make


def _waves(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(0, 4, (BATCH_SIZE,), generator=generator)
    return {"input_values": torch.randn(BATCH_SIZE, 400, generator=generator), "labels": labels}


def _speech(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(3, 64, (BATCH_SIZE, 6), generator=generator)
    return {"input_features": torch.randn(BATCH_SIZE, 8, 20, generator=generator), "labels": labels}


def _pairs(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (BATCH_SIZE, 12), generator=generator)
    images = torch.randn(BATCH_SIZE, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "pixel_values": images}


def _series(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "past_values": torch.randn(BATCH_SIZE, 24, 2, generator=generator),
        "future_values": torch.randn(BATCH_SIZE, 4, 2, generator=generator),
    }


ARCHITECTURES: dict[str, Architecture] = {
    # decoders
    "gpt2": Architecture(
        "GPT2", "GPT2LMHeadModel",
        {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 2, "use_cache": False}, _tokens,
    ),
    "gpt_neox": Architecture("GPTNeoX", "GPTNeoXForCausalLM", _TEXT, _tokens),
    "gptj": Architecture(
        "GPTJ", "GPTJForCausalLM",
        {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 2, "rotary_dim": 8,
         "use_cache": False}, _tokens,
    ),
    "opt": Architecture(
        "OPT", "OPTForCausalLM", {**_TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}, _tokens
    ),
    "bloom": Architecture(
        "Bloom", "BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 4, "n_head": 2,
                                      "use_cache": False}, _tokens,
    ),
    "falcon": Architecture("Falcon", "FalconForCausalLM", _TEXT, _tokens),
    "llama": Architecture("Llama", "LlamaForCausalLM", _GROUPED, _tokens),
    "mistral": Architecture("Mistral", "MistralForCausalLM", {**_GROUPED, "sliding_window": 8}, _tokens),
    "qwen2": Architecture("Qwen2", "Qwen2ForCausalLM", _GROUPED, _tokens),
    "gemma2": Architecture("Gemma2", "Gemma2ForCausalLM", {**_GROUPED, "pad_token_id": 0}, _tokens),
    "phi": Architecture("Phi", "PhiForCausalLM", _TEXT, _tokens),
    "mixtral": Architecture(
        "Mixtral", "MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, _tokens
    ),
    "mamba": Architecture(
        "Mamba", "MambaForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4, "use_cache": False}, _tokens,
    ),
    # encoders
    "bert": Architecture("Bert", "BertForSequenceClassification", {**_TEXT, "num_labels": 4}, _classified),
    "roberta": Architecture(
        "Roberta", "RobertaForSequenceClassification",
        {**_TEXT, "max_position_embeddings": 20, "num_labels": 4}, _classified,
    ),
    "electra": Architecture(
        "Electra", "ElectraForSequenceClassification", {**_TEXT, "embedding_size": 16, "num_labels": 4}, _classified
    ),
    "distilbert": Architecture(
        "DistilBert", "DistilBertForSequenceClassification",
        {"vocab_size": 64, "dim": 32, "n_layers": 4, "n_heads": 2, "hidden_dim": 48, "num_labels": 4}, _classified,
    ),
    "deberta_v2": Architecture(
        "DebertaV2", "DebertaV2ForSequenceClassification",
        {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "num_labels": 4}, _classified,
    ),
    "xlnet": Architecture(
        "XLNet", "XLNetForSequenceClassification",
        {"vocab_size": 64, "d_model": 32, "n_layer": 4, "n_head": 2, "d_inner": 48, "num_labels": 4}, _classified,
    ),
    "fnet": Architecture("FNet", "FNetForSequenceClassification", {**_TEXT, "num_labels": 4}, _classified),
    # encoders and decoders
    "t5": Architecture(
        "T5", "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 3, "num_heads": 2,
         "decoder_start_token_id": 0, "use_cache": False}, _tokens,
    ),
    "bart": Architecture("Bart", "BartForConditionalGeneration", _SEQ2SEQ, _tokens),
    "marian": Architecture("Marian", "MarianMTModel", {**_SEQ2SEQ, "pad_token_id": 1}, _tokens),
    "whisper": Architecture(
        "Whisper", "WhisperForConditionalGeneration",
        {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None}, _speech,
    ),
    # images
    "vit": Architecture("ViT", "ViTForImageClassification", _IMAGE, _images()),
    "deit": Architecture("DeiT", "DeiTForImageClassification", _IMAGE, _images()),
    "beit": Architecture("Beit", "BeitForImageClassification", _IMAGE, _images()),
    "dinov2": Architecture("Dinov2", "Dinov2ForImageClassification", _IMAGE, _images()),
    "swin": Architecture(
        "Swin", "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4,
         "num_labels": 4}, _images(32),
    ),
    "convnext": Architecture(
        "ConvNext", "ConvNextForImageClassification",
        {"depths": [1, 2, 2, 1], "hidden_sizes": [8, 16, 16, 32], "num_labels": 4}, _images(64),
    ),
    "resnet": Architecture(
        "ResNet", "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic",
         "num_labels": 4}, _images(32),
    ),
    "regnet": Architecture(
        "RegNet", "RegNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1], "groups_width": 4,
         "num_labels": 4}, _images(32),
    ),
    "mobilenet_v2": Architecture(
        "MobileNetV2", "MobileNetV2ForImageClassification",
        {"depth_multiplier": 0.25, "image_size": 32, "num_labels": 4}, _images(32),
    ),
    "segformer": Architecture(
        "Segformer", "SegformerForImageClassification",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "decoder_hidden_size": 16, "num_labels": 4},
        _images(64),
    ),
    # sound, pairs of image and text, series
    "wav2vec2": Architecture("Wav2Vec2", "Wav2Vec2ForSequenceClassification", _SPEECH, _waves),
    "hubert": Architecture("Hubert", "HubertForSequenceClassification", _SPEECH, _waves),
    "clip": Architecture(
        "CLIP", "CLIPModel",
        {"projection_dim": 16, "text_config": {**_TEXT, "projection_dim": 16, "eos_token_id": 2},
         "vision_config": {**_IMAGE, "projection_dim": 16}}, _pairs,
    ),
    "patchtst": Architecture(
        "PatchTST", "PatchTSTForPrediction",
        {"num_input_channels": 2, "context_length": 24, "prediction_length": 4, "patch_length": 4, "patch_stride": 4,
         "d_model": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 2}, _series,
    ),
}  # fmt: skip

"""The models that have to train unchanged, each with its batches and where it is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor

from tests.models import habits, lit

NUM_BATCHES, BATCH_SIZE, NUM_MICROBATCHES = 2, 8, 4

Cuts = dict[int, dict[str, int]]


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        build: makes the LightningModule; the seed is set.
        batches: makes its batches, of `BATCH_SIZE` samples each.
        cuts: the stage_config for 2 and for 4 stages.
        random: it draws random numbers, so that the reference is the pipeline with one stage and not plain Lightning.
        summed: beginnings of the names of parameters that are used on several of 2, or 4, stages: their gradients are
            sums in another order than in one process. Without any all bits are equal.
        poison: numbers of stages at which what a stage should not need is poisoned.
    """

    build: Callable[[], L.LightningModule]
    batches: Callable[[], list[Any]]
    cuts: Cuts
    random: bool = False
    summed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    poison: tuple[int, ...] = ()


def blocks(pattern: str, count: int = 4) -> Cuts:
    """Even cuts of a list of `count` layers; `pattern` has a place for the layer's number."""
    return {n: {pattern.format(stage * count // n): stage for stage in range(1, n)} for n in (2, 4)}


def tokens(labels: Callable[[torch.Generator], Tensor] | None = None) -> Callable[[], list[Any]]:
    """Batches of token ids with labels, which are the ids themselves where none are given."""

    def make(generator: torch.Generator) -> dict[str, Tensor]:
        ids = torch.randint(3, 64, (BATCH_SIZE, 12), generator=generator)
        return {"input_ids": ids, "labels": ids.clone() if labels is None else labels(generator)}

    return lambda: _batches(make)


def images() -> list[Any]:
    return _batches(
        lambda g: {
            "pixel_values": torch.randn(BATCH_SIZE, 3, 16, 16, generator=g),
            "labels": torch.randint(0, 4, (BATCH_SIZE,), generator=g),
        }
    )


def vectors() -> list[Any]:
    return _batches(
        lambda g: (torch.randn(BATCH_SIZE, 8, generator=g), torch.randint(0, 4, (BATCH_SIZE,), generator=g))
    )


def pictures() -> list[Any]:
    return _batches(lambda g: (torch.randn(BATCH_SIZE, 3, 16, 16, generator=g), torch.zeros(BATCH_SIZE)))


def padded() -> list[Any]:
    """Samples of 2 to 9 positions; each batch is as long as its longest."""

    def make(generator: torch.Generator) -> dict[str, Tensor]:
        lengths = torch.randint(2, 10, (BATCH_SIZE,), generator=generator)
        longest = int(lengths.max())
        return {
            "x": torch.randn(BATCH_SIZE, longest, 8, generator=generator),
            "mask": (torch.arange(longest) < lengths[:, None]).float(),
            "y": torch.randint(0, 4, (BATCH_SIZE,), generator=generator),
        }

    return _batches(make, count=3)


def _batches(make: Callable[[torch.Generator], Any], count: int = NUM_BATCHES) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [make(generator) for _ in range(count)]


def _classes(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 3, (BATCH_SIZE,), generator=generator)


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def _gpt2_config(dropout: float = 0.0, **more: Any) -> Any:
    return transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=4, n_head=2, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=1, eos_token_id=2, use_cache=False, **more,
    )  # fmt: skip


def gpt2(dropout: float = 0.0, checkpointing: bool = False, options: dict[str, Any] | None = None, **more: Any) -> Any:
    model = transformers.GPT2LMHeadModel(_gpt2_config(dropout, **more))
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    return lit.HuggingFace(model, **(options or {}))


_DECODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16, "use_cache": False,
}  # fmt: skip
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama() -> Any:
    return lit.HuggingFace(transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER)))


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **_DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    return lit.HuggingFace(transformers.MixtralForCausalLM(config))


def bert(dropout: bool = False) -> Any:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=16, num_labels=3, **({} if dropout else _NO_DROPOUT),
    )  # fmt: skip
    return lit.HuggingFace(transformers.BertForSequenceClassification(config).train())


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=4, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return lit.HuggingFace(transformers.T5ForConditionalGeneration(config).train())


def whisper(layerdrop: float = 0.0) -> Any:
    config = transformers.WhisperConfig(
        vocab_size=64, num_mel_bins=8, d_model=32, encoder_layers=4, decoder_layers=4, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=10,
        max_target_positions=16, dropout=0.0, encoder_layerdrop=layerdrop, decoder_layerdrop=layerdrop, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
        use_cache=False,
    )  # fmt: skip
    return lit.HuggingFace(transformers.WhisperForConditionalGeneration(config).train())


def speech() -> list[Any]:
    return _batches(
        lambda g: {
            "input_features": torch.randn(BATCH_SIZE, 8, 20, generator=g),
            "labels": torch.randint(3, 64, (BATCH_SIZE, 6), generator=g),
        }
    )


def vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=4,
        num_labels=4, **_NO_DROPOUT,
    )  # fmt: skip
    return lit.HuggingFace(transformers.ViTForImageClassification(config).train())


def resnet() -> Any:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic", num_labels=4
    )
    return lit.HuggingFace(transformers.ResNetForImageClassification(config).train())


_ENCODER_DECODER: dict[str, Cuts] = {
    "t5": {
        2: {"model.decoder": 1},
        4: {"model.encoder.block.2": 1, "model.decoder.block.0": 2, "model.decoder.block.2": 3},
    },
    "whisper": {
        2: {"model.model.decoder": 1},
        4: {
            "model.model.encoder.layers.2": 1,
            "model.model.decoder.layers.0": 2,
            "model.model.decoder.layers.2": 3,
        },
    },
}
_RESNET: Cuts = {
    2: {"model.resnet.encoder.stages.2": 1},
    4: {f"model.resnet.encoder.stages.{i}": i for i in (1, 2, 3)},
}
_UNET: Cuts = {2: {"middle": 1}, 4: {"down.1": 1, "middle": 2, "up.1": 3}}
_GPT2 = blocks("model.transformer.h.{}")
_STACK, _LONG_STACK = blocks("blocks.{}"), blocks("blocks.{}", 8)

_WHISPER_HEAD = {4: ("model.model.decoder.embed_tokens.",)}
_AFTER_LAYERS = ("encoder.layer_norm", "decoder.embed_positions", "decoder.layer_norm")
# Where a stage's layers are all left out before it is known who runs what follows, that runs on the stage before.
_WHISPER_DROPPED = {4: (*_WHISPER_HEAD[4], *(f"model.model.{name}." for name in _AFTER_LAYERS))}


def _both(name: str) -> dict[int, tuple[str, ...]]:
    return {2: (name,), 4: (name,)}


CASES: dict[str, Case] = {
    "gpt2": Case(gpt2, tokens(), _GPT2, poison=(2, 4)),
    "gpt2_dropout": Case(lambda: gpt2(0.1, tie_word_embeddings=False), tokens(), _GPT2, random=True),
    "gpt2_embedding_as_head": Case(
        lambda: lit.EmbeddingAsHead(transformers.GPT2Model(_gpt2_config()).train()),
        tokens(),
        blocks("transformer.h.{}"),
        poison=(2,),
    ),
    "gpt2_hidden_states": Case(
        lambda: gpt2(tie_word_embeddings=False, options={"output_hidden_states": True}), tokens(), _GPT2
    ),
    "gpt2_attentions": Case(
        lambda: gpt2(tie_word_embeddings=False, attn_implementation="eager", options={"output_attentions": True}),
        tokens(),
        _GPT2,
    ),
    "gpt2_checkpointing": Case(
        lambda: gpt2(0.1, checkpointing=True, tie_word_embeddings=False), tokens(), _GPT2, random=True
    ),
    "llama": Case(llama, tokens(), blocks("model.model.layers.{}"), poison=(2,)),
    "mixtral": Case(mixtral, tokens(), blocks("model.model.layers.{}")),
    "bert": Case(bert, tokens(labels=_classes), blocks("model.bert.encoder.layer.{}")),
    "t5": Case(t5, tokens(), _ENCODER_DECODER["t5"], summed=_both("model.shared."), poison=(2, 4)),
    "whisper": Case(whisper, speech, _ENCODER_DECODER["whisper"], summed=_WHISPER_HEAD, poison=(2,)),
    "whisper_layerdrop": Case(
        lambda: whisper(0.4), speech, _ENCODER_DECODER["whisper"], random=True, summed=_WHISPER_DROPPED
    ),
    "vit": Case(vit, images, blocks("model.vit.layers.{}"), poison=(2,)),
    "resnet": Case(resnet, images, _RESNET, poison=(2,)),
    "unet": Case(lit.UNet, pictures, _UNET, poison=(2, 4)),
    "diffusion": Case(lit.Diffusion, vectors, _STACK, random=True),
    "padded": Case(lit.Padded, padded, _STACK),
    "frozen": Case(lambda: lit.FrozenBackbone(2), vectors, _STACK, poison=(2,)),
    "layerdrop": Case(lit.LayerDrop, vectors, _LONG_STACK, random=True, summed={4: ("head.",)}, poison=(2,)),
    "layerdrop_by_python": Case(lit.LayerDropByPython, vectors, _LONG_STACK, random=True),
    "reads_number": Case(lit.ReadsNumber, vectors, _STACK),
    "selects_by_data": Case(lit.SelectsByData, vectors, _STACK),
    "auxiliary_loss": Case(lit.KeepsAuxiliaryLoss, vectors, _STACK),
    "collects_in_leaves": Case(lit.CollectsInLeaves, vectors, _STACK),
    "in_place": Case(lit.InPlace, vectors, _STACK),
    "autograd_function": Case(lit.ReversesGradient, vectors, _STACK),
    "checkpoint_spanning": Case(
        lambda: lit.Checkpointed(reentrant=False), vectors, _LONG_STACK, random=True, poison=(2,)
    ),
    "checkpoint_reentrant": Case(lambda: lit.Checkpointed(reentrant=True), vectors, _LONG_STACK, random=True),
    "hooks_inside": Case(lit.HooksInside, vectors, _STACK),
    "direct_parameters": Case(lit.DirectParameters, vectors, _STACK, summed=_both("position"), poison=(2,)),
    "caches_mask": Case(habits.CachesMask, vectors, _STACK),
    "counts_calls": Case(habits.CountsCalls, vectors, _STACK),
    "keeps_state": Case(habits.KeepsState, vectors, _STACK),
    "unpacks_tensors": Case(habits.UnpacksTensors, vectors, _STACK),
    "operates_on_buffers": Case(habits.OperatesOnBuffers, vectors, _STACK, poison=(2,)),
    "passes_structures": Case(habits.PassesStructures, vectors, _STACK),
    "without_gradient": Case(habits.WithoutGradient, vectors, _STACK),
    "begins_without_gradient": Case(
        habits.WithoutGradient, vectors, {2: {"teacher": 1}, 4: {"teacher": 1, "blocks.0": 2, "blocks.2": 3}}
    ),
    "torch_transformer": Case(
        habits.TorchTransformer,
        vectors,
        {2: {"decoder": 1}, 4: {"encoder.layers.2": 1, "decoder.layers.0": 2, "decoder.layers.2": 3}},
    ),
    "one_sequential": Case(habits.OneSequential, vectors, {2: {"net.4": 1}, 4: {"net.2": 1, "net.5": 2, "net.6": 3}}),
    "records_ranges": Case(habits.RecordsRanges, vectors, _STACK),
    "compiled_blocks": Case(habits.CompiledBlocks, vectors, _STACK),
    "compiled_whole": Case(habits.CompiledWhole, vectors, {2: {"net.4": 1}, 4: {"net.2": 1, "net.5": 2, "net.6": 3}}),
    "recurrent": Case(habits.Recurrent, vectors, blocks("layers.{}")),
    "branches": Case(habits.Branches, vectors, _STACK),
    "shared_layer": Case(lit.SharedLayer, vectors, _STACK, summed=_both("shared."), poison=(2,)),
    "shares_layers": Case(
        habits.SharesLayers,
        vectors,
        {
            2: {"blocks.0": 0, "blocks.0.0": 0, "blocks.2.0": 1},
            4: {"blocks.0": 0, "blocks.0.0": 0, "blocks.1.0": 1, "blocks.2.0": 2, "blocks.3.0": 3},
        },
        summed=_both("blocks.0.2."),
    ),
}

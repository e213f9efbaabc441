"""Small Hugging Face models, with layers in stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.habits.modules import SAMPLES, Layers
from tests.habits.table import habit

TOKENS, LENGTH = 24, 6
SMALL: dict[str, Any] = {"vocab_size": TOKENS, "hidden_size": 16, "num_attention_heads": 2}


def gpt2(**options: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=32, n_embd=16, n_layer=4, n_head=2, bos_token_id=1, eos_token_id=2, **options
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        **SMALL, intermediate_size=32, num_hidden_layers=4, bos_token_id=1, eos_token_id=2, pad_token_id=0, **options
    )
    return transformers.LlamaForCausalLM(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **SMALL,
        intermediate_size=32,
        num_hidden_layers=4,
        num_key_value_heads=2,
        num_local_experts=3,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.5,
    )
    return transformers.MixtralForCausalLM(config)


def bert(**options: Any) -> Any:
    config = transformers.BertConfig(
        **SMALL, intermediate_size=32, num_hidden_layers=4, max_position_embeddings=32, num_labels=3, **options
    )
    return transformers.BertForSequenceClassification(config)


def t5(**options: Any) -> Any:
    config = transformers.T5Config(
        vocab_size=TOKENS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2, **options
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


class Language(Layers):
    """A language model with the loss that it returns."""

    make: Any = staticmethod(gpt2)
    layers_in: tuple[str, ...] = ("model.transformer.h.0", *(f"model.transformer.h.{i}" for i in range(1, 4)))
    options: dict[str, Any] = {}

    def __init__(self) -> None:
        super(Layers, self).__init__()
        self.model = self.make()

    def chain(self) -> list[str]:
        return list(self.layers_in)

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        tokens = torch.randint(3, TOKENS, (SAMPLES, LENGTH), generator=generator)
        mask = torch.ones_like(tokens)
        mask[::3, LENGTH - 2 :] = 0
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch, **self.options)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(**batch).loss
        self.log("train_loss", loss)
        return loss


LLAMA = tuple(f"model.model.layers.{i}" for i in range(4))
BERT = tuple(f"model.bert.encoder.layer.{i}" for i in range(4))
T5 = ("model.encoder.block.0", "model.encoder.block.1", "model.decoder.block.0", "model.decoder.block.1")


@habit(plain=False, without={"make": staticmethod(lambda: gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))})
class GPT2WithDropout(Language):
    """GPT-2 as it is, with dropout in every block."""


@habit(without={"weight": 0.0})
class GPT2HiddenStates(Language):
    """A penalty on all hidden states, and on all attentions."""

    make = staticmethod(lambda: gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager"))
    options = {"output_hidden_states": True, "output_attentions": True}
    weight = 0.01

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self(**batch)
        states = torch.stack([state.pow(2).mean() for state in output.hidden_states]).sum()
        attentions = sum(attention[..., 0].mean() for attention in output.attentions)
        return output.loss + self.weight * (states + attentions)


@habit()
class LlamaAsItIs(Language):
    """Llama with labels."""

    make, layers_in = staticmethod(llama), LLAMA


@habit(without={"weight": 0.0})
class LlamaHiddenStates(Language):
    """Features of a middle layer are distilled towards those of the last."""

    make, layers_in = staticmethod(llama), LLAMA
    options = {"output_hidden_states": True}
    weight = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self(**batch)
        first, last = output.hidden_states[1], output.hidden_states[-1]
        return output.loss + self.weight * F.mse_loss(first, last.detach())


@habit(without={"options": {}})
class MixtralRouterLoss(Language):
    """Routers are trained by the auxiliary loss over the router logits of all layers."""

    make, layers_in = staticmethod(mixtral), LLAMA
    options = {"output_router_logits": True}


@habit()
class BertClassifies(Language):
    """BERT with a padding mask, in eager attention, with attentions."""

    make = staticmethod(lambda: bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    layers_in = BERT

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch["input_ids"].sum(1) % 3
        output = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels)
        self.log("accuracy", (output.logits.argmax(-1) == labels).float().mean(), on_epoch=True)
        return output.loss


# Uses of the embedding on each stage add up there first.
@habit(tolerance=1e-5)
class T5Seq2Seq(Language):
    """T5's encoder and decoder, whose relative positions only the first blocks have."""

    make, layers_in = staticmethod(lambda: t5(dropout_rate=0.0)), T5


@habit()
class GradientCheckpointingEnabled(Language):
    """gradient_checkpointing_enable() on Llama."""

    layers_in = LLAMA

    @staticmethod
    def make() -> Any:
        model = llama()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model


@habit(without={"rank": 0})
class AdaptersInAttention(Language):
    """LoRA by hand: frozen weights, and forward hooks on each attention's projection."""

    make, layers_in = staticmethod(llama), LLAMA
    rank = 2

    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(False)
        self.adapters = torch.nn.ModuleList()
        for layer in self.model.model.layers:
            adapter = torch.nn.Sequential(torch.nn.Linear(16, 2, bias=False), torch.nn.Linear(2, 16, bias=False))
            self.adapters.append(adapter)
            if self.rank:
                layer.self_attn.q_proj.register_forward_hook(
                    lambda module, args, output, adapter=adapter: output + adapter(args[0])
                )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.rank else loss + 0 * self.adapters[0][0].weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Generating(Language):
    """Generates tokens in validation and prediction."""

    how: dict[str, Any] = {"do_sample": False, "use_cache": True}

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[Any] = []

    def generate(self, batch: Any) -> Tensor:
        return self.model.generate(
            input_ids=batch["input_ids"][:, :3],
            attention_mask=torch.ones_like(batch["input_ids"][:, :3]),
            max_new_tokens=4,
            pad_token_id=0,
            **self.how,
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(**batch).loss)
        self.texts += self.generate(batch).tolist()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.pad(self.generate(batch), (0, 12))[:, :8]


@habit(plain=False, epochs=1, calls=["fit", "predict"], observed=["texts"])
class GPT2GeneratesGreedily(Generating):
    """generate() with a KV cache."""

    make = staticmethod(lambda: gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


@habit(plain=False, epochs=1, calls=["fit", "predict"], observed=["texts"])
class LlamaGeneratesWithoutCache(Generating):
    """generate() without a cache."""

    make, layers_in = staticmethod(llama), LLAMA
    how = {"do_sample": False, "use_cache": False}


@habit(plain=False, epochs=1, calls=["validate"], observed=["texts"])
class LlamaSamples(Generating):
    """generate() that samples with torch's generator."""

    make, layers_in = staticmethod(llama), LLAMA
    how = {"do_sample": True, "top_k": 5, "use_cache": True}


@habit(plain=False, epochs=1, calls=["validate"], observed=["texts"])
class T5GeneratesByBeams(Generating):
    """Beam search over an encoder-decoder."""

    make, layers_in = staticmethod(lambda: t5(dropout_rate=0.0)), T5
    how = {"num_beams": 2, "do_sample": False}

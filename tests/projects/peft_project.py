"""peft: LoRA on a small GPT-2 in a LightningModule."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from common import Case, main
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 32


class LoRA(L.LightningModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": VOCABULARY}
        still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **still, **ends))
        adapters = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=dropout, target_modules=["c_attn"])
        self.model = get_peft_model(model, adapters)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch, labels=batch["input_ids"]).loss
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch, labels=batch["input_ids"]).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.01)


def fit(trainer_kwargs: dict[str, Any], dropout: float) -> Any:
    drawn = torch.Generator().manual_seed(0)
    tokens = [torch.randint(1, VOCABULARY, (12,), generator=drawn) for _ in range(32)]
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    module = LoRA(dropout)
    trainer = L.Trainer(max_epochs=2, **trainer_kwargs)
    trainer.fit(module, DataLoader(data[:24], 8, shuffle=True), DataLoader(data[24:], 8))
    folder = f"{trainer_kwargs['default_root_dir']}/adapters{trainer.global_rank}"
    module.model.save_pretrained(folder)  # on every rank, which all have the whole module again
    return {"saved": sorted(load_file(f"{folder}/adapter_model.safetensors"))}


if __name__ == "__main__":
    key = {"model.base_model.model.transformer.h.1": 1}
    main(
        {
            "LoRA": Case(lambda kwargs: fit(kwargs, 0.0), key=key),
            "LoRA, dropout": Case(lambda kwargs: fit(kwargs, 0.1), key=key, draws=True),
        },
        "lightning.pytorch",
    )

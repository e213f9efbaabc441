"""Steps that train on what models give themselves: adversaries with penalties, policies, and preferences."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from tests.habits.by_hand import Adversarial, ByHand
from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Layer, Layers, Normed
from tests.habits.table import error, habit


class Critical(Adversarial):
    """A Wasserstein GAN, whose whole critic is on the last stage; on 4 stages what it judges is made before."""

    weight = 10.0

    def chain(self) -> list[str]:
        return [f"layers.{i}" for i in range(3)] + ["discriminator.0"]

    def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(len(real), 1).type_as(real)
        between = (share * real + (1 - share) * fake.detach()).requires_grad_(True)
        judged = self.judged(between)
        (gradient,) = torch.autograd.grad(
            outputs=judged,
            inputs=between,
            grad_outputs=torch.ones_like(judged),
            create_graph=True,
            retain_graph=True,
            only_inputs=True,
        )
        return ((gradient.norm(2, dim=1) - 1) ** 2).mean()


@habit(plain=False, without={"weight": 0.0})
class WGANWithPenalty(Critical):
    """The critic is trained each time, the generator every second time."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        for_generator, for_critic = self.optimizers()
        z = self.noise(x)
        self.toggle_optimizer(for_critic)
        fake = self(z)
        loss = self.judged(fake).mean() - self.judged(x).mean() + self.weight * self.penalty(x, fake)
        self.log("critic", loss)
        for_critic.zero_grad()
        self.manual_backward(loss)
        for_critic.step()
        self.untoggle_optimizer(for_critic)
        if (batch_idx + 1) % 2 == 0:
            self.toggle_optimizer(for_generator)
            loss = -self.judged(self(z)).mean()
            self.log("generator", loss)
            for_generator.zero_grad()
            self.manual_backward(loss)
            for_generator.step()
            self.untoggle_optimizer(for_generator)


@habit(plain=False, shows=False)
class LSGANWithReadLosses(Adversarial):
    """Losses are read for a text, as in many a repository, and the discriminator waits while it is ahead."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        for_generator, for_discriminator = self.optimizers()
        fake = self(self.noise(x))
        for_generator.zero_grad()
        loss = F.mse_loss(self.judged(fake), torch.ones(len(x), 1))
        self.manual_backward(loss)
        for_generator.step()
        for_discriminator.zero_grad()
        real = F.mse_loss(self.judged(x), torch.ones(len(x), 1))
        generated = F.mse_loss(self.judged(fake.detach()), torch.zeros(len(x), 1))
        self.manual_backward((real + generated) / 2)
        for_discriminator.step()
        self.text = f"{real.item():.4f} {generated.item():.4f}"


class Policy(Layers):
    """Classes are actions, and the right one is rewarded."""

    def reward(self, actions: Tensor, y: Tensor) -> Tensor:
        return (actions == y).float() * 2 - 0.5


@habit(plain=False)
class Reinforce(Policy):
    """An action is sampled, and its probability raised by what it brings."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        policy = Categorical(logits=self(x))
        actions = policy.sample()
        reward = self.reward(actions, y)
        self.log("reward", reward.mean(), prog_bar=True)
        return -(policy.log_prob(actions) * (reward - reward.mean())).mean()


@habit(plain=False)
class SamplesWithoutGradients(Policy):
    """A first pass samples, and a second one trains on the samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.eval()
        with torch.no_grad():
            actions = torch.multinomial(self(x).softmax(-1), 1).squeeze(1)
        self.train()
        logp = F.log_softmax(self(x), -1).gather(1, actions[:, None]).squeeze(1)
        return -(logp * self.reward(actions, y)).mean()


class ActsAndCriticizes(Policy, ByHand):
    """A policy and a value of states, each of its own layers."""

    rounds = 2

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 1))

    def chain(self) -> list[str]:
        return [*super().chain(), *(f"critic.{i}" for i in range(4))]

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam([*self.layers.parameters(), *self.head.parameters()], lr=0.01),
            torch.optim.Adam(self.critic.parameters(), lr=0.02),
        )


@habit(plain=False, without={"rounds": 1})
class ProximalPolicy(ActsAndCriticizes):
    """Actions are sampled once, and the policy and the critic are updated on them twice."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for_policy, for_critic = self.optimizers()
        with torch.no_grad():
            before = Categorical(logits=self(x))
            actions = before.sample()
            old = before.log_prob(actions)
            advantage = self.reward(actions, y) - self.critic(x).squeeze(1)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        for _ in range(self.rounds):
            ratio = (Categorical(logits=self(x)).log_prob(actions) - old).exp()
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            self.manual_backward(loss)
            for_policy.step()
            for_policy.zero_grad()
            value_loss = F.mse_loss(self.critic(x).squeeze(1), self.reward(actions, y))
            self.manual_backward(value_loss)
            for_critic.step()
            for_critic.zero_grad()
        self.log_dict({"policy": loss, "value": value_loss})


class Preferring(Layers):
    """A policy over words is drawn to what is chosen and from what is rejected, near to a frozen reference."""

    beta = 0.5
    length = 3

    def __init__(self) -> None:
        super().__init__()
        self.reference = copy.deepcopy(nn.ModuleDict({"layers": self.layers, "head": self.head}))
        self.reference.requires_grad_(False).eval()

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        words = torch.randint(0, CLASSES, (2, SAMPLES, Preferring.length), generator=generator)
        return {
            "x": torch.randn(SAMPLES, Preferring.length, WIDTH, generator=generator),
            "chosen": words[0],
            "rejected": words[1],
        }

    def log_probabilities(self, model: Any, x: Tensor, words: Tensor) -> Tensor:
        for layer in model["layers"] if model is self.reference else model.layers:
            x = layer(x)
        logits = model["head"](x) if model is self.reference else model.head(x)
        return logits.log_softmax(-1).gather(2, words[:, :, None]).squeeze(2).sum(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        twice = torch.cat([batch["x"], batch["x"]])
        words = torch.cat([batch["chosen"], batch["rejected"]])
        chosen, rejected = self.log_probabilities(self, twice, words).chunk(2)
        with torch.no_grad():
            reference_chosen, reference_rejected = self.log_probabilities(self.reference, twice, words).chunk(2)
        margin = (chosen - reference_chosen) - (rejected - reference_rejected)
        self.log("train/accuracy", (margin > 0).float().mean(), prog_bar=True)
        self.log("train/margin", margin.mean().detach())
        return -F.logsigmoid(self.beta * margin).mean()


@habit(without={"beta": 0.0})
class PrefersDirectly(Preferring):
    """DPO; the reference is in one list beside the policy, which no key names."""


@habit(without={"beta": 0.0})
class PrefersWithReferenceOnEachStage(Preferring):
    """DPO; keys name the reference's layers beside the policy's."""

    beside = {f"reference.layers.{i}": f"layers.{i}" for i in range(4)} | {"reference.head": "layers.3"}


class Episodes(IterableDataset):
    """As in Lightning's example of PPO: what gives samples is a method of the module."""

    def __init__(self, generate: Any) -> None:
        self.generate = generate

    def __iter__(self) -> Any:
        return self.generate()


@habit(plain=False, without={"gain": 0.0})
class PlaysEpisodes(Policy):
    """The loader lets the policy act in a little world, and figures of the episodes are logged in the step."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.mean_reward = 0.0

    def play(self) -> Any:
        state, rewards = torch.zeros(WIDTH), []
        for _ in range(3 * SAMPLES):
            with torch.no_grad():
                policy = Categorical(logits=self(state[None]))
                action = policy.sample()[0]
            before, reward = state, float(self.gain * state[action].item() - 0.1)
            rewards.append(reward)
            state = 0.9 * state.roll(1) + 0.1 * torch.randn(WIDTH)
            yield before, action, torch.tensor(reward)
        self.mean_reward = sum(rewards) / len(rewards)

    def train_dataloader(self) -> Any:
        return DataLoader(Episodes(self.play), batch_size=SAMPLES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states, actions, rewards = batch
        self.log("mean_reward", self.mean_reward, prog_bar=True)
        logp = Categorical(logits=self(states)).log_prob(actions)
        return -(logp * rewards).mean()


class Mined(Layers):
    """Half of each batch's samples, chosen by what the model makes of them."""

    descending = True

    def choose(self, samples: Any) -> Any:
        x, y = default_collate(samples)
        with torch.no_grad():
            losses = F.cross_entropy(self(x), y, reduction="none")
        kept = losses.argsort(descending=self.descending)[: len(x) // 2]
        return x[kept], y[kept]

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(4)
        x = torch.randn(6 * SAMPLES, WIDTH, generator=generator)
        y = torch.randint(0, CLASSES, (len(x),), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=2 * SAMPLES, collate_fn=self.choose)


@habit(plain=False, without={"descending": False})
class MinesHardSamples(Mined):
    """The hardest."""


@habit(
    expect=error(r"(add_|num_batches_tracked) changes, or asks for, what another stage has.*code of a loader"),
    without={"layer": Layer},
    plain=False,
)
class MinesWithBatchNorms(Mined):
    """With batch norms in training, of which the loader's passes would be counted on one rank alone."""

    layer = Normed


@habit(expect=error("a write through a view.*code of a loader"), plain=False, shows=False)
class MinesAndDecays(Mined):
    """Weights decay through `.data` whenever a batch is chosen."""

    def choose(self, samples: Any) -> Any:
        for layer in self.layers:
            layer.linear.weight.data.mul_(0.99)
        return super().choose(samples)


@habit(plain=False, shows=False)
class MinesInInferenceMode(Mined):
    """The loader computes in inference mode, whose tensors have no version."""

    def choose(self, samples: Any) -> Any:
        with torch.inference_mode():
            kept = super().choose(samples)
        return [one.clone() for one in kept]

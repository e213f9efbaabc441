"""PPO (Schulman et al., 2017) by manual optimization, on episodes that the loader plays with the module's own policy:
`python -m tests.training.ppo_script --stages 2`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipeline import PipelineStrategy

STATES, ACTIONS, WIDTH = 4, 2, 16
BATCH, STEPS, LONGEST = 16, 48, 20

CUTS: dict[str, dict[str, int]] = {
    "one": {},
    "between the two": {"critic.0": 1},
    "in the actor": {"actor.2": 1},
    "four": {"actor.2": 1, "critic.0": 2, "critic.2": 3},
}
"""Where stages begin."""


class World:
    """A point is to be held near the origin: a push to the left or to the right each time."""

    def reset(self) -> Tensor:
        self.state = 0.1 * torch.randn(STATES)
        return self.state.clone()

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        push = torch.tensor([0.0, 0.4 if action else -0.4, 0.0, 0.1])
        self.state = self.state + 0.2 * self.state.roll(1) + 0.3 * push
        return self.state.clone(), 1.0 - float(self.state.abs().mean()), bool(self.state.abs().max() > 1)


class Episodes(IterableDataset):
    def __init__(self, play: Any) -> None:
        self.play = play

    def __iter__(self) -> Iterator[Any]:
        return self.play()


def perceptron(outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(STATES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))
    )


class PPO(L.LightningModule):
    """Two networks, an optimizer each."""

    gamma, smoothing, clip = 0.99, 0.95, 0.2

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = perceptron(ACTIONS), perceptron(1)
        self.world = World()
        self.mean_length = 0.0

    def forward(self, state: Tensor) -> tuple[Categorical, Tensor, Tensor]:
        policy = Categorical(logits=self.actor(state))
        return policy, policy.sample(), self.critic(state)

    def play(self) -> Iterator[Any]:
        """The steps of some episodes, with what is known when they have ended."""
        lengths: list[int] = []
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        found: list[Any] = []
        rewards: list[float] = []
        values: list[float] = []
        state = self.world.reset()
        for number in range(STEPS):
            with torch.no_grad():
                policy, action, value = self(state)
            steps.append((state, action, policy.log_prob(action)))
            values.append(value.item())
            state, reward, is_over = self.world.step(int(action))
            rewards.append(reward)
            if is_over or len(rewards) == LONGEST or number == STEPS - 1:
                with torch.no_grad():
                    last = 0.0 if is_over else self.critic(state).item()
                returns, advantages = self.ended(rewards, values, last)
                found += [(*step, *rest) for step, *rest in zip(steps, returns, advantages, strict=True)]
                lengths.append(len(rewards))
                steps, rewards, values = [], [], []
                state = self.world.reset()
        self.mean_length = sum(lengths) / len(lengths)
        yield from found

    def ended(self, rewards: list[float], values: list[float], last: float) -> tuple[list[Tensor], list[Tensor]]:
        """Of each step of an episode, the discounted reward and the generalized advantage."""
        returns, advantages = [], []
        reward_to_come, advantage, following = last, 0.0, last
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            reward_to_come = reward + self.gamma * reward_to_come
            advantage = reward + self.gamma * following - value + self.gamma * self.smoothing * advantage
            following = value
            returns.append(torch.tensor(reward_to_come))
            advantages.append(torch.tensor(advantage))
        return returns[::-1], advantages[::-1]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Episodes(self.play), batch_size=BATCH)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        states, actions, before, returns, advantages = batch
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        self.log("mean_length", self.mean_length, prog_bar=True, on_step=False, on_epoch=True)
        for_actor, for_critic = self.optimizers()

        policy, _, _ = self(states)
        ratio = torch.exp(policy.log_prob(actions) - before)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        actor_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        self.manual_backward(actor_loss)
        for_actor.step()
        for_actor.zero_grad()

        critic_loss = (returns - self.critic(states).squeeze(1)).square().mean()
        self.manual_backward(critic_loss)
        for_critic.step()
        for_critic.zero_grad()
        self.log_dict({"actor_loss": actor_loss, "critic_loss": critic_loss}, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.actor.parameters(), lr=3e-3),
            torch.optim.Adam(self.critic.parameters(), lr=1e-2),
        )


def main(stages: int, cut: str, **options: Any) -> dict[str, Any]:
    """Train. Returns the weights and what was logged."""
    L.seed_everything(1, verbose=False)
    strategy = PipelineStrategy(num_stages=stages, num_microbatches=4, stage_config=CUTS[cut])
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=stages, max_epochs=3, **options)
    module = PPO()
    trainer.fit(module)
    return {"weights": module.state_dict(), "logged": dict(trainer.callback_metrics)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--cut", default="between the two", choices=CUTS)
    asked = parser.parse_args()
    print({name: float(value) for name, value in main(asked.stages, asked.cut)["logged"].items()})

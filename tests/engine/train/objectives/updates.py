"""The items of a job on the tiny model, before its first step."""

from __future__ import annotations

from engine.lora import Lora
from engine.protocol import TrainJob
from engine.train.adamw import new_adam_state
from engine.train.batch import select
from engine.train.course import Course, objective_of, prepare
from engine.train.critic_head import new_head_critic
from engine.train.learner import Learner
from engine.train.rollout import gather
from engine.train.scorer import Scorer
from tests.engine.train.tiny import silent


def course_of(job: TrainJob, lora: Lora, scorer: Scorer) -> Course:
    """What `run_update` prepares for its steps."""
    critic = new_head_critic(scorer.base.config.shape, scorer.base.device)
    mismatched = any(objective_of(name).uses_mismatched for name in job.objectives)
    selection = select(job, scorer.base.config.shape.n_vocab)
    gathered = gather(job, selection, lora, scorer, silent, mismatched=mismatched)
    learner = Learner(lora, new_adam_state(lora.parameters()), critic)
    return prepare(job, gathered, learner, scorer, silent)[0]

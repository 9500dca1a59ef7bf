"""Reinforcement learning in a few lines: a `Flow` says what takes part, a `Trainer` runs it over prompts.

    flow = Flow(model="model.gguf", folder="run", reward=lambda answers: [-len(a.text) / 400 for a in answers])
    with Trainer(flow) as trainer:
        for round_ in trainer.run(prompts, rounds=8):
            print(round_.version, round_.mean_reward)
        print(trainer.ask("Why is the sky blue?").text)

A round samples answers to the prompts, has them judged, trains the adapter on them and serves the better one. It is
done by the daemon's own workers, through the same protocol: a serve worker samples and says token ids and
log-probabilities, a train worker runs a job folder. So what holds for an update of the daemon holds here: the folder of
a job is all there is to it, and the adapters in `folder` are PEFT folders that the daemon can import.

A round that nothing can be learned from is told of and skipped: an unlucky one is no reason to end a night's run.

What the daemon adds is not here: no gate looks at an adapter before it is served, nobody's requests are answered, and
nothing is started again. A flow on a folder with adapters goes on from the newest.

    terms     what takes part, what an answer is, what a round did     trainer   the rounds
    roles     who is on which device                                   verdicts  rewards as an update takes them
"""

from engine.flow.roles import Role
from engine.flow.terms import Answer, Flow, FlowError, Prompt, Reward, Round
from engine.flow.trainer import Trainer

__all__ = ["Answer", "Flow", "FlowError", "Prompt", "Reward", "Role", "Round", "Trainer"]

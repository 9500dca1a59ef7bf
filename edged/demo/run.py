"""`edged demo`: the whole loop on a real model, with a simulated person in place of the people.

It starts `edged run` as a child, compares answers to held-out questions before and after, and in between lets the
person rate 16 answers a round and waits for each update. All of it goes over the Unix socket, as an app would. The
held-out questions are never rated.

A state folder that holds learning already is left alone: the daemon then gets a fresh folder inside it, while socket,
result.json and the curve stay where the caller expects them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import random
import shlex
import time
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from edged.cli.child import DaemonChild, pick_port, running, socket_of
from edged.cli.connect import Peer, open_async_http, refusal_of_socket
from edged.cli.exits import CommandError
from edged.demo import report, survey
from edged.demo.outcome import Answer, Round, compare, summarise
from edged.demo.people import PEOPLE, Person, words_of
from edged.demo.progress import Show, told
from edged.demo.prompts import HELD_OUT, TRAINING

RATINGS_PER_ROUND = 16
HELD_OUT_SAMPLES = 2  # answers to each held-out question, before and after
SEED = 1
HELD_OUT_SEED = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run. `port` 0 takes a free one."""

    preference: str
    state_folder: Path
    rounds: int
    port: int
    model: str


def run(plan: Plan, *, stay: bool) -> bool:
    """Run the demo; True if it learned. With `stay` the daemon goes on afterwards until Ctrl-C."""
    console = Console(highlight=False)
    person = PEOPLE[plan.preference]
    _check_packages()
    socket = socket_of(plan.state_folder)
    if refusal_of_socket(socket) is None:
        raise CommandError(
            f"a daemon already runs at {socket}", hint="stop it, or give the demo another folder with --state-dir"
        )
    folder = fresh_state_folder(plan.state_folder)
    if folder != plan.state_folder:
        console.print(f"{plan.state_folder} holds learning already; this demo starts afresh in {folder}")
    port = pick_port(plan.port)
    listen = ["--listen", f"unix:{socket}", "--listen", f"tcp:127.0.0.1:{port}"]
    with running(["--model", plan.model, *listen], folder) as child:
        peer = Peer(socket=socket)
        with told(console) as show:
            show("starting the daemon")
            ready_s = child.await_ready(peer)
        address = f"http://127.0.0.1:{port}/"
        console.print(f"[bold]edged[/bold] is ready after {ready_s:.1f} s; watch it at [bold]{address}[/bold]")
        console.print(
            f"A simulated person who likes [bold]{person.likes}[/bold] will rate {plan.rounds} rounds of 16.\n"
        )
        finished: report.Report | None = None
        try:
            with child.answering():
                finished = asyncio.run(_learn(plan, person, peer, child, console, folder))
            _show(console, finished, *report.save(finished, plan.state_folder))
            console.print(f"\n{closing_text(plan, folder, address, stay=stay)}", markup=False, soft_wrap=True)
            if stay:
                _stay(child)
        except KeyboardInterrupt:
            console.print("\nstopping the daemon")
        return finished is not None and finished.comparison.learned


def closing_text(plan: Plan, folder: Path, address: str, *, stay: bool) -> str:
    """How to go on with what it learned: with the daemon that stays up, or by starting one on its state `folder`."""
    if stay:
        return (
            f"The page: {address}\n"
            f"Chat with it: edged chat --connect unix:{socket_of(plan.state_folder)}     Ctrl-C stops the daemon."
        )
    command = shlex.join(["edged", "run", "--model", plan.model, "--state-dir", str(folder)])
    return f"The daemon stops now. To start one on what it learned: {command}"


def fresh_state_folder(folder: Path) -> Path:
    """`folder` if it holds no database yet, else the first `folder/demo-N` that does not exist."""
    if not (folder / "edged.db").exists():
        return folder
    number = 2
    while (folder / f"demo-{number}").exists():
        number += 1
    return folder / f"demo-{number}"


def rounds_of_prompts(rounds: int, *, seed: int = SEED) -> list[list[str]]:
    """16 training questions for each round; every question comes once before any comes again."""
    order = random.Random(seed)
    queue: list[str] = []
    while len(queue) < rounds * RATINGS_PER_ROUND:
        queue += order.sample(TRAINING, len(TRAINING))
    return [queue[i * RATINGS_PER_ROUND : (i + 1) * RATINGS_PER_ROUND] for i in range(rounds)]


def _check_packages() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("the demo draws with matplotlib, which is not installed", hint="pip install 'edged[demo]'")


async def _learn(
    plan: Plan, person: Person, peer: Peer, child: DaemonChild, console: Console, folder: Path
) -> report.Report:
    started = time.monotonic()
    async with open_async_http(peer) as http:
        with told(console) as show:
            before_answers = await _ask_held_out(http, person, "before training", show=show)
            rounds = []
            for number, prompts in enumerate(rounds_of_prompts(plan.rounds), start=1):
                done = await _one_round(http, person, prompts, number, show=show)
                child.check_alive()
                rounds.append(done)
                console.print(_round_text(number, plan.rounds, done))
            after_answers = await _ask_held_out(http, person, "after training", show=show)
            scores = await survey.await_scores(http, before_answers + after_answers, show=show)
    before, after = summarise(before_answers, scores), summarise(after_answers, scores)
    return report.Report(
        preference=person.name,
        likes=person.likes,
        rounds=rounds,
        before=before,
        after=after,
        comparison=compare(before, after),
        before_answers=before_answers,
        after_answers=after_answers,
        seconds=time.monotonic() - started,
        state_folder=str(folder),
    )


async def _ask_held_out(http: httpx.AsyncClient, person: Person, tag: str, *, show: Show) -> list[Answer]:
    """The same seeds before and after, in bundles of a round's size, as the person asks too."""
    answers: list[Answer] = []
    questions = HELD_OUT * HELD_OUT_SAMPLES
    for first in range(0, len(questions), RATINGS_PER_ROUND):
        bundle = questions[first : first + RATINGS_PER_ROUND]
        answers += await survey.ask(http, person, bundle, seed=HELD_OUT_SEED + first, tag=tag, show=show)
    return answers


async def _one_round(http: httpx.AsyncClient, person: Person, prompts: list[str], number: int, *, show: Show) -> Round:
    updates_before = (await survey.status(http))["learner"]["updates_total"]
    answers = await survey.ask(http, person, prompts, seed=number * RATINGS_PER_ROUND, tag=f"round {number}", show=show)
    await survey.rate(http, answers)
    rated_at = time.monotonic()
    update = await survey.await_update(http, updates_before, show=show)
    return Round(
        mean_rating=sum(answer.rating for answer in answers) / len(answers),
        mean_words=sum(len(words_of(answer.text)) for answer in answers) / len(answers),
        verdict=None if update is None else update["verdict"],
        version=(await survey.status(http))["adapter"]["version"],
        reason="" if update is None else update.get("reason") or "",
        update_s=time.monotonic() - rated_at,
    )


def _round_text(number: int, total: int, done: Round) -> str:
    head = f"round {number:>2}/{total}  rating {done.mean_rating:+.2f}  {done.mean_words:5.1f} words"
    match done.verdict:
        case None:
            return f"{head}  no update: the ratings are too alike, they join the next round"
        case "published":
            return f"{head}  [green]v{done.version} is live[/green] after {done.update_s:.1f} s"
        case verdict:
            return f"{head}  [yellow]{verdict}[/yellow]: {done.reason}"


def _show(console: Console, finished: report.Report, curve: Path, result: Path) -> None:
    table = Table(title=f"\nAnswers to held-out questions ({finished.before.n_answers} each)", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    for row in report.table_rows(finished):
        table.add_row(*row)
    console.print(table)
    for prompt, before, after in report.examples(finished):
        console.print(f"\n[bold]{prompt}[/bold]")
        console.print("  before  ", before, markup=False)
        console.print("  after   ", after, markup=False)
    console.print(f"\n{report.verdict_text(finished)}")
    console.print(f"Reward curve: {curve}    Result: {result}    {finished.seconds:.0f} s in all")


def _stay(child: DaemonChild) -> None:
    while True:
        child.check_alive()
        time.sleep(0.5)

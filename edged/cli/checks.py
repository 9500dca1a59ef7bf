"""The checks of `edged doctor`: each looks at one thing of this machine and says ok, warn or fail, and what to do.

A check never raises for what it looks at. Whatever could bring the process down with it (engine packages, CUDA) is
asked in a subprocess. Nothing is installed, started or changed; the files that `check_disk` writes are removed again.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edged.cli.connect import refusal_of_socket
from engine import placement

if TYPE_CHECKING:
    from edged.settings import Settings

Level = Literal["ok", "warn", "fail"]

MIN_PYTHON = (3, 11)
NEEDED_BYTES = 2_500_000_000  # daemon and both workers with a 135M model
MIN_FREE_DISK_BYTES = 2_000_000_000
SLOW_FSYNC_MS = 30.0  # every acknowledged rating waits for one
FSYNC_ROUNDS = 20
IMPORT_TIMEOUT_S = 180.0
# The serve worker's way into its engine: a llama.cpp that does not fit this CPU loads, and dies in its first product.
_DECODE = """
import sys, time
from engine.generate.scheduler import Entry
from engine.generate.worker import open_model

path, backend, device, dtype, threads = sys.argv[1:]
model = open_model(path, backend, gpu_layers=0, device=device, dtype=dtype)
context = model.open_context(context_tokens=256, n_sequences=1, max_rows=1, threads=int(threads))
prompt = model.tokenise("The capital of France is the city of", add_special=True, parse_special=False)
rows = context.decode([Entry(0, i, token, i == len(prompt) - 1) for i, token in enumerate(prompt)])
started = time.perf_counter()
for position in range(len(prompt), len(prompt) + 32):
    rows = context.decode([Entry(0, position, int(rows[0].argmax()), True)])
print(32 / (time.perf_counter() - started))
"""
_ASK_SERVER = """
import sys
from engine.generate.remote.server import find_server
from engine.generate.remote.transport import Transport
from engine.generate.remote.worker import read_key

server = find_server(Transport(sys.argv[1], api_key=read_key(sys.argv[2])))
print(f"{server.name}, sequences of {server.max_tokens or 'unknown'} tokens, {len(server.loaded())} adapters")
"""
ENGINE_PACKAGES = ("llama_cpp", "torch", "transformers", "peft")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. `advice` is empty when there is nothing to do."""

    name: str
    level: Level
    found: str
    advice: str = ""


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Whether the interpreter is new enough."""
    found = ".".join(map(str, version))
    if version >= MIN_PYTHON:
        return Finding(name="python", level="ok", found=found)
    return Finding(name="python", level="fail", found=found, advice="use Python 3.11 or newer")


def check_sqlite(version: str | None = None) -> Finding:
    """The SQLite that edged uses (the one in apsw), or `version`, as in "3.51.3"."""
    from edged.store.database import SQLITE_MIN

    if version is None:
        import apsw

        version = apsw.sqlite_lib_version()
    if tuple(int(part) for part in version.split(".")) >= SQLITE_MIN:
        return Finding(name="sqlite", level="ok", found=version)
    fixed = ".".join(map(str, SQLITE_MIN))
    return Finding(
        name="sqlite",
        level="fail",
        found=f"{version}, older than {fixed}, which fixes a bug that can lose a commit",
        advice="pip install --upgrade apsw",
    )


def check_model(model: str) -> Finding:
    """The model that the settings name is there, and its file is whole and of a kind that can be trained."""
    from edged.base_model import ModelError, find_model, model_bytes, read_shape

    try:
        file = find_model(model)
        shape = read_shape(file)
        n_bytes = model_bytes(file)
    except (ModelError, OSError) as error:
        found, _, advice = str(error).partition("; ")
        return Finding(name="model", level="fail", found=found, advice=advice or "use another model file")
    found = f"{file.name}: {shape.arch}, {shape.n_layers} blocks, {n_bytes / 1e6:.0f} MB"
    return Finding(name="model", level="ok", found=found)


def check_engine() -> list[Finding]:
    """Every engine package can be imported; one subprocess each, as a bad build may crash on import."""
    findings = []
    for package in ENGINE_PACKAGES:
        code = f"import {package}; print(getattr({package}, '__version__', 'unknown version'))"
        rc, output = _ask_python(code)
        findings.append(
            Finding(name=package, level="ok", found=output.splitlines()[-1])
            if rc == 0 and output
            else Finding(
                name=package,
                level="fail",
                found=_why_failed(rc, output),
                advice="install the engine packages: pip install 'edged[engine]' (in a checkout: make demo)",
            )
        )
    return findings


def check_decoding(settings: Settings) -> Finding:
    """The engine really samples with this model here. A model that is not there is `check_model`'s finding."""
    from edged.base_model import ModelError, choose_backend, find_model
    from edged.machine import train_dtype
    from edged.resolved import serve_device

    try:
        path = find_model(settings.model.path)
    except ModelError:
        return Finding(name="sampling", level="warn", found="not tried: there is no model")
    try:
        backend, device = choose_backend(settings.serve.backend, settings.serve.url, path), serve_device(settings, path)
    except ModelError as error:
        found, _, advice = str(error).partition("; ")
        return Finding(name="sampling", level="fail", found=found, advice=advice)
    if backend == "remote":
        return check_server(settings.serve.url, settings.serve.api_key_file)
    dtype = train_dtype(settings.learn.dtype, device)
    rc, output = _ask_python(_DECODE, str(path), backend, device, dtype, str(len(os.sched_getaffinity(0))))
    if rc == 0:
        speed = f"{float(output.splitlines()[-1]):.0f} tokens/s, one answer"
        return Finding(name="sampling", level="ok", found=f"{backend}: {speed}")
    advice = "build llama.cpp on this machine: pip install --no-binary llama-cpp-python --force-reinstall"
    if backend == "transformers":
        advice = "see the reason; [placement] serve_device says where it decodes"
    return Finding(name="sampling", level="fail", found=_why_failed(rc, output), advice=advice)


def check_server(url: str, api_key_file: str) -> Finding:
    """Whether a server that can be spoken to answers at serve.url."""
    rc, output = _ask_python(_ASK_SERVER, url, api_key_file)
    if rc == 0:
        return Finding(name="sampling", level="ok", found=f"remote: {output.splitlines()[-1]} at {url}")
    return Finding(
        name="sampling",
        level="fail",
        found=f"remote: {_why_failed(rc, output)}",
        advice="start the server, or correct [serve] url and api_key_file",
    )


def _ask_python(code: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of `code` in a fresh interpreter; -1 and a reason when it did not end in time."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer within {IMPORT_TIMEOUT_S:.0f} s"
    return done.returncode, (done.stdout if done.returncode == 0 else done.stderr).strip()


def _why_failed(rc: int, output: str) -> str:
    if rc < -1:
        return f"killed by signal {-rc}: this build does not fit this CPU"
    return output.splitlines()[-1] if output else f"ended with status {rc}"


def check_cpu(cpuinfo: str | None = None) -> Finding:
    """The vector units that decide how fast training and sampling are; `cpuinfo` as /proc/cpuinfo has it."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    useful = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16") if name in flags]
    if flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        return Finding(name="cpu", level="ok", found=", ".join(useful))
    return Finding(
        name="cpu",
        level="warn",
        found=", ".join(useful) or "no vector units found",
        advice="no bfloat16 unit: training takes about twice as long, in float32",
    )


def check_cores(cores: int | None = None) -> Finding:
    """How many cores there are to serve and train on."""
    count = len(os.sched_getaffinity(0)) if cores is None else cores
    if count >= 2:
        return Finding(name="cores", level="ok", found=str(count))
    return Finding(name="cores", level="warn", found=str(count), advice="with two, answers go on while it learns")


def check_memory(meminfo: str | None = None) -> Finding:
    """Memory that is free for edged; `meminfo` as /proc/meminfo has it."""
    text = Path("/proc/meminfo").read_text() if meminfo is None else meminfo
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    if match is None:
        return Finding(name="memory", level="warn", found="unknown", advice="have 2.5 GB free")
    free = int(match[1]) * 1024
    enough = free >= NEEDED_BYTES
    return Finding(
        name="memory",
        level="ok" if enough else "warn",
        found=f"{free / 1e9:.1f} GB free",
        advice="" if enough else "serving and training a 135M model take 2.5 GB; larger models more",
    )


def check_disk(folder: Path) -> list[Finding]:
    """The state folder (or the nearest parent that exists) can be written, has room, and syncs fast enough."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".edged-doctor-", dir=place) as scratch:
            median_ms = statistics.median(_fsync_times_ms(Path(scratch)))
    except OSError as error:
        return [
            Finding(
                name="state folder",
                level="fail",
                found=f"{place}: cannot be written: {error.strerror}",
                advice="give --state-dir a folder of yours",
            )
        ]
    free = shutil.disk_usage(place).free
    fast = median_ms <= SLOW_FSYNC_MS
    return [
        Finding(
            name="state folder",
            level="ok" if free >= MIN_FREE_DISK_BYTES else "warn",
            found=f"{folder}: {free / 1e9:.1f} GB free",
            advice="" if free >= MIN_FREE_DISK_BYTES else "have 2 GB free for the model cache and adapters",
        ),
        Finding(
            name="disk sync",
            level="ok" if fast else "warn",
            found=f"{median_ms:.1f} ms for 4 KiB",
            advice="" if fast else "every rating waits for one sync: a faster disk makes them faster",
        ),
    ]


def _fsync_times_ms(folder: Path) -> list[float]:
    times_ms = []
    with (folder / "probe").open("wb", buffering=0) as file:
        for _ in range(FSYNC_ROUNDS):
            started = time.perf_counter()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            times_ms.append((time.perf_counter() - started) * 1000)
    return times_ms


def check_gpu() -> Finding:
    """NVIDIA GPUs of this machine, and whether this llama.cpp and this torch can use them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding(name="gpu", level="ok", found="none; everything runs on the CPU")
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (subprocess.SubprocessError, OSError) as error:
        return Finding(name="gpu", level="warn", found=f"nvidia-smi failed: {error}", advice="check the NVIDIA driver")
    cards = "; ".join(line.strip() for line in listed)
    asked = (
        "import llama_cpp; print(llama_cpp.llama_supports_gpu_offload())",
        "import torch; print(torch.cuda.is_available())",
    )
    serves, trains = (rc == 0 and output.endswith("True") for rc, output in map(_ask_python, asked))
    return judge_gpu(cards, serves=serves, trains=trains)


def judge_gpu(cards: str, *, serves: bool, trains: bool) -> Finding:
    """Of a machine with `cards`. serves, trains: whether this llama.cpp and this torch can use them."""
    if serves and trains:
        return Finding(name="gpu", level="ok", found=f"{cards}; llama.cpp and torch can use them")
    if serves:
        return Finding(
            name="gpu",
            level="warn",
            found=f"{cards}; this torch cannot use them",
            advice="install a CUDA build of torch that the driver takes, or set placement.train_device to cpu",
        )
    return Finding(
        name="gpu",
        level="warn",
        found=f"{cards}; this llama.cpp was built without CUDA"
        + ("" if trains else ", and this torch cannot use them"),
        advice="install the CUDA toolkit (nvcc), then: make distclean demo",
    )


def check_placement(settings: Settings, devices: Sequence[placement.Device] | None = None) -> list[Finding]:
    """What would run where, in bytes: the plan's summary, each device, each role on it, and what is new when idle.

    Args:
        devices: instead of this machine's.
    A model that cannot be read is `check_model`'s finding.
    """
    from adapters.errors import AdapterError
    from edged.base_model import ModelError, choose_backend, find_model
    from edged.devices import DevicesUnknown, find_devices
    from edged.placing import planned_model
    from edged.resolved import placement_request

    n_cpus = settings.placement.cpu_devices
    try:
        path = find_model(settings.model.path)
        model, backend = planned_model(path), choose_backend(settings.serve.backend, settings.serve.url, path)
    except (ModelError, AdapterError, ValueError, OSError):
        return [Finding(name="placement", level="warn", found="not planned: there is no model")]
    try:
        request = placement_request(settings, model, find_devices(n_cpus) if devices is None else devices, backend)
        plans = placement.plan_both(request)
    except DevicesUnknown as error:
        found, _, advice = str(error).partition("; ")
        return [Finding(name="placement", level="warn", found=found, advice=advice)]
    except placement.BadPin as error:
        return [Finding(name="placement", level="fail", found=str(error), advice="correct [placement]")]
    except placement.DoesNotFit as error:
        found, _, advice = str(error).partition("; ")
        return [Finding(name="placement", level="warn", found=found, advice=advice)]
    return _plan_findings(plans)


def _plan_findings(plans: placement.Plans) -> list[Finding]:
    busy, idle = plans.busy, plans.idle
    lines = [f"{placement.summary(busy)}"]
    for number, device in enumerate(busy.request.devices):
        lines.append(f"device {number}, {device.label}: {placement.device_line(busy, number)}")
        for share in busy.shares:
            if share.device == number:
                lines.append(f"- {share.role}: {placement.share_line(share)}")
    lines.append(adapter_line(busy.request))
    if placement.moves(busy, idle) or idle.micro_batch_tokens != busy.micro_batch_tokens:
        lines.append(f"while nobody asks: {placement.summary(idle)}")
    advice = {}
    if why := placement.hindrance(busy):
        advice[lines[0]] = f"planned only, one process trains: {why}"
    if why := placement.hindrance(idle):
        advice[lines[-1]] = f"planned only, the plan above stays: {why}"
    return [Finding(name="placement", level="ok", found=line, advice=advice.get(line, "")) for line in lines]


def adapter_line(request: placement.Request) -> str:
    """What `[lora]` comes to on these devices."""
    training, n_layers = request.training, request.model.shape.n_layers
    which = f"the topmost {training.layers} of {n_layers}" if training.layers else f"all {n_layers}"
    return f"the adapter: rank {training.rank}, on {which} blocks"


def check_socket(socket: Path) -> Finding:
    """Whether a daemon listens there; both answers are fine, a dead socket file is not."""
    if not socket.exists():
        return Finding(name="socket", level="ok", found=f"{socket}: no daemon runs here")
    why = refusal_of_socket(socket)
    if why is None:
        return Finding(name="socket", level="ok", found=f"{socket}: a daemon listens")
    return Finding(
        name="socket",
        level="warn",
        found=f"{socket}: {why}",
        advice="`edged run` replaces the socket of a daemon that is gone; for a system service join its group",
    )

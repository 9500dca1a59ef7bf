"""The messages between the daemon and its workers, and the rules of the link.

The daemon binds a ROUTER socket, each worker connects one DEALER. The life of a worker:

    worker -> Hello            first message; a wrong protocol version is refused by the decoder
    daemon -> StartServe | StartTrain | StartScore
    worker -> Ready | Fault    Fault: the worker cannot do its role (bad model file); it exits after it
    ...    -> the role's messages; the worker sends Beat at least every BEAT_S while its loop turns
    daemon -> Stop             the worker ends its work and exits 0

A module each: `life` for any worker, one for every role, `nouns` for what several of them speak of. Everything is
imported from here.

Times are seconds (`_s`) or milliseconds (`_ms`); log-probabilities are nats; token ids are the engine's own.
Log-probabilities that are unknown are None, never 0.0. This package imports the standard library and msgpack only.
"""

from __future__ import annotations

from engine import wire
from engine.protocol.life import (
    BEAT_S,
    ENV_ENDPOINT,
    ENV_EPOCH,
    ENV_NAME,
    EXIT_FAULT,
    EXIT_LINK_LOST,
    Beat,
    Fault,
    Hello,
    Ready,
    Stop,
)
from engine.protocol.nouns import BASE, AdapterRef, ModelFacts, ProbeTokens
from engine.protocol.score import (
    ClassifierSource,
    Fit,
    FitReport,
    Fitted,
    FittedSource,
    FunctionSource,
    HttpSource,
    Judge,
    Judged,
    JudgeItem,
    JudgeReason,
    RatedTokens,
    StartScore,
)
from engine.protocol.serve import (
    Backend,
    Begun,
    Called,
    Cancel,
    ChatMessage,
    ChoiceDone,
    Chunk,
    Decoding,
    FinishReason,
    FirstToken,
    Gap,
    Generate,
    ProbeText,
    RequestDone,
    RequestFailed,
    Route,
    Routed,
    RouteFailed,
    Sampling,
    Stage,
    Staged,
    StageFailed,
    StartServe,
    Tokenise,
    Tokenised,
    TokenLogprob,
    ToolCall,
    TopLogprob,
)
from engine.protocol.train import (
    JOB_FILE,
    MICRO_BATCH_TOKENS,
    OBJECTIVES,
    OUT_FOLDER,
    RESULT_FILE,
    BaseWeights,
    EngineNoise,
    EpisodeScore,
    EpisodeTokens,
    Feed,
    KlEstimator,
    LoraSettings,
    Pace,
    PpoSettings,
    PreferenceSettings,
    PreferredPair,
    Progress,
    RatedEpisode,
    Score,
    Scored,
    StartTrain,
    Train,
    Trained,
    TrainFailed,
    TrainJob,
    TrainMode,
    TrainPlan,
    TrainResult,
    TrainRole,
)
from engine.wire import MAX_MESSAGE_BYTES, Message, WireError, from_map, to_map

__all__ = [
    "BASE",
    "BEAT_S",
    "ENV_ENDPOINT",
    "ENV_EPOCH",
    "ENV_NAME",
    "EXIT_FAULT",
    "EXIT_LINK_LOST",
    "JOB_FILE",
    "MAX_MESSAGE_BYTES",
    "MICRO_BATCH_TOKENS",
    "OBJECTIVES",
    "OUT_FOLDER",
    "PROTOCOL",
    "RESULT_FILE",
    "AdapterRef",
    "Backend",
    "BaseWeights",
    "Beat",
    "Begun",
    "Called",
    "Cancel",
    "ChatMessage",
    "ChoiceDone",
    "Chunk",
    "ClassifierSource",
    "Decoding",
    "EngineNoise",
    "EpisodeScore",
    "EpisodeTokens",
    "Fault",
    "Feed",
    "FinishReason",
    "FirstToken",
    "Fit",
    "FitReport",
    "Fitted",
    "FittedSource",
    "FunctionSource",
    "Gap",
    "Generate",
    "Hello",
    "HttpSource",
    "Judge",
    "JudgeItem",
    "JudgeReason",
    "Judged",
    "KlEstimator",
    "LoraSettings",
    "Message",
    "ModelFacts",
    "Pace",
    "PpoSettings",
    "PreferenceSettings",
    "PreferredPair",
    "ProbeText",
    "ProbeTokens",
    "Progress",
    "RatedEpisode",
    "RatedTokens",
    "Ready",
    "RequestDone",
    "RequestFailed",
    "Route",
    "RouteFailed",
    "Routed",
    "Sampling",
    "Score",
    "Scored",
    "Stage",
    "StageFailed",
    "Staged",
    "StartScore",
    "StartServe",
    "StartTrain",
    "Stop",
    "TokenLogprob",
    "Tokenise",
    "Tokenised",
    "ToolCall",
    "TopLogprob",
    "Train",
    "TrainFailed",
    "TrainJob",
    "TrainMode",
    "TrainPlan",
    "TrainResult",
    "TrainRole",
    "Trained",
    "WireError",
    "decode",
    "encode",
    "from_map",
    "to_map",
]

PROTOCOL = 1


def encode(message: Message, epoch: int) -> bytes:
    """One frame: `message` stamped with the worker's epoch (its incarnation number)."""
    return wire.encode(message, epoch, version=PROTOCOL)


def decode(data: bytes) -> tuple[int, Message]:
    """The epoch and the message of one frame. Raises WireError."""
    return wire.decode(data, _REGISTRY, version=PROTOCOL)


_REGISTRY: dict[str, type[Message]] = {
    cls.__name__: cls
    for cls in (
        Hello, Ready, Fault, Beat, Stop,
        StartServe, Generate, Cancel, Begun, Chunk, Called, ChoiceDone, RequestDone, RequestFailed,
        Tokenise, Tokenised, Decoding,
        Stage, Staged, StageFailed, Route, Routed, RouteFailed,
        StartScore, Judge, Judged, Fit, Fitted,
        StartTrain, Score, Scored, Train, Progress, Trained, TrainFailed, Pace,
    )
}  # fmt: skip

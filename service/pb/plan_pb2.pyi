from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Plan(_message.Message):
    __slots__ = ("schema", "version", "epoch", "created_at", "actor", "reason", "endpoints", "key_check", "key_hashes", "target_offsets", "targets", "rates_rps", "parameters")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    KEY_CHECK_FIELD_NUMBER: _ClassVar[int]
    KEY_HASHES_FIELD_NUMBER: _ClassVar[int]
    TARGET_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    RATES_RPS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    schema: int
    version: int
    epoch: int
    created_at: float
    actor: str
    reason: str
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    key_check: int
    key_hashes: _containers.RepeatedScalarFieldContainer[int]
    target_offsets: _containers.RepeatedScalarFieldContainer[int]
    targets: _containers.RepeatedScalarFieldContainer[int]
    rates_rps: _containers.RepeatedScalarFieldContainer[float]
    parameters: Parameters
    def __init__(self, schema: _Optional[int] = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ..., created_at: _Optional[float] = ..., actor: _Optional[str] = ..., reason: _Optional[str] = ..., endpoints: _Optional[_Iterable[str]] = ..., key_check: _Optional[int] = ..., key_hashes: _Optional[_Iterable[int]] = ..., target_offsets: _Optional[_Iterable[int]] = ..., targets: _Optional[_Iterable[int]] = ..., rates_rps: _Optional[_Iterable[float]] = ..., parameters: _Optional[_Union[Parameters, _Mapping]] = ...) -> None: ...

class Parameters(_message.Message):
    __slots__ = ("method", "slots_per_endpoint", "replica_cap_rps", "keys_seen", "rate_rps", "admitted_rate_rps")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PER_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_CAP_RPS_FIELD_NUMBER: _ClassVar[int]
    KEYS_SEEN_FIELD_NUMBER: _ClassVar[int]
    RATE_RPS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_RATE_RPS_FIELD_NUMBER: _ClassVar[int]
    method: str
    slots_per_endpoint: int
    replica_cap_rps: float
    keys_seen: int
    rate_rps: float
    admitted_rate_rps: float
    def __init__(self, method: _Optional[str] = ..., slots_per_endpoint: _Optional[int] = ..., replica_cap_rps: _Optional[float] = ..., keys_seen: _Optional[int] = ..., rate_rps: _Optional[float] = ..., admitted_rate_rps: _Optional[float] = ...) -> None: ...

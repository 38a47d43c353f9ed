"""The config of an app: what the YAML file may say, checked once; nothing changes it afterwards.

Every key at every depth is known or refused. Keys that later releases will honour are refused too, in
`refuse_unsupported`: none is accepted and then ignored. The meaning of each key stands in docs/configuration.md.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from cluster.config_errors import ConfigError, translate
from cluster.config_rules import check_chain, check_models, check_names, refuse_unsupported
from router.plan import GROUP

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Group = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Section(BaseModel):
    """Base of every mapping in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: object) -> object:
        if data is None:  # a section with nothing under it
            return {}
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    kind = data.get("kind") if issubclass(cls, Model) else None
                    context = {"key": str(key), "valid": list(cls.model_fields), "hint": _owner_hint(str(key), kind)}
                    raise PydanticCustomError("unknown_key", "unknown key", context)
        return data


class Resources(Section):
    """What Ray reserves for one replica."""

    cpus: NotNegative = 0.0
    gpus: NotNegative = 0.0
    accelerator_type: str | None = None
    labels: dict[str, str] = {}


class ReplicaRange(Section):
    min: Count
    max: Count


class Emulate(Section):
    """How an emulated model behaves. All values can be changed while it runs, see `parse_emulate`."""

    base_ms: NotNegative
    per_token_ms: NotNegative = 0.0
    per_sequence_ms: NotNegative = 0.0
    agreement: Share | dict[str, Share]
    errors: Literal["shared", "own"] = "shared"
    confidence_spread: Share = 0.0
    context_len: Count = 4096
    eos_after: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _has_default(self) -> Self:
        if isinstance(self.agreement, dict) and "default" not in self.agreement:
            raise ValueError("agreement by text prefix needs an entry 'default'")
        return self

    @property
    def always_agrees(self) -> bool:
        values = self.agreement.values() if isinstance(self.agreement, dict) else (self.agreement,)
        return all(value == 1.0 for value in values)


class Model(Section):
    """What models of all kinds have. `level` None: its position in the list, from 1 (`AppConfig.levels`)."""

    name: Name
    kind: str
    level: Count | None = None
    replicas: Count | ReplicaRange = 1
    resources: Resources = Resources()

    @property
    def num_replicas(self) -> int:
        return self.replicas if isinstance(self.replicas, int) else self.replicas.min


class TransformersModel(Model):
    kind: Literal["transformers"]
    source: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8", "int4"] = "none"
    layers: Count | None = None
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    threads: Count | None = None
    prompt_tokens: Count | None = None
    compile: Literal["auto", "on", "off"] = "auto"

    @field_validator("compile", mode="before")
    @classmethod
    def _yaml_switch(cls, value: object) -> object:
        """YAML reads a bare on or off as a truth value."""
        return ("on" if value else "off") if isinstance(value, bool) else value


class NgramModel(Model):
    """Guesses from the text itself: no weights, and the vocabulary of whatever it drafts for."""

    kind: Literal["ngram"]


class EmulatedModel(Model):
    kind: Literal["emulated"]
    emulate: Emulate


MODEL_KINDS: Mapping[str, type[Model]] = {
    "transformers": TransformersModel,
    "ngram": NgramModel,
    "emulated": EmulatedModel,
}
AnyModel = Annotated[TransformersModel | NgramModel | EmulatedModel, Field(discriminator="kind")]


class RouterConfig(Section):
    policy: Literal["adaptive", "fixed"] = "adaptive"
    chain: Annotated[tuple[str | Group, ...], Field(strict=False)] | None = None
    windows: Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    explore: Share = 0.05
    max_window: Count = 16
    slo_ms_per_token: Positive | None = None
    cooperate: Count = 8
    draft_ahead: bool = True
    tree_nodes: Annotated[int, Field(ge=0, le=128)] = 32
    remember: bool = True


class KVConfig(Section):
    """`bytes` wins over `memory_fraction`."""

    bytes: Count | None = None
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.6
    block_tokens: Count = 16
    lease_s: Positive = 30.0
    prefix_cache: bool = True


class HttpConfig(Section):
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    model_id: Annotated[str, Field(min_length=1)] | None = None
    max_prompt_tokens: Count | None = None
    max_body_bytes: Count = 4 * 1024 * 1024
    max_queue: Annotated[int, Field(ge=0)] = 256
    deadline_s: Positive = 300.0


class Tls(Section):
    cert: str
    key: str
    ca: str


class SecurityConfig(Section):
    """Names of environment variables; secrets never stand in the file."""

    api_keys_env: EnvName | None = None
    stream_token_env: EnvName | None = None
    tls: Tls | None = None


class AppConfig(Section):
    """A whole file. `models`: cheapest first, the target last."""

    name: Name
    models: Annotated[tuple[AnyModel, ...], Field(strict=False, min_length=1)]
    router: RouterConfig = RouterConfig()
    kv: KVConfig = KVConfig()
    http: HttpConfig = HttpConfig()
    security: SecurityConfig = SecurityConfig()

    @property
    def target(self) -> TransformersModel | NgramModel | EmulatedModel:
        return self.models[-1]

    @property
    def levels(self) -> dict[str, int]:
        return {model.name: model.level or index for index, model in enumerate(self.models, 1)}

    @property
    def served_model_id(self) -> str:
        return self.http.model_id or self.name

    @property
    def fixed_chain(self) -> tuple[str, ...] | None:
        """The chain of policy `fixed`, None where the router plans it; the names of a group joined by GROUP."""
        chain = self.router.chain
        return None if chain is None else tuple(e if isinstance(e, str) else GROUP.join(e) for e in chain)


def load_config(path: str | Path) -> AppConfig:
    """Read and check a file; its stem is the default name. Raises ConfigError."""
    path = Path(path)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError("", f"cannot read the config file: {error.strerror}", str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError("", "the config file is not UTF-8 text", str(path)) from error
    except yaml.YAMLError as error:
        raise ConfigError("", f"not valid YAML: {' '.join(str(error).split())}", str(path)) from error
    try:
        return parse_config(data, path.stem)
    except ConfigError as error:
        raise ConfigError(error.path, error.reason, str(path)) from error


def parse_config(data: object, name: str) -> AppConfig:
    """Check a config given as plain mappings and lists; `name` is used where it has none. Raises ConfigError."""
    if not isinstance(data, Mapping):
        raise ConfigError("", "a config is a mapping with the key 'models'")
    data = {"name": name, **data}
    try:
        config = AppConfig.model_validate(data)
    except ValidationError as error:
        raise translate(error, data) from error
    check_names(config)
    refuse_unsupported(config)
    check_models(config)
    check_chain(config)
    return config


def parse_emulate(data: object, model: str, is_target: bool) -> Emulate:
    """Check `emulate` values that change while the app runs. Raises ConfigError with paths below `emulate`."""
    try:
        emulate = Emulate.model_validate(data)
    except ValidationError as error:
        found = translate(error, data)
        raise ConfigError(f"emulate.{found.path}".rstrip("."), found.reason, model) from error
    if is_target and not emulate.always_agrees:
        raise ConfigError("emulate.agreement", "the target's agreement must be 1.0", model)
    return emulate


def with_port(config: AppConfig, port: int) -> AppConfig:
    """The same app at another port, as `--port` asks for. Raises ConfigError."""
    data = config.model_dump(mode="json", exclude_unset=True)
    return parse_config({**data, "http": {**data.get("http", {}), "port": port}}, config.name)


def config_hash(config: AppConfig) -> str:
    """Equal for configs that make the same app, wherever it listens: host and port are left out."""
    data = config.model_dump(mode="json", exclude={"http": {"host", "port"}})
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _owner_hint(key: str, kind: object) -> str:
    """Says so when a key is right but for another kind of model."""
    owners = [name for name, model in MODEL_KINDS.items() if key in model.model_fields]
    return f"{key} belongs to kind {' and '.join(owners)}, not {kind}" if kind is not None and owners else ""


class _StrictLoader(yaml.SafeLoader):
    """A key given twice is an error, not the last one's victory."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)

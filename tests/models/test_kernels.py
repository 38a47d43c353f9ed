"""Kernels by themselves: rounding to bfloat16 and the exponential, against torch; and where compiled code is kept."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from models.kernels.elementwise import add, rms_norm, silu_gate

ROWS = (1, 3, 17, 40)


def bits(tensor: torch.Tensor) -> np.ndarray:
    made: np.ndarray = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return made


@pytest.mark.parametrize("rows", ROWS)
def test_bfloat16_is_written_as_torch_rounds_it(rows: int) -> None:
    x = torch.randn(rows, 48) * torch.logspace(-30, 30, rows)[:, None]
    update = torch.randn(rows, 48).bfloat16()
    total, out = x.clone(), torch.empty(rows, 48, dtype=torch.bfloat16)
    add(total.numpy(), bits(update))
    assert torch.equal(total, x + update.float())
    exact = torch.empty(rows, 48)
    for result in (exact, out):
        rms_norm(total.numpy(), np.ones(48, np.float32), np.float32(1e-6), bits(result))
    assert torch.equal(out, exact.bfloat16())


@pytest.mark.parametrize("rows", ROWS)
def test_the_gate_is_torchs(rows: int) -> None:
    gate_up = torch.randn(rows, 96) * 30.0
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty(rows, 48)
    silu_gate(gate_up.numpy(), out.numpy())
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-30)
    narrow = torch.empty(rows, 48, dtype=torch.bfloat16)
    silu_gate(bits(gate_up.bfloat16()), bits(narrow))
    wanted = (torch.nn.functional.silu(gate.bfloat16().float()) * up.bfloat16().float()).bfloat16()
    torch.testing.assert_close(narrow, wanted, rtol=0.01, atol=1e-30)


def test_compiled_code_is_kept_apart_for_each_state_of_the_sources(tmp_path: Path) -> None:
    """numba does not notice when a kernel that another one calls has changed."""
    code = "import models.kernels, numba; print(numba.config.CACHE_DIR)"

    def folder(env: dict[str, str]) -> str:
        made = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        return made.stdout.strip()

    kept = Path(folder({"SPECRELAY_CACHE": str(tmp_path), "PATH": ""}))
    assert kept.parent == tmp_path / "kernels"
    assert folder({"SPECRELAY_CACHE": str(tmp_path), "NUMBA_CACHE_DIR": "/elsewhere", "PATH": ""}) == "/elsewhere"

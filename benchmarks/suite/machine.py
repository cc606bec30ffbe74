"""What the numbers were measured on."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import transformer_ops as tops

ROOT = Path(__file__).parents[2]
# The usual names of what the library sees of an x86 processor, by its level.
FEATURES = {
    "avx512_fp16": ["AVX512-BF16", "AVX-512", "AVX2"],
    "avx512_bf16": ["AVX512-BF16", "AVX-512", "AVX2"],
    "avx512": ["AVX-512", "AVX2"],
    "avx2": ["AVX2"],
}


def describe(device: torch.device, threads: int, environment: dict[str, str]) -> dict[str, Any]:
    """Machine, versions, commit and settings, for JSON."""
    cpu = _cpuinfo()
    neon = ["NEON"] if "asimd" in cpu.get("flags", "") else []
    about: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "features": FEATURES.get(tops.processor().level, neon),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformer_ops": getattr(tops, "__version__", "unknown"),
        "threads": threads,
        "device": str(device),
        "environment": {
            name: environment[name]
            for name in ("OMP_WAIT_POLICY", "TRANSFORMER_OPS_ISA", "TRANSFORMER_OPS_POOL_LIMIT")
            if name in environment
        },
        "load_before": round(os.getloadavg()[0], 2),
    }
    if device.type == "cuda":
        about["gpu"] = torch.cuda.get_device_name(device)
    return about


def caption(about: dict[str, Any]) -> str:
    """The machine in one line."""
    where = about.get("gpu") or (
        f"{about['cpu']}, {about['cores']} cores ({', '.join(about['features']) or 'no SIMD'}), "
        f"{about['threads']} thread{'s' if about['threads'] > 1 else ''}"
    )
    settings = "".join(f", {name}={value}" for name, value in about["environment"].items())
    return f"{where}, torch {about['torch']}{settings}, {about['date']}, commit {about['commit']}"


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in pairs}
    # arm64 says Features.
    return {"flags": found.get("Features", ""), **found}


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

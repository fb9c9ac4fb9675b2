"""Package metadata; the settings of the tools are in pyproject.toml."""

from pathlib import Path
from runpy import run_path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="pipemega",
    version=run_path(str(HERE / "pipemega" / "lazy_imports.py"))["__version__"],
    description="Train large transformers over data, tensor and pipeline ranks, from one JSON file",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["pipemega", "pipemega.*"]),
    package_data={
        "pipemega": ["py.typed"],
        "pipemega.config": ["*.md", "*.json"],
        "pipemega.compat.deepspeed": ["*.json"],
        "pipemega.compat.megatron": ["*.md", "*.json"],
        "pipemega.pipeline.visualize": ["*.html", "*.css", "*.js"],
    },
    install_requires=[
        "torch>=2.8,<3",
        "pydantic>=2.7,<3",
        "numpy>=1.24",
        "einops>=0.7",
        # Checksums of checkpoints; where it is missing, zlib computes them.
        'isal>=1.5; platform_machine in "x86_64 AMD64 aarch64 arm64"',
        "json5>=0.9.14",
        "tokenizers>=0.15.1",
        "tqdm>=4.60",
        "wandb>=0.16",
    ],
    extras_require={
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.5",
            "hypothesis>=6",
            "ruff>=0.6",
            "mypy>=1.10",
            "tensorboard>=2.14",
            "matplotlib>=3.8",
            "fsspec>=2023.5",
            "pdoc>=15",
            "torchmetrics>=1.4",
            "transformers>=5.9,<6",
            "safetensors>=0.4",
            "sentencepiece>=0.2",
            "tiktoken>=0.7",
            "pyarrow>=15",
            "pillow>=9",
            "peft>=0.18",
        ],
        # The functions of its float8 that pipemega calls are not a public interface.
        "fp8": ["torchao>=0.14,<0.19"],
        "hf": ["transformers>=5.9,<6", "safetensors>=0.4"],
        "metrics": ["torchmetrics>=1.4"],
        "remote": ["fsspec>=2023.5"],
        "pictures": ["matplotlib>=3.8"],
        "tensorboard": ["tensorboard>=2.14"],
        "vision": ["torchvision>=0.20", "pillow>=9", "scikit-learn>=1.2"],
    },
    entry_points={"console_scripts": ["pipemega = pipemega.cli:main"]},
)

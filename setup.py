"""Metadata and dependencies; constraints.txt has the tested versions."""

from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "torch": ["torch>=2.13", "safetensors"],
    "tensorflow": ["tensorflow>=2.21", "torch>=2.13"],  # several workers exchange by gloo
    "horovod": ["horovod>=0.28.1", "cffi", "packaging", "pyyaml"],
    "tune": ["ray[tune]>=2.60,<3"],
    "data": ["ray[data]>=2.60,<3"],
    "operators": ["torchmetrics", "transformers"],
    "callbacks": ["mlflow-skinny", "plotly", "tensorboard", "wandb"],
    "lightning": ["lightning>=2.6"],
    "huggingface": ["accelerate", "transformers"],
    "examples": ["scikit-learn"],
    "bench": ["accelerate", "lightning", "matplotlib", "pytest"],
    "test": [
        "accelerate",
        "build",
        "codespell",
        "datasets",
        "fsspec[http]",
        "hypothesis",
        "import-linter",
        "ipykernel",
        "lightning",
        "mypy",
        "nbclient",
        "psutil",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
        "scikit-learn",
        "types-psutil",
        "types-tqdm",
    ],
    "docs": ["furo", "myst-parser", "sphinx", "sphinx-copybutton"],
}
# Everything that a user of the library can switch on; tools for its developers are not features.
# TensorFlow is left out, since some need tensorflow-cpu in its place and pip would install both; so
# is Horovod, which pip cannot build as it is.
FEATURES = ("torch", "tune", "data", "operators", "callbacks")
EXTRAS["all"] = sorted({package for name in FEATURES for package in EXTRAS[name]})

# raysgd/operators is a link to operators/. find_packages follows it where it exists, but an sdist
# carries operators/ alone: so these packages are named from there, once, in both cases.
OPERATORS = [
    "raysgd.operators",
    *(f"raysgd.operators.{name}" for name in find_packages("operators")),
]

setup(
    name="raysgd",
    version="0.1.0",
    description="Elastic distributed training of PyTorch and TensorFlow models on Ray.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["raysgd", "raysgd.*"], exclude=["raysgd.operators*"]),
        *OPERATORS,
    ],
    package_dir={"raysgd.operators": "operators"},
    package_data={"raysgd": ["py.typed"]},
    install_requires=[
        "ray>=2.60,<3",
        "numpy",
        "cloudpickle",
        "filelock",
        "fsspec",
        "psutil",
        "pyyaml",
        "tqdm",
        "typer",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["raysgd = raysgd.cli:app"]},
)

"""The sdist and the wheel are complete, and the pages state the ranges of their metadata."""

import email
import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import raysgd
from raysgd._internal.versions import TESTED
from tests.conftest import run_python

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOLDERS = (".ci", "docs", "examples", "findings", "operators", "raysgd", "tests")


def build(source, folder, *options):
    """Build distributions of a source folder into a folder."""
    run_python("-m", "build", "--no-isolation", "--outdir", folder, *options, source)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the sources, because a build writes into its folder."""
    copy = tmp_path_factory.mktemp("sources")
    generated = shutil.ignore_patterns("__pycache__", "_build", "api")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=generated)
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="module")
def dist(sources):
    """A folder with an sdist, and with the wheel that was built from the sdist."""
    build(sources, sources / "dist")
    return sources / "dist"


def content(wheel):
    """Return the names and bytes of the files in a wheel, and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert len(names) == len(set(names))
        files = {name: archive.read(name) for name in names if ".dist-info/" not in name}
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        return files, email.message_from_bytes(archive.read(metadata))


def test_the_sdist_contains_every_file_of_the_repository(dist):
    if not (ROOT / ".git").exists():
        pytest.skip("only a clone knows which files belong to the repository")
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    [path] = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
        link = archive.getmember(f"{path.name.removesuffix('.tar.gz')}/raysgd/operators")
    assert {name for name in listed.split("\0") if name and (ROOT / name).exists()} <= inside
    assert link.linkname == "../operators"


def test_the_wheels_of_a_clone_and_of_an_sdist_contain_each_module_once(dist, sources, tmp_path):
    [of_sdist] = dist.glob("*.whl")
    files, _ = content(of_sdist)
    folders = {"raysgd": ROOT / "raysgd", "raysgd/operators": ROOT / "operators"}
    modules = {
        f"{name}/{path.relative_to(folder)}": path.read_bytes()
        for name, folder in folders.items()
        for path in folder.rglob("*.py")
    }
    script = ROOT / "raysgd/callbacks/report.js"
    others = {"raysgd/py.typed": b"", "raysgd/callbacks/report.js": script.read_bytes()}
    assert files == modules | others
    build(sources, tmp_path, "--wheel")
    [of_clone] = tmp_path.glob("*.whl")
    assert content(of_clone)[0] == files


def test_the_metadata_have_the_version_the_features_and_absolute_links(dist):
    _, metadata = content(next(dist.glob("*.whl")))
    assert metadata["Version"] == raysgd.__version__
    assert set(metadata.get_all("Provides-Extra")) == {
        *("torch", "tensorflow", "horovod", "tune", "data", "operators", "callbacks", "all"),
        *("lightning", "huggingface"),
    }
    links, in_readme = (
        re.findall(r"\]\(([^)]+)\)", text)
        for text in (metadata.get_payload(), (ROOT / "README.md").read_text(encoding="utf-8"))
    )
    assert len(links) == len(in_readme) > 40
    assert [link for link in links if not link.startswith("https://")] == []
    repository = PROJECT["urls"]["Repository"]
    assert f"{repository}/raw/main/docs/images/losses.svg" in links
    assert f"{repository}/blob/main/docs/elastic.md#what-is-promised" in links


def test_the_pages_state_the_ranges_of_the_package():
    extras = PROJECT["optional-dependencies"]
    required = [*PROJECT["dependencies"], *extras["torch"], *extras["tensorflow"]]
    ranges = dict(re.match(r"(\w+)(.*)", each).groups() for each in required)
    pythons = re.findall(r":: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    for name in ("README.md", "docs/install.md", "docs/versioning.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        stated = re.findall(r"`(\w+)([<>=!~]=?\d[^`]*)`", text)
        assert {"ray", "torch", "tensorflow", "numpy"} <= {package for package, _ in stated}, name
        assert [each for each in stated if ranges[each[0]] != each[1]] == [], name
        assert f"Python {pythons[0]} to {pythons[-1]}" in text, name


def test_the_table_of_tested_versions_spans_the_ranges_that_doctor_reports():
    text = (ROOT / "docs/versioning.md").read_text(encoding="utf-8")
    header, _, *rows = (
        [cell.strip() for cell in line.strip("| \n").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    )
    names = {"PyTorch": "torch"}
    for column, title in enumerate(header):
        if tested := TESTED.get(names.get(title, title if title == "Python" else title.lower())):
            shown = [re.findall(r"\d+", row[column]) for row in rows]
            versions = sorted(tuple(map(int, version)) for version in shown if version)
            for version, stated in zip((versions[0], versions[-1]), tested, strict=True):
                assert ".".join(map(str, version)).startswith(stated), title
    assert {"Python", "Ray", "PyTorch", "NumPy", "TensorFlow", "Horovod"} <= set(header)

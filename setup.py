"""What pyproject.toml cannot express: the long description, and the files of the sdist."""

import re
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent


class CompleteSdist(sdist):
    """Adds tests, docs, and examples to the sdist, so that the tests run in it."""

    def make_release_tree(self, base_dir, files):
        """Write the files of the sdist, and the link `raysgd/operators`, into a folder."""
        for folder in (".ci", "docs", "examples", "findings", "operators", "tests"):
            self.filelist.graft(folder)
        for name in (".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"):
            self.filelist.append(name)
        self.filelist.extend(path.name for path in ROOT.glob("constraints*.txt"))
        for folder in ("docs/_build", "docs/api", "raysgd/operators"):
            self.filelist.prune(folder)
        self.filelist.global_exclude("*.py[cod]")
        super().make_release_tree(base_dir, self.filelist.files)
        Path(base_dir, "raysgd", "operators").symlink_to("../operators")


def read_long_description():
    """Return the README with absolute links, because the package index has no files to link to."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"]
    text = re.sub(r"(!\[[^]]*\]\()(?!https?://)", rf"\1{repository}/raw/main/", text)
    return re.sub(r"(\]\()(?!https?://|#)", rf"\1{repository}/blob/main/", text)


setup(
    long_description=read_long_description(),
    long_description_content_type="text/markdown",
    cmdclass={"sdist": CompleteSdist},
)

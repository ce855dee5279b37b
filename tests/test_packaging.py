"""What is released: version, classifiers, the description on PyPI, and the workflows that do it."""

import re
from pathlib import Path

import pytest

import openrnn

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_has_one_home(project):
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/openrnn/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", openrnn.__version__)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {openrnn.__version__}\n" in citation


def test_the_description_on_pypi_stands_alone(project):
    """README as hatch-fancy-pypi-readme rewrites it has whole links and names the package."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for one in hook["substitutions"]:
        assert re.search(one["pattern"], text), one["pattern"]
        text = re.sub(one["pattern"], one["replacement"], text)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 10
    assert all(target.startswith("https://") for target in targets)
    assert sum("raw.githubusercontent.com" in target for target in targets) == 1  # the chart
    assert "pip install 'openrnn[cuda]'" in text
    assert "pip install openrnn " in text
    assert "pip install '." not in text
    assert "not on PyPI" not in text


def test_every_python_that_is_promised_is_tested(project):
    kinds = project["project"]["classifiers"]
    promised = {kind.rpartition(" ")[2] for kind in kinds if re.search(r"Python :: 3\.\d+$", kind)}
    assert project["project"]["requires-python"] == ">=3.10"
    assert min(promised, key=lambda version: int(version[2:])) == "3.10"
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    matrix = re.search(r"^        python: \[(.*)\]$", text, re.MULTILINE)
    assert set(re.findall(r"[\d.]+", matrix[1])) == promised


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_that_there_are(path):
    targets = set(re.findall(r"^([\w-]+(?: [\w-]+)*):", (ROOT / "Makefile").read_text(), re.M))
    targets = {word for line in targets for word in line.split()}
    used = re.findall(r"run: make (\w+)", path.read_text(encoding="utf-8"))
    assert used
    assert set(used) <= targets


def test_examples_inside_other_libraries_are_run():
    """Some that install a library, so that a change of ours which breaks one is noticed.

    A release of theirs is not, as requirements are pinned. Not all, as each takes CI minutes.
    """
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    names = re.findall(r"run: make example NAME=(\w+)$", text, re.MULTILINE)
    assert names
    for name in names:
        assert (ROOT / "examples" / f"{name}.py").is_file()
        assert (ROOT / "examples" / "requirements" / f"{name}.txt").is_file()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_one(path):
    """`check-jsonschema --builtin-schema vendor.github-workflows` says more."""
    yaml = pytest.importorskip("yaml", reason="comes with the packages of `make docs`")
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert found["permissions"] == {"contents": "read"}  # more only where a job asks for it
    for job in found["jobs"].values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step

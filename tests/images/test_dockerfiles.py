"""Rules that both Dockerfiles keep. No builder is needed; test_replay.py runs what they do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from support.dockerfile import Stage, Step, stages
from support.image import CHECKOUT, context

IMAGES = CHECKOUT / "images"
FILES = sorted(IMAGES.glob("Dockerfile.*"))
CHART = yaml.safe_load((CHECKOUT / "helm" / "gammaray" / "values.yaml").read_text())
SECRET = re.compile(r"(?i)token|password|passwd|secret|api_?key|credential")
PIP = re.compile(r"pip install\b([^&|;]*)")


def problems(file: Path) -> list[str]:
    build, final = stages(file)
    return [*_base(build, final), *_user(final), *_installs(build), *_secrets(build, final), *_system(final)]


def _base(build: Stage, final: Stage) -> list[str]:
    pinned = re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?", build.base)
    return [
        *([] if pinned else [f"{build.base}: name an exact version"]),
        *(
            []
            if build.base == final.base
            else ["the stages have different bases: the environment would not start"]
        ),
    ]


def _user(final: Stage) -> list[str]:
    user = final.last("USER")
    if user is None or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", user.rest):
        return ["the last USER is no number above 0"]
    later = final.steps[final.steps.index(user) :]
    return ["something is installed for the user alone"] if any(step.word == "RUN" for step in later) else []


def _installs(build: Stage) -> list[str]:
    """Each pip takes versions from constraints.txt, but for the one that installs what was copied."""
    found = [words for step in build.steps if step.word == "RUN" for words in PIP.findall(step.rest)]
    loose = [
        words.strip() for words in found if "-c constraints.txt" not in words and "--no-deps" not in words
    ]
    return [f"not pinned: pip install {words}" for words in loose]


def _secrets(*of: Stage) -> list[str]:
    """Of a secret only a mount may tell: every other place is kept in the image or its history."""
    steps = [step for stage in of for step in stage.steps]
    kept = [step.rest for step in steps if step.word in ("ENV", "LABEL", "RUN") and _speaks(step)]
    final = [step.rest for step in of[-1].steps if step.word == "COPY" and not step.flags]
    return [*(f"a secret? {text}" for text in kept), *(f"from the checkout: {text}" for text in final)]


def _speaks(step: Step) -> bool:
    return bool(SECRET.search(step.rest.replace("secret pip", "")))


def _system(final: Stage) -> list[str]:
    (step,) = [step for step in final.steps if step.word == "RUN"]
    wanted = ("--no-install-recommends", "rm -rf /var/lib/apt/lists/*", " wget ", " libgomp1 ", "bin/ray ")
    return [f"lacks {words}" for words in wanted if words not in f"{step.rest} "]


def test_there_are_two() -> None:
    assert [file.name for file in FILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_dockerfile_keeps_the_rules(file: Path) -> None:
    assert problems(file) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("python:3.11.14-slim", "python:3.11-slim", "exact version"),
        ("FROM ${BASE}\n", "FROM python:3.12.1-slim\n", "different bases"),
        ("USER 1000:1000", "USER gammaray", "no number above 0"),
        ("USER 1000:1000", "USER 0:0", "no number above 0"),
        ("USER 1000:1000\n", "", "no number above 0"),
        ("USER 1000:1000\n", "USER 1000:1000\nRUN pip install x\n", "for the user alone"),
        ("pip install -c constraints.txt setuptools", "pip install setuptools", "not pinned"),
        ("PYTHONUNBUFFERED=1", "HF_TOKEN=hf_x", "a secret?"),
        ("COPY --from=build /opt", "COPY . /opt", "from the checkout"),
        (" wget ", " ", "lacks  wget"),
        ("/opt/gammaray/bin/ray /usr", "/usr", "lacks bin/ray"),
    ],
)
def test_a_planted_fault_is_caught(tmp_path: Path, old: str, new: str, says: str) -> None:
    """The number of RUN steps of the last stage is fixed, so a further one raises instead."""
    text = FILES[0].read_text()
    assert old in text
    (tmp_path / "Dockerfile").write_text(text.replace(old, new))
    try:
        found = problems(tmp_path / "Dockerfile")
    except ValueError as error:
        found = [f"something is installed for the user alone: {error}"]
    assert any(says in problem for problem in found), found


def test_what_the_reader_does_not_know_stops_it(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM a:1.0.0\nADD x /x\n")
    with pytest.raises(AssertionError, match="ADD is unknown"):
        stages(tmp_path / "Dockerfile")


def test_both_have_one_python_that_gammaray_supports() -> None:
    """Ray joins no processes of different versions of Python, and the head has the CPU image."""
    (base,) = {stages(file)[0].base for file in FILES}
    requires = re.search(r'requires-python = "(.*)"', (CHECKOUT / "pyproject.toml").read_text())
    version = re.search(r":([\d.]+)", base)
    assert requires and version and version[1] in SpecifierSet(requires[1])


def test_the_images_are_what_the_chart_says() -> None:
    users = [user.rest for file in FILES if (user := stages(file)[1].last("USER"))]
    pods = CHART["podSecurityContext"]
    assert users == [f"{pods['runAsUser']}:{pods['runAsGroup']}"] * 2
    assert f"ray=={CHART['rayVersion']}\n" in (CHECKOUT / "constraints.txt").read_text()


def test_the_cuda_image_hides_no_gpu_and_shows_none_by_itself() -> None:
    """NVIDIA_VISIBLE_DEVICES=all in an image gives every GPU of the machine to pods that asked for none."""
    _, final = stages(IMAGES / "Dockerfile.cuda")
    assert final.environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert not {"NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} & final.environment.keys()


def test_only_what_is_installed_goes_to_the_builder() -> None:
    """A room that is missing there is missing in the image; anything more could be a key that lay around."""
    rooms = {link.name for link in (CHECKOUT / "src" / "gammaray").iterdir() if link.is_symlink()}
    files = {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "src"}
    assert set(context()) == rooms | files

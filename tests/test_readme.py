from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PROGRAMS = [
    (text, BLOCKS[index + 1]) for index, (kind, text) in enumerate(BLOCKS) if kind == "python"
]


@pytest.mark.parametrize(("program", "printed"), PROGRAMS)
def test_every_program_prints_what_the_readme_says(
    program: str, printed: tuple[str, str], tmp_path: Path
) -> None:
    kind, expected = printed
    assert kind == "text", "a program is followed by what it prints"
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={"PYTHONIOENCODING": "utf-8"},
        timeout=60,
        check=False,
    )
    assert run.stderr == ""
    assert run.stdout == expected


def test_the_bot_prints_what_the_readme_says(tmp_path: Path) -> None:
    (session,) = [text for kind, text in BLOCKS if kind == "console"]
    command, expected = session.split("\n", 1)
    typed = re.fullmatch(r"\$ printf '(.*)' \| make run", command)
    assert typed is not None
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", ROOT / "examples" / "bot.py"],
        cwd=tmp_path,
        input=typed[1].replace("\\n", "\n"),
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={"PYTHONIOENCODING": "utf-8"},
        timeout=60,
        check=False,
    )
    assert (run.stdout, run.stderr) == (expected, "")


def test_every_block_is_a_program_what_it_prints_or_commands() -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "text", "sh", "console"}
    assert len(PROGRAMS) == sum(kind == "text" for kind, _ in BLOCKS)


def test_every_command_is_a_target_that_make_help_lists() -> None:
    listed = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    commands = re.findall(r"^make (\w+)", "\n".join(t for k, t in BLOCKS if k == "sh"), re.M)
    assert commands == ["run", "test"]
    for target in [*commands, "check", "stress", "bench"]:
        assert re.search(rf"^make {target} ", listed, re.M)

"""The page on adding a model shows code as it is, and its example runs."""

import re
from pathlib import Path

import pytest

from mstar.models import ARCHITECTURES
from mstar.preprocess.processors import PROCESSORS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "adding.md").read_text("utf-8")
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
OF_FILES = [block for block in BLOCKS if re.match(r"# \S+\.py\n", block)]
DECODER_PART = PAGE[: PAGE.index("## A vision-language family")]
PATH = re.compile(r"`((?:mstar|tests)/[\w/]+\.py)`")


@pytest.mark.parametrize("block", OF_FILES, ids=lambda block: block.partition("\n")[0][2:])
def test_code_on_the_page_stands_in_the_file_that_it_names(block: str) -> None:
    name, _, code = block.partition("\n")
    assert code in (ROOT / name[2:]).read_text("utf-8")


def test_every_file_that_the_page_names_is_there() -> None:
    found = set(PATH.findall(PAGE))
    assert len(found) > 10
    assert [name for name in sorted(found) if not (ROOT / name).is_file()] == []


def test_decoder_only_family_takes_less_than_60_lines() -> None:
    blocks = [block for block in BLOCKS if block in DECODER_PART]
    assert len(blocks) == 4
    assert sum(len(block.splitlines()) for block in blocks) < 60
    (whole,) = (block for block in blocks if block.startswith("# mstar/models/smollm3.py\n"))
    assert whole.partition("\n")[2] == (ROOT / "mstar/models/smollm3.py").read_text("utf-8")


def test_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = (block for block in BLOCKS if block not in OF_FILES)
    exec(compile(example, "docs/adding.md", "exec"), {})
    assert (tmp_path / "tiny" / "model.safetensors").is_file()


def test_vision_language_families_take_less_than_400_lines() -> None:
    table = PAGE[PAGE.index("| family |") : PAGE.index("Each is below 400 lines")]
    rows = [PATH.findall(line) for line in table.splitlines()]
    counted = [row for row in rows if row]
    assert len(counted) == 2
    for model, processor in counted:
        lines = [len((ROOT / name).read_text("utf-8").splitlines()) for name in (model, processor)]
        assert sum(lines) < 400, (model, lines)
        module = model.removesuffix(".py").replace("/", ".")
        (architecture, *_) = [name for name, own in ARCHITECTURES.items() if own == module]
        own = processor.removesuffix(".py").replace("/", ".")
        assert PROCESSORS[architecture] == own

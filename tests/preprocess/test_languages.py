"""Languages by code and by name, against the table of transformers."""

import pytest
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from mstar.preprocess.languages import language_code, language_name


def test_codes_have_the_names_that_transformers_gives_them() -> None:
    assert {code: language_name(code) for code in LANGUAGES} == LANGUAGES


def test_names_and_other_names_have_their_codes() -> None:
    assert {name: language_code(name) for name in TO_LANGUAGE_CODE} == TO_LANGUAGE_CODE


@pytest.mark.parametrize(
    ("given", "code"), [("German", "de"), (" DE ", "de"), ("english", "en"), ("Klingon", "klingon")]
)
def test_case_does_not_matter_and_the_unknown_stay(given: str, code: str) -> None:
    assert language_code(given) == code


def test_a_code_without_a_name_stands_for_itself() -> None:
    assert language_name("tlh") == "tlh"

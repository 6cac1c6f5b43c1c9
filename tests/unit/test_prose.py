"""The prose check of `make lint`: every rule finds its pattern, and leaves good sentences alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import prose  # noqa: E402

FOUND = [
    "The command goes on where it was.",
    "Forty requests are under way.",
    "The key stands twice in the file.",
    "The table has our scores beside theirs.",
    "The seed draws everything anew.",
    "The world has cities, of which two are named.",
    "It shows what was understood.",
    "A shard is read as far as memory reaches.",
    "A model's text is no request.",
    "The sections of all rooms are joined.",
    "The table has mempipe and its peers.",
    "References are told too dear.",
    "The question is left out.",
    "The token lies in a file.",
    "The engine is told the new version.",
    "A fault of the machinery is retried.",
    "A folder is written whole or not at all.",
    "A tool of your own is loaded.",
    "A message while nobody listens.",
    "Refused for want of an index.",
    "Measured on quiet cores.",
    "All siblings share the prefix.",
    "The aim is 0.85.",
    "The arm with recalls is better.",
    "Tells whether the file is whole.",
    "The report makes of it a table.",
    "Given so many times the rows.",
]
GOOD = [
    "The command resumes where it was interrupted.",
    "There is no other file, and there is no longer a lock.",
    "The acronym stands for retrieval, and the key is listed once.",
    "The option `--peer-positions` repeats the published positions.",
    'Ask "What is the capital of Peru?" in the page.',
    "Room for four copies of the weights is left.",
    "A number stands-in test.",
]


@pytest.mark.parametrize("sentence", FOUND)
def test_a_rule_finds_its_pattern(sentence):
    assert list(prose.check_text(sentence))


def test_every_rule_has_a_sentence_that_only_it_finds():
    used = {advice for sentence in FOUND for _, advice in prose.check_text(sentence)}
    assert used == set(prose.WORDS.values()) and len(FOUND) >= len(prose.WORDS)


@pytest.mark.parametrize("sentence", GOOD)
def test_a_good_sentence_is_left_alone(sentence):
    assert not list(prose.check_text(sentence))


def test_long_sentences_and_openings_without_a_noun_are_found_in_paragraphs_only():
    long = "One " + "word and " * prose.MAX_WORDS + "end."
    assert [advice for _, advice in prose.check_text(long, prose=True)] == ["62 words; make two sentences"]
    assert list(prose.check_text("They are restarted.", prose=True))
    assert not list(prose.check_text(long)) and not list(prose.check_text("They are restarted."))
    short = "One word. " * prose.MAX_WORDS
    assert not list(prose.check_text(short, prose=True))


def test_a_markdown_file_is_read_without_its_code_and_names_the_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Goes on\n\nA run that is killed\ngoes on.\n\n```\nit goes on\n```\n\n| a | goes on |\n\n- x `goes on`\n"
    )
    assert [line.split(":")[1] for line in prose.check_file(page)] == ["3", "10"]


def test_help_texts_messages_settings_and_docstrings_of_a_module_are_read(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""It goes on here."""\n'
        "class Settings:\n"
        "    size: int = 1\n"
        '    """The run goes on with it."""\n'
        "def f(x, add, say):\n"
        '    """Says that the loop goes on."""\n'
        "    add(help='the run goes on')\n"
        "    say(f'{x} goes on with {x}')\n"
        "    return 'goes on'  # one goes on\n"
    )
    assert sorted(int(line.split(":")[1]) for line in prose.check_file(module)) == [1, 4, 6, 7, 8, 9]


def test_a_docstring_begins_with_a_noun_or_a_verb(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('"""What a run needs of its machines. It has two parts."""\nASKED = "What does it need?"\n')
    assert [line.split(":")[1] for line in prose.check_file(module)] == ["1"]


def test_a_conflict_of_a_merge_is_found_in_a_docstring(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('"""Reads.\n\n<<<<<<< HEAD\nOne.\n=======\nTwo.\n>>>>>>> ea09db9 (two)\n"""\n')
    found = [line.split(":")[1] for line in prose.check_file(module) if "conflict" in line]
    assert found == ["3", "7"]


def test_comments_of_a_config_are_read_across_lines(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("# The run goes\n# on here.\nname: goes on  # a good comment\nsize: 1  # what is needed\n")
    assert [line.split(":")[1] for line in prose.check_file(config)] == ["1", "4"]


def test_the_exit_code_tells_of_findings(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("All is well.\n")
    assert prose.main([str(page)]) == 0 and not capsys.readouterr().out
    page.write_text("All goes on.\n")
    assert prose.main([str(page)]) == 1 and "resumes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("docstring", "found"),
    [("The gap of two scorings.", 1), ("Seconds of a pass.", 1), ("Returns the gap.", 0), ("Is called last.", 0)],
)
def test_the_docstring_of_a_function_begins_with_a_verb(docstring, found):
    source = f'def gap():\n    """{docstring}"""\n'
    assert len(list(prose.without_verb(source))) == found
    assert not list(prose.without_verb(f"@router.get('/gap')\n{source}")), "a route's docstring is a text of the API"
    assert not list(prose.without_verb(source.replace("gap()", "__init__(self)"))), "it describes the parameters"

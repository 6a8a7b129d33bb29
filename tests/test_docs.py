"""The documents are true: their links, files, flags, tests and commands exist."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator

import pytest

from tests import documents
from tests.documents import ROOT, Document, read_documents
from tools import plot_schedules

DOCUMENTS = read_documents()
RULES = (
    documents.links, documents.files, documents.flags, documents.tests, documents.commands,
)  # fmt: skip
DATED = "benchmarks/results/"  # true at the commit that they name; only their links are checked
LONG_DECISIONS = ("0035",)  # that of the mechanisms, which is the design of the whole

# What the field has other words for: local SGD, replica, outer step, global parameters, ...
NOT_THE_FIELDS_WORDS = {
    r"every so[- ]many(th)?|so[- ]manyth|so many(?= steps)": "every n-th, every n steps",
    r"steps? alone|stepp(ed|ing) alone|local steps": "local SGD, DiLoCo",
    r"com(e|es|ing) and go|nodes? that (come|join|ends?)\b": "replicas that join and leave",
    r"those who (begin|come|are)|who has come": "initial members, members, quorum",
    r"how far (they|nodes|replicas) (have )?c[ao]me": "pseudo-gradient",
    r"agreed (weights|parameters)": "global parameters",
    r"st(eps|ep) of codes|code steps": "incremental weight updates",
    r"experts that (the )?ranks|what (the )?experts (have )?made of": "expert parallelism, combine",
    r"(starts?|begins?|began) anew": "is reset",
    r"at both ends": "embeddings, tied embeddings",
}


@pytest.fixture(autouse=True)
def in_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_document_keeps_the_rule(rule: Callable[[Document], Iterator[str]]) -> None:
    problems = [
        f"{document.path}:{problem}"
        for document in DOCUMENTS
        if rule is documents.links or DATED not in document.path
        for problem in rule(document)
    ]
    assert not problems, "\n".join(problems)


def test_all_documents_and_their_commands_are_seen() -> None:
    paths = {document.path for document in DOCUMENTS}
    assert {"README.md", "CONTRIBUTING.md", "docs/pretraining.md", "docs/launching.md"} <= paths
    programs = [words[0] for document in DOCUMENTS for _, words in document.commands()]
    assert {"make", "python", "torchrun", "zeropp", "sbatch"} <= set(programs)
    assert len(programs) > 15
    assert sum(len(list(document.spans())) for document in DOCUMENTS) > 200


@pytest.mark.parametrize(
    ("rule", "text", "message"),
    [
        (documents.links, "[here](no/such.md)", "1: the link no/such.md leads nowhere"),
        (documents.links, "\n[here](#nothing)", "2: README.md has no heading #nothing"),
        (documents.files, "see `zeropp/nothing.py`", "there is no zeropp/nothing.py"),
        (documents.files, "see `optim/nothing.py`", "no file is called optim/nothing.py"),
        (documents.flags, "with `--no-such-flag 3`", "no program here has --no-such-flag"),
        (documents.tests, "`test_that_nobody_wrote`", "there is no test test_that_nobody_wrote"),
        (documents.commands, "```sh\nmake nothing\n```", "the Makefile has no nothing"),
        (documents.commands, "`make test ARRGS=1`", "the Makefile has no ARRGS"),
        (documents.commands, "```\npython tools/nothing.py\n```", "no script tools/nothing.py"),
        (
            documents.commands,
            "```sh\npython tools/consolidate.py --load a \\\n    --outputt b\n```",
            "did you mean --output?",
        ),
        (documents.commands, "`zeropp --num_rank 4 pretrain_gpt.py`", "unknown option --num_rank"),
        (documents.commands, "`zeropp pretrain_gpt.py --zero-stage 5`", "--zero-stage 5"),
        (
            documents.commands,
            "```sh\ntorchrun --nproc-per-node 8 pretrain_gpt.py \\\n  --global-batch-size 12\n```",
            "12 is not divisible",
        ),
        (documents.commands, "`torchrun --nproc-per-nodes 8 pretrain_gpt.py`", "arguments"),
        (documents.commands, "`megatron-zpp nothing --x`", "megatron-zpp has no command nothing"),
        (
            documents.commands,
            "`zeropp -m megatron_zpp.commands merge --inputt x`",
            "did you mean --input?",
        ),
        (
            documents.commands,
            "`torchrun -m megatron_zpp.commands pretrain --fp8`",
            "unknown flag --fp8",
        ),
        (documents.commands, "`python -m pytest tests/nothing.py`", "no tests/nothing.py"),
        (documents.commands, "`sbatch examples/nothing.sh`", "no script examples/nothing.sh"),
        (documents.commands, "`python -m benchmarks.nothing --json f`", "no script benchmarks/no"),
        (documents.commands, "`python -m benchmarks.step.train_step --speed 3`", "has no --speed"),
    ],
)
def test_a_wrong_text_is_reported(rule: Callable, text: str, message: str) -> None:
    problems = list(rule(Document("README.md", text)))
    assert len(problems) == 1 and message in problems[0], problems


def test_a_right_text_is_not_reported() -> None:
    text = (
        "[a](docs/pretraining.md#learning-rate) `zeropp/deepspeed/zero.py` `optim/step_or_skip.py` "
        "`--zero_stage 3` `make pretrain RANKS=2` `zeropp pretrain_gpt.py ...` `https://a.b/c`\n"
    )
    assert not [line for rule in RULES for line in rule(Document("README.md", text))]


def prose(document: Document) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, without code, keys, flags, quotations and links' targets."""
    text = documents.FENCED.sub(lambda block: "\n" * block[0].count("\n"), document.text)
    for found in re.finditer(r"\|.*|(?:[^\n|].*\n?)+", text):
        line, paragraph = text.count("\n", 0, found.start()) + 1, found[0]
        for spared in (documents.SPAN, re.compile(r'"[^"\n]*"'), documents.LINK):
            paragraph = spared.sub(" ", paragraph)
        yield line, " ".join(paragraph.split())


def words_of_ours(document: Document) -> Iterator[str]:
    """Phrases for which the field has words."""
    for line, text in prose(document):
        for pattern, words in NOT_THE_FIELDS_WORDS.items():
            for match in re.finditer(pattern, text, re.IGNORECASE):
                yield f"{line}: '{match[0]}' is called {words}"


def test_the_documents_use_the_fields_words() -> None:
    problems = [
        f"{document.path}:{problem}"
        for document in DOCUMENTS
        if document.path.startswith(("README", "CHANGELOG", "CONTRIBUTING", "docs/"))
        for problem in words_of_ours(document)
    ]
    assert not problems, "\n".join(problems)


def test_the_code_uses_the_fields_words() -> None:
    rooms = (ROOT / room for room in ("zeropp", "megatron_zpp", "csrc"))
    paths = [path for room in rooms for path in room.rglob("*.*")]
    paths = [path for path in paths if path.suffix in (".py", ".pyi", ".toml", ".cpp", ".cu", ".h")]
    texts = {path: " ".join(re.sub(r'"\s*f?"', "", path.read_text()).split()) for path in paths}
    problems = [
        f"{path}: '{match[0]}' is called {words}"
        for path, text in texts.items()
        for pattern, words in NOT_THE_FIELDS_WORDS.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]
    assert len(paths) > 400 and not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Nodes that step alone\nmeet.", "1: 'step alone' is called local SGD"),
        ("\n\nAll rows in every\nso-manyth step", "3: 'every so-manyth' is called every n-th"),
        ("| a | b |\n|---|---|\n| their agreed weights | |", "3: 'agreed weights' is called"),
    ],
)
def test_a_word_of_ours_is_reported(text: str, message: str) -> None:
    problems = list(words_of_ours(Document("README.md", text)))
    assert len(problems) == 1 and problems[0].startswith(message), problems


def test_keys_flags_names_and_the_fields_words_are_not_reported() -> None:
    text = (
        "`zeropp.local_steps`, `examples/ds_local_steps_two_nodes.json`, `--local steps`, a step, "
        "[results](benchmarks/results/2026-11-25-nodes-come-and-go.md), steps of the optimizer, "
        "so many bytes, one rank alone\n\n```sh\n# local steps\n```\n"
    )
    assert not list(words_of_ours(Document("README.md", text)))


def test_what_a_newcomer_looks_for_is_found_where_one_looks() -> None:
    pages = {document.path: document.text.lower() for document in DOCUMENTS}
    for path, words in {
        "README.md": ("diloco", "quorum", "elastic", "expert parallelism", "dispatch", "combine"),
        "docs/index.md": ("diloco", "quorum", "elastic", "expert parallelism", "dispatch"),
        "docs/local_sgd.md": ("local sgd", "diloco", "quorum", "elastic", "pseudo-gradient"),
        "docs/moe.md": ("expert parallelism", "dispatch", "combine"),
    }.items():
        assert [word for word in words if word not in pages[path]] == [], path


def test_decisions_that_the_code_refers_to_exist_and_are_short() -> None:
    records = {path.name[:4]: path for path in (ROOT / "docs/adr").glob("*.md")}
    folders = [ROOT / name for name in ("zeropp", "megatron_zpp", "tools")]
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for number in re.findall(r"docs/adr/(\d{4})", path.read_text()):
            assert number in records, f"{path}: docs/adr/{number} does not exist"
    for number, path in records.items():
        text = path.read_text()
        if number not in LONG_DECISIONS:
            assert len(text.splitlines()) <= 40 and len(text.split()) <= 400, path
        assert text.startswith(f"# {int(number)}. "), path
        assert all(f"## {part}" in text for part in ("Context", "Decision", "Consequences")), path


def test_files_in_the_figure_of_the_architecture_exist() -> None:
    figure = ElementTree.parse(ROOT / "docs/architecture.svg").getroot()
    assert float(figure.get("width")) <= 1000
    words = [word for text in figure.itertext() for word in text.split()]
    names = [word for word in words if word.endswith(".py") and "{" not in word]
    assert len(names) > 12
    assert [name for name in names if not documents._exists(name)] == []


def test_the_figure_of_the_schedules_is_what_runs() -> None:
    assert (ROOT / "docs/schedules.svg").read_text() == plot_schedules.draw()

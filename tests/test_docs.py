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


def test_decisions_that_the_code_refers_to_exist_and_are_short() -> None:
    records = {path.name[:4]: path for path in (ROOT / "docs/adr").glob("*.md")}
    folders = [ROOT / name for name in ("zeropp", "megatron_zpp", "tools")]
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for number in re.findall(r"docs/adr/(\d{4})", path.read_text()):
            assert number in records, f"{path}: docs/adr/{number} does not exist"
    for number, path in records.items():
        text = path.read_text()
        assert len(text.splitlines()) <= (40 if number != "0035" else 90), path  # it has fields
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

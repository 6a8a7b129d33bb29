"""Checks of the project's Markdown: links, files, flags, tests and commands.

Each rule takes a `Document` and yields `line: problem`. Nothing is run; commands are parsed by the
parsers of the programs that they call.
"""

import contextlib
import functools
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.run import get_args_parser

from megatron_zpp.commands import generate_text
from megatron_zpp.commands.__main__ import COMMANDS
from megatron_zpp.commands.consolidate import ConsolidateConfig
from megatron_zpp.commands.convert_hf import ConvertConfig
from megatron_zpp.commands.dump_samples import DumpConfig
from megatron_zpp.commands.evaluate import PERPLEXITY_SECTIONS, TASK_SECTIONS
from megatron_zpp.commands.inspect_dataset import InspectConfig
from megatron_zpp.commands.merge_datasets import MergeConfig
from megatron_zpp.commands.plan import PlanFlags
from megatron_zpp.preprocess import PreprocessConfig, preprocess_config
from megatron_zpp.settings.arguments import FLAG_SECTIONS, VOCABULARY, parse
from megatron_zpp.settings.command_line import read, split_flags, vocabulary
from megatron_zpp.settings.config import DataConfig, TokenizerConfig
from megatron_zpp.settings.flags_without_effect import flags_without_effect
from megatron_zpp.settings.gpt.shape_flags import ShapeFlags
from tools.fetch_model import FetchConfig
from zeropp.errors import InputError
from zeropp.ranks.launcher.options import parse as parse_launcher

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"zeropp", "megatron_zpp", "tests", "tools", "docs", "examples", "benchmarks", ".ci"}
GENERATED = (".", "runs", "build", "dist")  # prefixes of folders without documents of ours
PROGRAMS = ("make", "python", "torchrun", "zeropp", "megatron-zpp", "sbatch")
START_PAGES = ("docs/start_megatron.md", "docs/start_trainer.md", "docs/start_deepspeed.md")
PRETRAIN = ("pretrain_gpt.py", "pretrain_zeropp_gpt.py", "finetune_gpt.py")
SECTIONS = {
    "tools/preprocess_data.py": (PreprocessConfig, TokenizerConfig),
    "tools/consolidate.py": (ConsolidateConfig,),
    "tools/convert_hf.py": (ConvertConfig, TokenizerConfig, ShapeFlags),
    "tools/evaluate.py": PERPLEXITY_SECTIONS,
    "tools/fetch_model.py": (FetchConfig,),
    "tools/dump_samples.py": (DumpConfig, DataConfig, TokenizerConfig),
    "tools/generate.py": generate_text.SECTIONS,
    "tools/inspect_dataset.py": (InspectConfig, TokenizerConfig),
    "tools/merge_datasets.py": (MergeConfig,),
    "tools/plan.py": (PlanFlags, *FLAG_SECTIONS),
}
IDLE = {"tools/preprocess_data.py": preprocess_config.IDLE, "tools/plan.py": flags_without_effect()}
GPUS = 8  # of the machine, for a launcher without a number of ranks
LM_EVAL_FLAGS = {
    "--tasks", "--num-fewshot", "--apply-chat-template", "--output-path", "--log-samples",
}  # fmt: skip
OTHER_FLAGS = {"--help", "--array"} | LM_EVAL_FLAGS  # of every program, Slurm, lm-eval

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
FILE = re.compile(r"[\w./-]+\.(?:py|md|json|svg|sh|toml)|[\w./-]+/")


@dataclass(frozen=True)
class Document:
    """A Markdown file: its path in the clone and its text."""

    path: str
    text: str

    def line_of(self, position: int) -> int:
        """The line number of a character position, from 1."""
        return self.text.count("\n", 0, position) + 1

    def spans(self) -> Iterator[tuple[int, str]]:
        """(line, code) of every `code` outside of code blocks."""
        prose = FENCED.sub(lambda block: "\n" * block[0].count("\n"), self.text)
        for match in SPAN.finditer(prose):
            yield prose.count("\n", 0, match.start()) + 1, match[1]

    def commands(self) -> Iterator[tuple[int, list[str]]]:
        """(line, words) of every call of one of `PROGRAMS`, in blocks and in sentences."""
        found = [
            (line, shlex.split(span, comments=True))
            for line, span in self.spans()
            if Path(span.split(" ")[0]).name in PROGRAMS
        ]
        for block in FENCED.finditer(self.text):
            if block[1] in ("", "sh", "bash"):
                first = self.line_of(block.start()) + 1
                found += [(first, words) for words in split_commands(block[2])]
        for line, words in found:
            if Path(words[0]).name in PROGRAMS and len(words) > 1:
                yield line, words

    def steps(self) -> Iterator[tuple[list[str], str]]:
        """(words, input) of what a reader types, in order: the commands of `sh` blocks, and files.

        A block after a line that has a file's name as its last `code` and ends with a colon is that
        file: `cat > NAME`, with the block as input.
        """
        for block in FENCED.finditer(self.text):
            before = self.text[: block.start()].rstrip().rpartition("\n")[2]
            names = SPAN.findall(before)
            if block[1] == "sh":
                yield from ((words, "") for words in split_commands(block[2]))
            elif before.endswith(":") and names and FILE.fullmatch(names[-1]):
                yield ["cat", ">", names[-1]], block[2]


def split_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block, whose quotes may go over several lines."""
    command = ""
    for line in text.replace("\\\n", " ").splitlines(keepends=True):
        command += line
        with contextlib.suppress(ValueError):  # a quotation is still open
            words = shlex.split(command, comments=True)
            command = ""
            if words:
                yield words


def read_documents() -> list[Document]:
    """Every Markdown file of the clone."""
    paths = (path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.md")))
    ours = [path for path in paths if not path.parts[0].startswith(GENERATED)]
    return [Document(str(path), (ROOT / path).read_text()) for path in ours]


def links(document: Document) -> Iterator[str]:
    """Links to files and headings that do not exist."""
    for match in LINK.finditer(document.text):
        target, _, anchor = match[1].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (ROOT / document.path).parent / target if target else ROOT / document.path
        line = document.line_of(match.start())
        if not path.exists():
            yield f"{line}: the link {match[1]} leads nowhere"
        elif anchor and anchor not in _anchors(path.read_text()):
            yield f"{line}: {target or document.path} has no heading #{anchor}"


def files(document: Document) -> Iterator[str]:
    """Names of the project's files that do not exist."""
    own = [words[-1] for words, _ in document.steps() if words[0] == "cat"]
    for number, span in document.spans():
        if not FILE.fullmatch(span) or span in own:
            continue
        has_folder = span.split("/")[0] in FOLDERS
        if has_folder and not (ROOT / span).exists():
            yield f"{number}: there is no {span}"
        elif not has_folder and span.endswith(".py") and not _exists(span):
            yield f"{number}: no file is called {span}"


def flags(document: Document) -> Iterator[str]:
    """Flags in sentences that no program of the project has."""
    for number, span in document.spans():
        for flag in FLAG.findall(span):
            if flag.replace("_", "-") not in known_flags():
                yield f"{number}: no program here has {flag}"


def tests(document: Document) -> Iterator[str]:
    """Names of tests that do not exist."""
    for number, span in document.spans():
        if re.fullmatch(r"test_\w+", span) and span not in _test_names():
            yield f"{number}: there is no test {span}"


def commands(document: Document) -> Iterator[str]:
    """Commands that their programs would reject; test_examples.py runs those of `START_PAGES`."""
    for number, words in () if document.path in START_PAGES else document.commands():
        reason = problem(words)
        if reason:
            yield f"{number}: {' '.join(words)[:60]}: {reason}"


def problem(words: Sequence[str]) -> str | None:
    """Why a command, typed in the root of the clone, would be rejected; None if it would not."""
    program, arguments = Path(words[0]).name, [word for word in words[1:] if word != "..."]
    if program == "make":
        return _make(arguments)
    if program == "sbatch":
        return None if (ROOT / arguments[-1]).is_file() else f"no script {arguments[-1]}"
    if program == "python" and arguments[:2] == ["-m", "pytest"]:
        missing = [word for word in arguments[2:] if "/" in word and not (ROOT / word).exists()]
        return f"no {missing[0]}" if missing else None
    if program == "python" and arguments[:1] == ["-m"]:
        arguments = arguments[1:]
    try:
        if program == "zeropp" and parse_launcher(arguments).keep_store is not None:
            return None  # it starts no script
        script, arguments, ranks = _launched(program, arguments)
        return _script(script, arguments, ranks)
    except (InputError, SystemExit) as error:
        return str(error)


@functools.cache
def known_flags() -> frozenset[str]:
    """All flags of all programs of the project, with dashes instead of underscores."""
    words = set(VOCABULARY)
    for script, sections in SECTIONS.items():
        words |= set(vocabulary(sections, IDLE.get(script, ())))
    own = {f"--{word}" for word in words} | OTHER_FLAGS
    sources = [ROOT / "zeropp/ranks/launcher/options.py", *ROOT.glob("benchmarks/**/*.py")]
    sources += ROOT.glob("tools/*.py")
    for path in sources:
        own |= set(re.findall(r'"(--[\w-]+)"', path.read_text()))
    own |= set(get_args_parser()._option_string_actions)
    return frozenset(flag.replace("_", "-") for flag in own)


def _launched(program: str, arguments: list[str]) -> tuple[str, list[str], int]:
    """The script that a launcher starts, its arguments, and the number of ranks."""
    if program == "megatron-zpp":
        return *_script_of_command(arguments), 1
    if program == "python":
        return arguments[0], arguments[1:], 1
    if program == "zeropp":
        options = parse_launcher(arguments)
        if not options.command:
            raise InputError("no script given")
        ranks = options.num_ranks or options.num_gpus or GPUS
        if options.module and options.command[0] == "megatron_zpp.commands":
            return *_script_of_command(options.command[1:]), ranks
        return options.command[0], options.command[1:], ranks
    with contextlib.redirect_stderr(io.StringIO()) as output:
        try:
            options = get_args_parser().parse_args(arguments)
        except SystemExit:
            raise InputError(output.getvalue().strip().splitlines()[-1]) from None
    ranks = int(options.nnodes.split(":")[-1]) * int(options.nproc_per_node)
    if options.module and options.training_script == "megatron_zpp.commands":
        return *_script_of_command(options.training_script_args), ranks
    return options.training_script, options.training_script_args, ranks


def _script_of_command(arguments: list[str]) -> tuple[str, list[str]]:
    """The script that calls the same function as a command of `megatron-zpp`, and its arguments."""
    name = arguments[0] if arguments else ""
    if name in ("pretrain", "finetune"):
        return f"{name}_gpt.py", arguments[1:]
    if name not in COMMANDS:
        raise InputError(f"megatron-zpp has no command {name}")
    module = COMMANDS[name].module.rpartition(".")[2]
    return f"tools/{module.removesuffix('_text')}.py", arguments[1:]


def _script(script: str, arguments: list[str], ranks: int) -> str | None:
    if script.startswith("benchmarks."):  # a module
        script = script.replace(".", "/") + ".py"
    if not (ROOT / script).is_file():
        return f"no script {script}"
    script = str((ROOT / script).relative_to(ROOT))
    if any(word in ("-h", "--help") for word in arguments):
        return None
    if "--tasks" in arguments:
        arguments = split_flags(arguments, vocabulary(TASK_SECTIONS), short=True)[0]
    if script in PRETRAIN:
        parse(arguments, ranks)
    elif script in SECTIONS:
        read(arguments, vocabulary(SECTIONS[script], IDLE.get(script, ())))
    else:
        for flag in FLAG.findall(" ".join(arguments)):
            if not _mentions((ROOT / script).parent, flag):
                return f"{script} has no {flag}"
    return None


def _make(arguments: Sequence[str]) -> str | None:
    makefile = (ROOT / "Makefile").read_text()
    for word in arguments:
        name, is_variable, _ = word.partition("=")
        pattern = rf"^{re.escape(name)} *\?=" if is_variable else rf"^{re.escape(name)}:"
        if not re.search(pattern, makefile, re.MULTILINE):
            return f"the Makefile has no {name}"
    return None


def _mentions(folder: Path, flag: str) -> bool:
    """Whether the programs of a folder contain a flag, or the name of its field."""
    name = flag.removeprefix("--")
    pattern = rf"[\"'](--)?{re.escape(name)}[\"']|\b{re.escape(name.replace('-', '_'))}\b *[:=]"
    paths = [*folder.glob("*.py"), *folder.parent.glob("shared/*.py")]
    return any(re.search(pattern, path.read_text()) for path in paths)


def _exists(name: str) -> bool:
    return any(path == name or path.endswith(f"/{name}") for path in _python_files())


@functools.cache
def _python_files() -> frozenset[str]:
    top = [path for path in ROOT.glob("*.py")]
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return frozenset(str(path.relative_to(ROOT)) for path in [*top, *below])


@functools.cache
def _test_names() -> frozenset[str]:
    texts = (path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    names = {name for text in texts for name in re.findall(r"^def (test_\w+)\(", text, re.M)}
    return frozenset(names)


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

"""The flags that Megatron's programs have, each given as its example scripts may give it.

`tests/data/megatron_flags.tsv` lists the flags of Megatron-LM and Megatron-DeepSpeed: how often
their example scripts use each, the type of its value, whether only mixtures of experts have it, a
value, and what stands beside it.
"""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_zpp.settings.arguments import FLAG_SECTIONS, VOCABULARY, parse
from megatron_zpp.settings.command_line import vocabulary
from megatron_zpp.settings.config import SECTIONS
from megatron_zpp.settings.flags_without_effect import (
    flags_without_effect,
    refused_flags,
    what_is_missing,
)
from tests.megatron_zpp.settings.tables import fork_flags, rows
from zeropp.errors import InputError
from zeropp.settings.schema import settings_of

PACKAGE = Path(__file__).parents[3] / "megatron_zpp"
SWITCHES = ("flag", "StoreFalse", "BooleanOptional", "Help")
OF_TYPE = {"int": "2", "float": "0.5", "bool": "true"}
NO_BIAS = ["--disable-bias-linear"]
EXPERTS = (["--num-experts", "4", *NO_BIAS], NO_BIAS)  # beside flags of experts
# Spellings without the slip of Megatron's, and flags of its older versions.
OTHER_NAMES = {
    "check-for-nan-in-loss-and-grad", "contiguous-checkpointing", "use-legacy-models",
    "zero-contiguous-gradients",
}  # fmt: skip
OF_OTHER_PROGRAMS = {"from-checkpoint", "to-megatron", "to-hf", "max-restarts"}
# Accepted with the default as the only value, which is what the programs do.
ONLY_DEFAULT = {"--optimizer"}


@dataclass(frozen=True, kw_only=True)
class Use:
    """A flag of Megatron's: how often scripts use it, and the type that it has there."""

    flag: str
    count: int
    type: str
    of_experts: bool
    values: list[str]  # that a script gives, where not any value of the type will do
    beside: str  # what else stands in a script that gives the flag


USES = [
    Use(
        flag=row["flag"], count=int(row["uses"]), type=row["type"],
        of_experts=row["experts"] == "yes", values=row["value"].split(), beside=row["beside"],
    )
    for row in rows("megatron_flags.tsv")
]  # fmt: skip
KNOWN = VOCABULARY
LIVE = vocabulary(FLAG_SECTIONS)


def plain(flag: str) -> str:
    return flag[2:].replace("_", "-")


def words_of(use: Use, folder: Path) -> tuple[list[str], list[str]]:
    """The flag with a value, and what stands beside it."""
    beside = use.beside.replace("FOLDER", str(folder)).split()
    if use.of_experts:
        beside += EXPERTS[use.flag == "--num-experts"]
    if use.flag == "--deepspeed_config":
        file = folder / "ds.json"
        file.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
        return [use.flag, str(file)], beside
    if use.type in SWITCHES:
        return [use.flag], beside
    meaning = KNOWN.get(plain(use.flag))
    values = use.values
    if not values and meaning is not None and meaning.flag.choices:
        others = [each for each in meaning.flag.choices if each != meaning.flag.default]
        values = [meaning.flag.text((others or meaning.flag.choices)[0])]
    if not values:
        values = [OF_TYPE.get(use.type, "x")]
        if meaning is not None and isinstance(meaning.flag.count, int):
            values *= meaning.flag.count
    return [use.flag, *values], beside


def refusal_of(use: Use, folder: Path) -> str | None:
    """The error for the flag, None if it is accepted."""
    own, beside = words_of(use, folder)
    try:
        parse(own + beside, 2)
    except InputError as error:
        return str(error)
    return None


def accepted_share(uses: list[Use], folder: Path) -> float:
    """The share of uses that belong to flags which the parser accepts."""
    accepted = sum(use.count for use in uses if refusal_of(use, folder) is None)
    return accepted / sum(use.count for use in uses)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the files that flags name."""
    return tmp_path_factory.mktemp("flags")


@pytest.mark.parametrize(("of_experts", "least", "wanted"), [(False, 4000, 0.9), (True, 150, 0.95)])
def test_most_uses_are_accepted(of_experts, least, wanted, folder):
    """Those of experts beside experts: a dense model would accept those that have no effect."""
    uses = [use for use in USES if use.of_experts == of_experts and use.type != "Help"]
    assert sum(use.count for use in uses) > least
    share = accepted_share(uses, folder)
    assert share >= wanted, f"{share:.4f} of the uses in example scripts are accepted"


@pytest.mark.parametrize(
    "use", [use for use in USES if plain(use.flag) in KNOWN], ids=lambda use: use.flag
)
def test_a_known_flag_has_an_effect_or_says_why_not(use, folder, caplog):
    own, beside = words_of(use, folder)
    caplog.set_level(logging.INFO, "megatron_zpp")
    config = parse(own + beside, 2)
    lines = [record.getMessage() for record in caplog.records]
    said = [line for line in lines if use.flag in line and "no effect" in line]
    if plain(use.flag) not in LIVE:
        assert len(said) == 1, lines
        default = without(beside) or config
        assert (config.model, config.training, config.batch) == (
            default.model, default.training, default.batch
        )  # fmt: skip
    if not said and use.flag not in ONLY_DEFAULT and config == without(beside):
        assert use.flag in beside or not beside
        pytest.fail(f"{' '.join(own)} changes nothing, and no line says why")


def without(beside: list[str]) -> object:
    """The configuration of what stands beside a flag; None where it cannot stand alone."""
    try:
        return parse(beside, 2)
    except InputError:
        return None


@pytest.mark.parametrize(
    "use",
    [use for use in USES if plain(use.flag) not in KNOWN and use.type != "Help"],
    ids=lambda use: use.flag,
)
def test_a_flag_that_is_not_here_names_what_is_missing(use, folder):
    message = refusal_of(use, folder)
    assert message is not None and message.startswith(f"{use.flag} is not available: ")
    assert len(message.removeprefix(f"{use.flag} is not available: ")) > 20


def test_every_pattern_of_what_is_missing_matches_a_flag_that_is_not_here():
    """Others would only catch slips of the keyboard, as of a flag that is here."""
    flags = [*(use.flag for use in USES), *fork_flags()]
    names = [name for flag in flags if (name := plain(flag)) not in KNOWN]
    for patterns in refused_flags().values():
        for pattern in patterns:
            regex = re.compile(pattern.replace("*", ".*"))
            assert any(map(regex.fullmatch, names)), pattern


def test_no_flag_is_live_and_said_to_change_nothing():
    idle = {plain(f"--{flag.name}") for flag in flags_without_effect()}
    assert len(idle) == len(flags_without_effect()) > 250 and not idle & LIVE.keys()
    assert idle | LIVE.keys() == KNOWN.keys()
    for name in LIVE:
        assert what_is_missing(name) == "", name


def test_every_flag_without_effect_is_one_of_megatrons():
    known = {plain(use.flag) for use in USES} | {plain(flag) for flag in fork_flags()}
    assert {plain(f"--{flag.name}") for flag in flags_without_effect()} <= known | OTHER_NAMES


def test_reasons_name_flags_that_are_live():
    for why in [*refused_flags(), *(flag.why_ignored for flag in flags_without_effect())]:
        for flag in re.findall(r"--([a-z][\w-]+)", why):
            assert plain(f"--{flag}") in LIVE.keys() | OF_OTHER_PROGRAMS, why
        assert len(why) > 10 and why[-1] != ".", why


def test_every_setting_is_read_somewhere():
    """A flag that fills a field which nothing reads would be accepted and ignored."""
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    read = {a or b for a, b in re.findall(r"\.(\w+)|[\"'](\w+)[\"']", source)}
    by_f_string = re.compile(
        r"lr_(wsd_)?(decay|warmup)_(iters|samples|tokens|fraction)|\w+_weighted_split_paths(_path)?"
    )
    for section in SECTIONS.values():
        for setting in settings_of(section):
            if by_f_string.fullmatch(setting.name):
                continue
            assert setting.name in read, f"{section.__name__}.{setting.name} is never read"

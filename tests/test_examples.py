"""Every example runs: JSON files, scripts, and what the README and the start pages tell to type."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from megatron_zpp.preprocess import PreprocessConfig, preprocess
from megatron_zpp.settings.config import TokenizerConfig
from tests.documents import START_PAGES, Document, problem
from tests.megatron_zpp.tokenizer.vocabularies import TEXTS, train_bpe
from tests.megatron_zpp.train.training_runs import log_of, loss_values
from tests.ranks import ranks
from zeropp import ZeroConfig

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PYTHON = {  # run by tests/test_python_examples.py, with the JSON that they read
    "train_engine.py", "ds_train_engine.json",
    "shard_hugging_face.py", "tensor_parallel_hugging_face.py", "ds_hugging_face.json",
    "attach_fsdp2.py",
    "standard_library.py", "docstrings.py",
    "deepspeed",  # by tests/test_deepspeed_examples.py
}  # fmt: skip
MIXZ = "ds_mixz_config.json"  # needs a model: run by tests/megatron_zpp/train/test_finetune.py
# These need nodes: the first is run by test_pretrain_local_steps.py, where the second is read.
ALONE = ("ds_local_steps_two_nodes.json", "ds_local_steps_elastic.json")
JSON_FILES = sorted(EXAMPLES.glob("*.json"))
JSON_FILES = [path for path in JSON_FILES if path.name not in (MIXZ, *ALONE, *PYTHON)]
SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 2 --lr-warmup-iters 1 "
    "--log-interval 1 --eval-iters 1 --num-workers 0 --save save --load save "
    "--tensorboard-dir board --data-path corpus_text_document --split 80,10,10 "
)
SCRIPTS = {
    "pretrain_gpt2_124m.sh": "--vocab-file vocab.json --merge-file merges.txt",
    "pretrain_llama_shape.sh": "--tokenizer-model tokenizer.json --num-query-groups 2 "
    "--ffn-hidden-size 64 --lr-wsd-decay-iters 1",
}
SLURM = "slurm.sh"
TUTORIAL = "pretrain_zeropp_18b.sh"
CLUSTER = EXAMPLES / "cluster"  # of which Ray's is run by hand only
PAGES = {  # what starts from nothing: page -> what its last command leaves behind, or prints
    "README.md": "checkpoints/corpus/latest_checkpointed_iteration.txt",
    "docs/start_megatron.md": "checkpoints/first/latest_checkpointed_iteration.txt",
    "docs/start_trainer.md": "sent for gradients, across_nodes",
    "docs/start_deepspeed.md": "weights/pytorch_model.bin",
}
SHORT = (
    "--train-iters 2 --lr-warmup-iters 1 --save-interval 2 --eval-iters 1 --log-interval 1 "
    "--num-workers 0"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus_text_document and the tokenizers' files, made as docs/ says."""
    folder = train_bpe(tmp_path_factory.mktemp("corpus"))
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    preprocess(
        PreprocessConfig(
            input=str(folder / "corpus.jsonl"),
            output_prefix=str(folder / "corpus"),
            append_eod=True,
            workers=1,
        ),
        TokenizerConfig(
            vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")
        ),
    )
    return folder


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for the PATH."""
    folder = tmp_path / "programs"
    folder.mkdir()
    return folder


def put(folder: Path, name: str, line: str) -> None:
    """A program of one line of shell."""
    (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    (folder / name).chmod(0o755)


def run(script: str, flags: str, programs: Path, folder: Path, **variables: str) -> str:
    """What an example prints when it is run in `folder` with these programs first on the PATH."""
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return printed([str(EXAMPLES / script), *flags.split()], folder, PATH=path, **variables)


def run_alone(script: str, flags: str, launcher: str, programs: Path, folder: Path) -> str:
    """What the program prints that an example launches, on one rank and without the launcher."""
    put(programs, launcher, 'printf "%s\\n" "$@"')
    words = run(script, flags, programs, folder).splitlines()
    program = next(index for index, word in enumerate(words) if word.endswith(".py"))
    return printed([sys.executable, *words[program:]], folder)


def printed(command: list[str], folder: Path, **variables: str) -> str:
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **settings, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_in_the_folder_is_untested() -> None:
    tested = {
        *SCRIPTS,
        SLURM,
        TUTORIAL,
        CLUSTER.name,
        MIXZ,
        *ALONE,
        *PYTHON,
        *(path.name for path in JSON_FILES),
    }
    names = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    assert names == tested and JSON_FILES


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_trains_with_small_sizes(name, corpus, programs) -> None:
    log = run_alone(name, SMALL + SCRIPTS[name], "zeropp", programs, corpus)
    losses = loss_values(log)
    assert len(losses) == 2 and all(4 < loss < 8 for loss in losses)  # ln 400 = 6.0
    assert "Finished" in log and "validation loss" in log
    assert re.search(r"checkpoints +save", log) and (corpus / "save/iter_0000002").is_dir()
    for folder in ("save", "board"):
        (corpus / folder).rename(corpus / f"{folder}-{name}")


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_asks_for_a_run_that_its_programs_accept(name, programs, tmp_path) -> None:
    put(programs, "zeropp", 'printf "%s\\n" zeropp "$@"')
    words = run(name, "", programs, tmp_path).splitlines()
    assert words[1] == str(ROOT / "pretrain_gpt.py")
    assert problem(["zeropp", "pretrain_gpt.py", *words[2:]]) is None
    assert "--no-such" in problem(["zeropp", "pretrain_gpt.py", *words[2:], "--no-such", "1"])


def test_slurm_script_starts_torchrun_once_on_each_machine(programs, tmp_path) -> None:
    put(programs, "scontrol", 'echo "first second" | tr " " "\\n"')
    put(programs, "srun", 'printf "%s\\n" "$@"')
    place = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "two", "SLURM_JOB_ID": "7"}
    words = run(SLURM, "", programs, tmp_path, SLURM_JOB_NUM_NODES="2", **place).splitlines()
    assert words[:2] == ["--kill-on-bad-exit=1", ".venv/bin/torchrun"]
    assert "first:29500" in words and words[words.index("--nnodes") + 1] == "2"
    assert problem(words[1:]) is None
    text = (EXAMPLES / SLURM).read_text()
    limit = re.search(r"#SBATCH --time=(\d+):00:00", text)[1]
    assert int(words[words.index("--exit-duration-in-mins") + 1]) < 60 * int(limit)


def test_tutorial_script_trains_with_small_sizes(corpus, programs) -> None:
    flags = SMALL + SCRIPTS["pretrain_gpt2_124m.sh"]
    log = run_alone(TUTORIAL, flags, "torchrun", programs, corpus)
    assert len(loss_values(log)) == 2 and "Finished" in log
    for folder in ("save", "board"):
        (corpus / folder).rename(corpus / f"{folder}-{TUTORIAL}")


def test_tutorial_script_starts_torchrun_for_the_machines_it_is_told(programs, tmp_path) -> None:
    put(programs, "torchrun", 'printf "%s\n" torchrun "$@"')
    words = run(TUTORIAL, "", programs, tmp_path, NODES="4", GPUS="8", FIRST="one").splitlines()
    assert words[:5] == ["torchrun", "--nnodes", "4", "--nproc-per-node", "8"]
    assert "one:29500" in words and str(ROOT / "pretrain_zeropp_gpt.py") in words
    assert problem(words) is None


def test_the_tutorials_json_is_what_has_an_effect_of_the_tutorials() -> None:
    ours = ZeroConfig.from_json(EXAMPLES / "ds_zeropp_config.json")
    tutorials = {
        "stage": 3, "reduce_bucket_size": 10000000, "reduce_scatter": True,
        "zero_quantized_weights": True, "zero_hpz_partition_size": 16,
        "zero_quantized_gradients": True, "contiguous_gradients": True, "overlap_comm": True,
    }  # fmt: skip
    theirs = ZeroConfig.from_json({"zero_optimization": tutorials})
    assert ours.zero_optimization == theirs.zero_optimization and len(theirs.notices()) == 1


@pytest.mark.parametrize("path", JSON_FILES, ids=lambda path: path.name)
@ranks(2)
def test_json_runs(path, tmp_path) -> None:
    config = ZeroConfig.from_json(path)
    assert not config.notices()
    log = log_of(f"--deepspeed_config {path} --micro-batch-size 2 --train-iters 2")
    if dist.get_rank() == 0:
        assert len(loss_values(log)) == 2
        assert re.search(rf"ZeRO stage +{config.stage}\n", log)


@pytest.fixture
def clone(tmp_path) -> Path:
    """A folder like a fresh clone after `make setup`, with 50 documents."""
    for path in ROOT.iterdir():
        if not path.name.startswith((".", "runs", "build", "data", "checkpoints")):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    for name in ("bin/activate", ".setup-done", ".setup-done-gguf", ".setup-done-test"):
        (tmp_path / ".venv" / name).touch()
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS[:50]]
    (tmp_path / "corpus.jsonl").write_text("".join(lines))
    return tmp_path


def typed(words: list[str], text: str, folder: Path) -> str:
    """What a command prints that is typed in the folder, with text as its input; runs are short."""
    program, *arguments = words
    output = None
    if ">" in arguments:
        arguments, output = arguments[: arguments.index(">")], folder / arguments[-1]
    if program == "source":
        assert (folder / arguments[0]).exists()
        return ""
    if program == "make":  # each target but setup is a command of minutes
        return printed([program, *(["-n"] if arguments != ["setup"] else []), *arguments], folder)
    if program == "cat":
        output.write_text(text)
        return ""
    programs = {"python": [], "zeropp": ["-m", "zeropp.ranks.launcher"]}
    short = SHORT.split() if "pretrain_gpt.py" in arguments else []
    said = printed([sys.executable, *programs[program], *arguments, *short], folder)
    if output is not None:
        output.write_text(said)
    return said


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_tells_to_type_runs_as_printed(page, clone) -> None:
    document = Document(page, (ROOT / page).read_text())
    said = "".join(typed(words, text, clone) for words, text in document.steps())
    assert {*PAGES} == {"README.md", *START_PAGES}
    assert "make setup" in (ROOT / page).read_text() and "type next" in said
    assert PAGES[page] in said or (clone / PAGES[page]).is_file(), said


def test_no_page_overwrites_a_file_of_another() -> None:
    written = [
        words[-1]
        for page in PAGES
        for words, _ in Document(page, (ROOT / page).read_text()).steps()
        if words[-2:-1] == [">"]
    ]
    assert len(written) >= 5 and len(written) == len({*written})


def words_of(script: str, folder: Path, **variables: str) -> list[str]:
    """The command that the script of a recipe for clusters starts with torchrun."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    put(programs, "torchrun", 'printf "%s\\0" torchrun "$@"')
    variables["PATH"] = f"{programs}:/usr/bin:/bin"
    return printed(["bash", "-euc", script], folder, **variables).split("\0")[:-1]


def test_every_pod_of_the_jobset_starts_torchrun_and_meets_in_the_first(tmp_path):
    jobset = yaml.safe_load((CLUSTER / "kubernetes_jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    words = words_of(container["args"][0], tmp_path)
    name = jobset["metadata"]["name"]
    port = container["ports"][0]["containerPort"]
    assert f"{name}-{job['name']}-0-0.{name}:{port}" in words
    assert int(words[words.index("--nnodes") + 1]) == pods["completions"] == pods["parallelism"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(words[words.index("--nproc-per-node") + 1]) == gpus
    assert problem(words) is None
    volumes = {volume["name"] for volume in pods["template"]["spec"]["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}


def test_every_machine_of_the_skypilot_task_starts_torchrun(tmp_path):
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    place = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    place |= {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    words = words_of(task["run"], tmp_path, **place)
    assert words[words.index("--master-addr") + 1] == "10.0.0.1"
    assert words[words.index("--node-rank") + 1] == "1" and task["num_nodes"] == 2
    assert problem(words) is None
    assert words[words.index("--save") + 1] in task["file_mounts"]
    assert problem(task["setup"].split()) is None


def test_the_image_is_made_of_files_that_exist():
    text = (ROOT / "Dockerfile").read_text()
    sources = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    assert {"csrc", "zeropp", "megatron_zpp", "pyproject.toml", "setup.py"} <= {*sources}
    assert [name for name in sources if not (ROOT / name).exists()] == []

"""`--profile`: a trace of some iterations, for Perfetto, chrome://tracing or TensorBoard."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_zpp.settings.run import LogConfig
from zeropp.atomic import write_atomically

FOLDER = "profile"  # in --tensorboard-dir


class StepProfiler:
    """Traces the iterations after `--profile-step-start`, up to `--profile-step-end`.

    Inside the block, `before_iteration` is called with the number of iterations made so far. A run
    that ends or resumes in between traces what it makes of them.
    """

    def __init__(self, config: LogConfig, rank: int) -> None:
        self._range = range(config.profile_step_start, config.profile_step_end)
        self._traces = config.profile and rank in config.profile_ranks
        self._folder = Path(config.tensorboard_dir or "") / FOLDER
        self._rank = rank
        self._profile: profile | None = None
        self._first = self._made = 0

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, *error: object) -> None:
        self._end(self._made + 1)

    def before_iteration(self, made: int) -> None:
        """Begin or end the trace if it is time; `made` is the number of iterations so far."""
        self._made = made
        if not self._traces:
            return
        if made not in self._range:
            self._end(made)
        elif self._profile is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._first, self._profile = made + 1, profile(activities=activities)
            self._profile.start()

    def _end(self, last: int) -> None:
        if self._profile is None:
            return
        finished, self._profile = self._profile, None
        finished.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{self._rank}.iterations-{self._first}-{last}.pt.trace.json"
        path = self._folder / name
        write_atomically(path, lambda file: finished.export_chrome_trace(file.name))

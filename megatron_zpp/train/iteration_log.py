"""Logs iterations when their numbers are there, and ends a run that is no longer finite."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_zpp.monitor.log_lines import duration
from megatron_zpp.monitor.loss_watch import LossWatch
from megatron_zpp.monitor.metrics import Interval, Iteration
from megatron_zpp.train.diagnosis import describe_spike, source_of_non_finite
from megatron_zpp.train.pending_iteration import PendingIteration
from megatron_zpp.train.run import Run
from zeropp import InputError


@dataclass(kw_only=True)
class IterationLog:
    """Logs the iterations of a run.

    On a GPU, an iteration is computed while the host logs the one before. `unread` is the last
    iteration if its numbers have not been read.
    """

    run: Run
    loss_watch: LossWatch = field(default_factory=LossWatch)
    unread: PendingIteration | None = None
    _has_announced_save: bool = False
    _has_logged: bool = False
    _unlogged: list[Iteration] = field(default_factory=list)

    def add(self, iteration: PendingIteration) -> None:
        """Add an iteration, which may be logged later than now; log the one before."""
        self.flush()
        self.unread = iteration
        if not self.run.ranks.asynchronous:
            self.flush()

    def flush(self) -> None:
        """Log the iteration that has not been logged, if there is one."""
        if self.unread is not None:
            unread, self.unread = self.unread, None
            self._log(unread)

    def end(self) -> None:
        """Log all iterations; all nodes do so after the same one."""
        self.flush()
        self._write()

    def _write(self) -> None:
        """Write what has not been written, with the means over replicas."""
        iterations, self._unlogged = self._unlogged, []
        for iteration in self._over_replicas(iterations):
            interval = self.run.metrics.iteration(iteration)
            if interval is None and not self._has_logged:
                self.run.console.line(
                    f"iteration {iteration.iteration}: loss {iteration.loss:.4f}; the log goes on "
                    f"every {self.run.config.log.log_interval} iterations"
                )
            self._has_logged = True
            if interval is not None and not self._has_announced_save:
                self._announce_save(interval)

    @property
    def _means_are_shared(self) -> bool:
        replicas = self.run.ranks.replicas
        return replicas.independent and not replicas.joins_and_leaves

    def _over_replicas(self, iterations: Sequence[Iteration]) -> list[Iteration]:
        """Return iterations with means over replicas, all of which call it.

        Replicas that join and leave log their own numbers.
        """
        if not self._means_are_shared or not iterations:
            return [*iterations]
        own = [
            number
            for each in iterations
            for number in (each.loss, each.empty_share, each.grad_norm or 0.0)
        ]
        replicas = self.run.ranks.replicas
        means = iter(total / replicas.count for total in replicas.sum(*own))
        return [
            replace(each, loss=next(means), empty_share=next(means), grad_norm=next(means))
            for each in iterations
        ]

    def _announce_save(self, interval: Interval) -> None:
        """Log when the next checkpoint is due; once, as soon as the time of a step is known."""
        self._has_announced_save = True
        last = interval.last.iteration
        due = self.run.next_save(last - 1)
        if due is not None and due > last:
            seconds = (due - last) * interval.seconds_per_iteration
            self.run.console.line(
                f"next checkpoint after iteration {due}, in about {duration(seconds)}"
            )

    def _log(self, pending: PendingIteration) -> None:
        """Wait for the numbers of an iteration and log them.

        Raises InputError for a loss or a norm that is not finite, and logs a line about a loss that
        is far above those before; both say where it comes from.
        """
        run, iteration, problem = self.run, pending.result(), pending.problem()
        first, end = pending.samples.start, pending.samples.stop
        advice = f"; --skip-samples {first}:{end} on resume leaves this batch out"
        if run.ranks.replicas.joins_and_leaves:  # where that is refused
            advice = ""
        if problem is not None:
            raise InputError(
                f"{problem} at iteration {iteration.iteration}, and no update was made; "
                f"{source_of_non_finite(run.trainer, run.batches, pending)}. Lower --lr, lengthen "
                f"--lr-warmup-iters, lower --clip-grad, or look at the data{advice}"
            )
        self._unlogged.append(iteration)
        is_due = iteration.iteration % run.config.log.log_interval == 0
        if not self._means_are_shared or is_due:
            self._write()
        warning = run.step_watch.warning(iteration.seconds) if run.step_watch else None
        if warning is not None:
            run.console.line(warning)
        mean = self.loss_watch.mean_below(iteration.loss)
        if mean is not None:
            run.console.line(
                f"iteration {iteration.iteration}: the loss {iteration.loss:.4g} is far above the "
                f"mean of {mean:.4g} before; {describe_spike(run.trainer, run.batches, pending)}"
                f"{advice}"
            )

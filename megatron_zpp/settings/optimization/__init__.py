"""How weights are updated: number formats, optimizers, schedules, and what is computed twice."""

"""What a run needs, and how long its steps take, before it is started."""

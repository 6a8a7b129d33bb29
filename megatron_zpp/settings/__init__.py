"""What a run is asked to do: flags, their defaults, and how they fit together."""

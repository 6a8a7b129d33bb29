"""ZeRO++ in other trainers; each module imports the library of its name, and nothing imports it."""

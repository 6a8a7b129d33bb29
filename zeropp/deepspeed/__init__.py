"""ZeRO++ in DeepSpeed's shape: `initialize`, the engine, `zero`."""

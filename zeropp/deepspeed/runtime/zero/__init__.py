"""`deepspeed.runtime.zero`."""

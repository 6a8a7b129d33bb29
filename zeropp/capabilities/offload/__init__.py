"""ZeRO-Offload: fp32 weights, moments and the step, or all weights, in host memory."""

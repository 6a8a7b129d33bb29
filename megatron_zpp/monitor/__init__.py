"""What a run reports: the console, TensorBoard, bytes, memory and throughput."""
